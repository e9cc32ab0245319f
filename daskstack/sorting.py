"""Files in the order of their labels: sorted by some of them, or put into a grid of which they are the axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import LabelError, UsageError
from daskstack.names import LabelArrays
from daskstack.order import natural_key
from daskstack.text import count, listed, plural, printable

SHOWN_MISSING = 3


def sort_order(arrays: LabelArrays, sort_by: str | Iterable[str]) -> NDArray[np.int64]:
    """The stable order that sorts the files by the named labels, the first named counting most.

    Examples
    --------
    >>> sort_order({"t": np.array([2, 1, 2]), "kind": np.array(["b", "c", "a"])}, ["t", "kind"]).tolist()
    [1, 2, 0]
    """
    names = [sort_by] if isinstance(sort_by, str) else list(sort_by)
    for name in names:
        if name not in arrays:
            raise UsageError(
                f"sort_by={name!r}: there is no such label", f"choose from: {', '.join(arrays) or 'none (give labels)'}"
            )
    keys = [[natural_key(v) for v in a] if a.dtype.kind == "U" else a.tolist() for a in (arrays[n] for n in names)]
    rows = list(zip(*keys, strict=True))
    return np.array(sorted(range(len(rows)), key=rows.__getitem__), dtype=np.int64)


def grid_order(
    arrays: LabelArrays, axes: Sequence[str], names: Sequence[str]
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """The order that puts files into a grid whose axes are labels, and the shape of that grid.

    Parameters
    ----------
    arrays : dict of str to array, each of shape (files,)
        The labels.
    axes : sequence of str
        Those that are axes, the slowest first; each is sorted, numbers by value and text in natural order.
    names : sequence of str
        The files, for messages.

    Raises
    ------
    LabelError
        A position of the grid has no file, or two.

    Examples
    --------
    >>> order, grid = grid_order({"t": np.array([2, 1]), "c": np.array(["a", "a"])}, ["t", "c"], ["x", "y"])
    >>> order.tolist(), grid
    ([1, 0], (2, 1))
    """
    values, codes = zip(*(_coded(arrays[name]) for name in axes), strict=True)
    grid = tuple(len(v) for v in values)
    order = np.lexsort(codes[::-1])
    placed = np.stack(codes)[:, order]

    def text(at: Iterable[int]) -> str:
        return " ".join(f"{axis}={printable(str(v[int(k)]))}" for axis, v, k in zip(axes, values, at, strict=True))

    _refuse_twice(placed, [names[k] for k in order], text)
    total = math.prod(grid)
    if total > len(names):
        missing = [text(at) for at in _first_missing(placed, grid)]
        raise LabelError(
            f"{plural(total - len(names), 'position')} of {count(total)} of the grid ({', '.join(axes)}) "
            f"{'has' if total - len(names) == 1 else 'have'} no file: {', '.join(missing)}"
            f"{' ...' if total - len(names) > len(missing) else ''}",
            "add what is missing, or leave out its time, channel or the like by a pattern",
        )
    return order, grid


def _refuse_twice(placed: NDArray[np.int64], names: Sequence[str], text: Callable[[Iterable[int]], str]) -> None:
    """Name the positions, in order in the columns of ``placed``, that have several files."""
    begins = np.flatnonzero(np.append(True, (placed[:, 1:] != placed[:, :-1]).any(axis=0)))
    held = np.diff(np.append(begins, len(names)))
    several = np.flatnonzero(held > 1)
    if len(several):
        where = zip(begins[several].tolist(), held[several].tolist(), strict=True)
        places = [f"{text(placed[:, k])}: {listed(names[k : k + n])}" for k, n in where]
        raise LabelError(
            f"{plural(len(several), 'position')} of the grid {'has' if len(several) == 1 else 'have'} "
            f"{'two' if held.max() == 2 else 'several'} files: {listed(places, 2)}",
            "name an axis that tells them apart, or leave out what is not meant",
        )


def _first_missing(placed: NDArray[np.int64], grid: tuple[int, ...]) -> list[list[int]]:
    """The first positions of a grid that have no file; it may be too large for its positions to be listed."""
    most = placed.shape[1] + SHOWN_MISSING
    flat = np.zeros(placed.shape[1], dtype=np.int64)
    for code, n in zip(placed, grid, strict=True):
        flat = np.minimum(flat * n + code, most)  # 64 bits do not hold every position of a grid
    found = []
    for position in np.setdiff1d(np.arange(min(math.prod(grid), most)), flat)[:SHOWN_MISSING].tolist():
        at, rest = [], position
        for n in reversed(grid):
            rest, k = divmod(rest, n)
            at.append(k)
        found.append(at[::-1])
    return found


def _coded(values: NDArray[Any]) -> tuple[list[Any], NDArray[np.int64]]:
    """A label's different values, sorted, and for each file which of them it has."""
    unique, inverse = np.unique(values, return_inverse=True)
    if values.dtype.kind != "U":
        return unique.tolist(), inverse
    natural = sorted(range(len(unique)), key=lambda k: natural_key(str(unique[k])))
    rank = np.empty(len(unique), np.int64)
    rank[natural] = np.arange(len(unique))
    return [unique[k] for k in natural], rank[inverse]
