"""Pictures of items: the plane of each that is shown, a contrast for all of them, PNG.  NumPy and zlib alone."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import BadFileError
from daskstack.text import printable

Pixels: TypeAlias = NDArray[np.uint8]

PERCENTILES = (0.5, 99.5)
NAN_COLOUR = (214, 69, 35)
BOX = 8  # pixels along a side whose mean becomes one of a picture, at most


@dataclass(frozen=True)
class Look:
    """One item as people look at it.

    Attributes
    ----------
    name : str
        Its file, or its number.
    about : str
        Its labels.
    plane : array, shape (y, x) or (y, x, 3), optional
        Its middle plane, shrunk; None where there is none to see.
    stored : bool
        Whether the values are colours of 8 bits, to be shown as they are.
    problem : str
        Why there is no plane.
    """

    name: str
    about: str = ""
    plane: NDArray[np.float64] | None = None
    stored: bool = False
    problem: str = ""


def look(name: str, about: str, dims: Sequence[str], side: int, read: Callable[[], NDArray[Any] | None]) -> Look:
    """Read a plane and shrink it; whatever goes wrong is told in the picture's place."""
    try:
        plane = read()
        if plane is None:
            return Look(name, about, problem="large: not read for a thumbnail")
        shown = shrunk(with_samples_last(plane, dims), side)
        return Look(name, about, shown, stored=shown.ndim == 3 and plane.dtype == np.uint8)
    except BadFileError as exc:
        return Look(name, about, problem=exc.problem)
    except Exception as exc:  # noqa: BLE001  # a picture is no reason to stop
        return Look(name, about, problem=f"{type(exc).__name__}: {exc}")


def spaced(items: int, most: int) -> list[int]:
    """Evenly spaced items, the first and the last among them.

    Examples
    --------
    >>> spaced(100, 4), spaced(3, 8), spaced(9, 1)
    ([0, 33, 66, 99], [0, 1, 2], [4])
    """
    if most == 1:
        return [items // 2]
    return sorted({k * (items - 1) // (most - 1) for k in range(most)})


def plane_ndim(shape: Sequence[int], dims: Sequence[str]) -> int:
    """How many of an item's last axes a picture of it has: y and x, and the samples of colour.

    Examples
    --------
    >>> plane_ndim((9, 20, 30), ("z", "y", "x")), plane_ndim((20, 30, 3), ("y", "x", "s")), plane_ndim((5,), ("x",))
    (2, 3, 1)
    """
    return 3 if _samples_axis(shape, dims) is not None else min(2, len(shape))


def _samples_axis(shape: Sequence[int], dims: Sequence[str]) -> int | None:
    """Which of the last three axes holds the samples of colour: -1, -3 or none.

    Where axes have no names, a last axis of 3 or 4 after two longer ones is taken for it.
    """
    if len(shape) < 3:
        return None
    for axis in (-1, -3):
        if dims[axis] == "s" and shape[axis] in (3, 4):
            return axis
    unnamed = str(dims[-1]).startswith("dim_")
    return -1 if unnamed and shape[-1] in (3, 4) and min(shape[-3:-1]) > 4 else None


def with_samples_last(plane: NDArray[Any], dims: Sequence[str]) -> NDArray[Any]:
    """Colour as (y, x, 3), the fourth sample left out; of more axes than a picture has, the middle."""
    axis = _samples_axis(plane.shape, dims[len(dims) - plane.ndim :])
    flat: NDArray[Any] = plane[
        middle(plane.shape[: plane.ndim - plane_ndim(plane.shape, dims[len(dims) - plane.ndim :])])
    ]
    return flat if axis is None else np.moveaxis(flat, axis, -1)[..., :3]


def middle(shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the middle along each axis.

    Examples
    --------
    >>> middle((9, 4))
    (4, 2)
    """
    return tuple(n // 2 for n in shape)


def as_numbers(plane: NDArray[Any]) -> NDArray[np.float64]:
    """Values as float64: of complex numbers the magnitude, of dates and times their count, NaT as NaN.

    Raises
    ------
    TypeError
        They are no numbers.
    """
    if plane.dtype.kind not in "biufcmM":
        raise TypeError(f"no picture of {plane.dtype}")
    with np.errstate(all="ignore"):
        if plane.dtype.kind == "c":
            return np.asarray(np.abs(plane), np.float64)
        if plane.dtype.kind in "mM":
            return np.where(np.isnat(plane), np.nan, plane.astype("int64").astype(np.float64))
        return plane.astype(np.float64)


def shrunk(plane: NDArray[Any], side: int) -> NDArray[np.float64]:
    """A plane whose sides are at most ``side`` long: means over boxes, so that a NaN among them shows.

    Of one so large that a box had more than 8 x 8 pixels, those of every n-th row and column alone count.

    Parameters
    ----------
    plane : array, shape (), (x,), (y, x) or (y, x, 3)
    side : int

    Returns
    -------
    array, shape (y, x) or (y, x, 3)

    Examples
    --------
    >>> shrunk(np.arange(16.0).reshape(4, 4), 2).tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """
    whole = plane.reshape((1,) * (2 - plane.ndim) + plane.shape)
    if not whole.size:
        raise ValueError("no pixels")
    skip = max(1, max(whole.shape[:2]) // (side * BOX))
    image = as_numbers(whole[::skip, ::skip])
    box = -(-max(image.shape[:2]) // side)
    with np.errstate(all="ignore"):
        for axis in (0, 1):
            starts = np.arange(0, image.shape[axis], box)
            sizes = np.diff(np.append(starts, image.shape[axis])).reshape(
                [-1 if k == axis else 1 for k in range(image.ndim)]
            )
            image = np.add.reduceat(image, starts, axis=axis) / sizes
    return image


@dataclass(frozen=True)
class Contrast:
    """Which values become black and white, in all pictures of a sample alike."""

    low: float
    high: float
    caption: str


def contrast(looks: Sequence[Look]) -> Contrast:
    """The 0.5th and the 99.5th percentile of all finite values; the whole range where these are one.

    Examples
    --------
    >>> contrast([Look("a", plane=np.arange(201.0).reshape(1, -1))]).caption
    'black 1, white 199 (percentiles 0.5 and 99.5 of what is shown)'
    >>> contrast([Look("a", plane=np.array([[0.25, 0.25, 65535.0]]))]).caption
    'black 0.25, white 64880 (percentiles 0.5 and 99.5 of what is shown)'
    """
    planes = [one.plane for one in looks if one.plane is not None]
    if planes and all(one.stored for one in looks if one.plane is not None):
        return Contrast(0, 255, "colours as stored")
    values = np.concatenate([p[np.isfinite(p)] for p in planes] or [np.empty(0)])
    caption = "" if not any(np.isnan(p).any() for p in planes) else "; NaN red"
    if not values.size:
        return Contrast(0, 0, "no finite value" if planes else "nothing to see")
    low, high = (float(v) for v in np.percentile(values, PERCENTILES))
    how = f"percentiles {PERCENTILES[0]} and {PERCENTILES[1]} of what is shown"
    if low == high:
        low, high, how = float(values.min()), float(values.max()), "all there is"
    if low == high:
        return Contrast(low, high, f"{_level(low)} everywhere{caption}")
    return Contrast(low, high, f"black {_level(low)}, white {_level(high)} ({how}){caption}")


def _level(value: float) -> str:
    """Four digits, or all before the point of what a camera counts."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def painted(one: Look, values: Contrast) -> Pixels:
    """A picture's pixels, shape (y, x), or (y, x, 3) where it has colours or is NaN somewhere."""
    plane = one.plane
    if plane is None:
        raise ValueError(one.problem)
    low, high = (0.0, 255.0) if one.stored else (values.low, values.high)
    with np.errstate(all="ignore"):
        scaled = (plane - low) / (high - low) if high > low else np.where(np.isnan(plane), np.nan, 0.5)
        grey: Pixels = np.nan_to_num(255 * np.clip(scaled, 0, 1)).round().astype(np.uint8)
    missing = np.isnan(plane)
    if missing.any():
        grey = grey if grey.ndim == 3 else np.repeat(grey[..., None], 3, axis=2)
        grey[missing if missing.ndim == 2 else missing.any(axis=2)] = NAN_COLOUR
    return grey


def png(pixels: Pixels) -> bytes:
    r"""A PNG file of grey values, shape (y, x), or of colours, shape (y, x, 3).

    Examples
    --------
    >>> png(np.zeros((2, 3), "uint8"))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    height, width = pixels.shape[:2]
    rows = np.insert(pixels.reshape(height, -1), 0, 0, axis=1)  # a filter for each row: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def data_uri(pixels: Pixels) -> str:
    """The same as an address that holds the picture itself."""
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def pages_to_read(shape: Sequence[int], dims: Sequence[str], page_ndim: int) -> tuple[int, tuple[int, ...]]:
    """Which of an item's pages its middle plane needs: the first, and the shape of what they are together.

    Examples
    --------
    >>> pages_to_read((9, 20, 30), ("z", "y", "x"), 2), pages_to_read((20, 30, 3), ("y", "x", "s"), 2)
    ((4, (20, 30)), (0, (20, 30, 3)))
    """
    kept = max(page_ndim, plane_ndim(shape, dims))
    leading, together = tuple(shape[: len(shape) - kept]), tuple(shape[len(shape) - kept :])
    pages = math.prod(together[: kept - page_ndim])
    return (int(np.ravel_multi_index(middle(leading), leading)) * pages if leading else 0), together


def labelled(values: dict[str, Any]) -> str:
    """Labels of one item in words.

    Examples
    --------
    >>> labelled({"t": np.int64(3), "kind": "dark"})
    't 3, kind dark'
    """
    return ", ".join(f"{name} {printable(str(value))}" for name, value in values.items())
