"""A cast of numbers that changes none of them: each is held exactly, or there is an error that says which is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from daskstack.errors import BadFileError, UsageError

WIDEST = 16  # bytes of a number that may be cast; what is wider would need more memory than is planned for
DTYPES = "give one such as uint16, int32 or float32"
SLAB = 1 << 18  # numbers cast at a time


def can_hold_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether it is a dtype of numbers: bool, integers, floats or complex ones."""
    return dtype.kind in "biufc"


def number_dtype(dtype: npt.DTypeLike) -> str:
    """The name of a dtype of numbers.

    Raises
    ------
    UsageError
        It is none.
    """
    try:
        found = np.dtype(dtype)
    except TypeError as exc:
        raise UsageError(f"dtype={dtype!r}: {exc}", DTYPES) from exc
    if not can_hold_numbers(found) or found.itemsize > WIDEST:
        raise UsageError(f"dtype={found.name} is none of numbers", DTYPES)
    return found.name


def cast_exactly(path: str, stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill ``out`` with the numbers of ``stored``, C-contiguous and of the same shape.

    Raises
    ------
    BadFileError
        A number is not held exactly; NaN is held by floats alone.
    """
    source, target = stored.reshape(-1), out.reshape(-1) if out.flags.c_contiguous else out.flat
    for at in range(0, len(source), SLAB):
        slab = source[at : at + SLAB]
        with np.errstate(all="ignore"):  # what does not fit is found below
            cast = (slab.real if out.dtype.kind != "c" else slab).astype(out.dtype)
            wrong = ~_equal(slab, cast)
        if wrong.any():
            first = int(wrong.argmax())
            place = tuple(map(int, np.unravel_index(at + first, stored.shape)))[1:]
            value = f"the value {slab[first]} at {place}"
            raise BadFileError(path, value, f"what {out.dtype} holds exactly, as dtype={out.dtype} asks for")
        target[at : at + SLAB] = cast


def _equal(slab: NDArray[Any], cast: NDArray[Any]) -> NDArray[np.bool_]:
    """Where numbers are the same before and after a cast."""
    equal: NDArray[np.bool_]
    if "c" in slab.dtype.kind + cast.dtype.kind:
        equal = _equal(slab.real, cast.real) & _equal(slab.imag, cast.imag)
    elif slab.dtype.kind == "f":
        equal = (cast.astype(slab.dtype) == slab) & _within(slab, cast.dtype)
        if cast.dtype.kind == "f":
            equal |= np.isnan(slab) & np.isnan(cast)
    elif cast.dtype.kind == "f":
        equal = (cast.astype(slab.dtype) == slab) & _within(cast, slab.dtype)
    else:  # the limits are those of both: NumPy compares with no number beyond an array's own dtype
        limits = _limits(slab.dtype), _limits(cast.dtype)
        equal = (slab >= max(low for low, _ in limits)) & (slab <= min(high for _, high in limits))
    return equal


def _within(floats: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Where floats are in the range of a dtype; to an integer, a cast of others is what the processor makes of it."""
    if dtype.kind == "f":
        return np.ones(floats.shape, bool)
    low, high = _limits(dtype)
    wide = floats.astype(np.promote_types(floats.dtype, np.float64))  # which holds the powers of two
    within: NDArray[np.bool_] = (wide >= low) & (wide < float(high + 1))
    return within


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
