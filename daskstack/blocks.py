"""Integer arithmetic on blocks: how many items one task takes, and where blocks begin and end.

Pure functions of numbers, tested against brute force.  A stack of ``n`` items is cut at ``bounds``,
an increasing array of integers from 0 to ``n``: block ``k`` is the items ``bounds[k]`` to
``bounds[k + 1]``, one Dask chunk, one task, one byte range of a ``.npy``.  Items may form a grid (times
and channels, say): then each block is a rectangle of it that is one run of items in C order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import UsageError

BLOCK_NBYTES = 16 << 20  # large enough that a task's own cost (0.1 ms) is nothing beside its reading
MAX_BLOCK_NBYTES = 128 << 20
FEWEST_BLOCKS = 64  # small outputs too are spread over the cores and show progress
MOST_CHUNK_NBYTES = 4 << 20  # a larger image is split, so that a part of it can be read alone
FEWEST_CHUNK_NBYTES = 32 << 10  # smaller images are joined: each chunk costs its compression and an entry in the index
MOST_BLOCKS = 4_000  # what a Dask scheduler takes in its stride


def items_per_block(count: int, item_nbytes: int) -> int:
    """How many items one block takes when nobody says.

    Parameters
    ----------
    count : int
        Number of items.
    item_nbytes : int
        Size of one item in bytes.

    Returns
    -------
    int
        As many as make 16 MiB, but at most a 64th of all; for huge outputs more, so that there are
        at most about 4,000 blocks, of at most 128 MiB; never less than one.

    Examples
    --------
    >>> items_per_block(220_000, 184 * 184 * 2)
    247
    >>> items_per_block(25, 384 * 384 * 2)
    1
    """
    size = max(1, item_nbytes)
    items = min(BLOCK_NBYTES // size, -(-count // FEWEST_BLOCKS))
    items = max(items, min(-(-count // MOST_BLOCKS), MAX_BLOCK_NBYTES // size))
    return max(1, items)


def cut(file_rows: NDArray[np.int64], items: int, most_items: int) -> NDArray[np.int64]:
    """Where blocks of about ``items`` items begin and end, given how many items each file holds.

    A block takes whole files as long as they fit; a file of more items is a block by itself, and is cut
    only where it holds more than ``most_items``: what reads a part of a file often parses all of it.

    Parameters
    ----------
    file_rows : array of int, shape (files,)
        Number of items in each file, in order; 1 each where a file is an item.
    items : int
        Most items in a block of several files.
    most_items : int
        Most items in any block.

    Returns
    -------
    array of int, shape (blocks + 1,)
        The bounds, from 0 to the number of items.

    Examples
    --------
    >>> cut(np.array([1, 1, 1, 1, 1]), 2, 100).tolist()
    [0, 2, 4, 5]
    >>> cut(np.array([3, 2, 9, 25]), 5, 10).tolist()
    [0, 5, 14, 24, 34, 39]
    """
    ends = np.cumsum(file_rows, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    bounds = [0]
    while bounds[-1] < total:
        begin = bounds[-1]
        whole = int(np.searchsorted(ends, begin + items, side="right")) - 1  # the last file that ends within reach
        if whole >= 0 and ends[whole] > begin:
            bounds.append(int(ends[whole]))
        else:
            this_end = int(ends[np.searchsorted(ends, begin, side="right")])
            bounds.append(min(this_end, begin + most_items))
    return np.array(bounds, dtype=np.int64)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a C-contiguous array, without a copy, whatever its dtype (a buffer knows no datetime64)."""
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def tile_of(grid: Sequence[int], items: int) -> tuple[int, ...]:
    """The largest part of a grid that is one run of its items, in C order, and holds ``items`` at most.

    Examples
    --------
    >>> tile_of((10, 3, 4), 5), tile_of((10, 3, 4), 8), tile_of((10, 3, 4), 30), tile_of((100,), 30)
    ((1, 1, 4), (1, 2, 4), (2, 3, 4), (30,))
    """
    tile = [1] * len(grid)
    for axis in reversed(range(len(grid))):
        held = math.prod(tile)
        tile[axis] = max(1, min(grid[axis], items // max(1, held)))
        if tile[axis] < grid[axis]:
            break
    return tuple(tile)


def run_bounds(grid: Sequence[int], tile: Sequence[int]) -> NDArray[np.int64]:
    """Where the tiles of a grid begin and end, each being a run of its items; those at the far edge may be smaller.

    Examples
    --------
    >>> run_bounds((10,), (4,)).tolist(), run_bounds((2, 3, 4), (1, 2, 4)).tolist()
    ([0, 4, 8, 10], [0, 8, 12, 20, 24])
    """
    level = _level(tile)
    before, along, behind = math.prod(grid[:level]), grid[level], math.prod(grid[level + 1 :])
    begins = np.add.outer(np.arange(before) * along, np.arange(0, along, tile[level])) * behind
    return np.append(begins.ravel(), math.prod(grid)).astype(np.int64)


def chunks_along(grid: Sequence[int], bounds: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """The chunks along each axis of a grid whose tiles have these bounds.

    Examples
    --------
    >>> chunks_along((10,), np.array([0, 3, 10])), chunks_along((2, 3, 4), run_bounds((2, 3, 4), (1, 2, 4)))
    (((3, 7),), ((1, 1), (2, 1), (4,)))
    """
    if len(grid) == 1:
        return (tuple(np.diff(bounds).tolist()),)
    chunks = []
    for axis, n in enumerate(grid):
        step = max(1, min(n, int(bounds[1]) // math.prod(grid[axis + 1 :])))
        chunks.append(tuple(min(step, n - k) for k in range(0, n, step)))
    return tuple(chunks)


def _level(tile: Sequence[int]) -> int:
    """The axis along which a run is cut: the first along which it holds more than one entry."""
    return next((axis for axis, n in enumerate(tile) if n > 1), len(tile) - 1)


def choose_chunks(grid: Sequence[int], item: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Chunks for a grid of items: one item each; a large item is halved, tiny ones are joined.

    Examples
    --------
    >>> choose_chunks((20_000,), (184, 184), 2), choose_chunks((9, 9), (4096, 4096), 2), choose_chunks((9, 9), (10,), 8)
    ((1, 184, 184), (1, 1, 1024, 2048), (9, 9, 10))
    """
    sizes = list(item)
    while math.prod(sizes) * itemsize > MOST_CHUNK_NBYTES:
        longest = sizes.index(max(sizes))
        sizes[longest] = -(-sizes[longest] // 2)
    joined = max(1, -(-FEWEST_CHUNK_NBYTES // max(1, math.prod(sizes) * itemsize)))
    return (*tile_of(grid, joined), *(max(1, n) for n in sizes))


def choose_shards(
    grid: Sequence[int], item: Sequence[int], itemsize: int, chunks: Sequence[int], most_items: int
) -> tuple[int, ...]:
    """Shards for given chunks: whole items, as many as a block usually takes, in whole chunks, one run of the grid.

    A shard of more than 128 MiB is halved along the axes of the item, as long as whole chunks remain.

    Examples
    --------
    >>> choose_shards((20_000,), (184, 184), 2, (1, 184, 184), 247)
    (247, 184, 184)
    >>> choose_shards((256,), (2048, 2048), 2, (64, 64, 64), 2)
    (64, 512, 2048)
    >>> choose_shards((100, 3), (10, 10), 2, (5, 1, 10, 10), 40)
    (10, 3, 10, 10)
    """
    axes = len(grid)
    held = chunks[:axes]
    counts = [-(-n // c) for n, c in zip(grid, held, strict=True)]
    tile = tile_of(counts, most_items // math.prod(held))
    rows = as_run(grid, [t * c for t, c in zip(tile, held, strict=True)], held)
    sizes = [-(-n // c) for n, c in zip(item, chunks[axes:], strict=True)]
    while math.prod(rows) * math.prod(n * c for n, c in zip(sizes, chunks[axes:], strict=True)) * itemsize > (
        MAX_BLOCK_NBYTES
    ):
        axis = next((k for k, n in enumerate(sizes) if n > 1), None)
        if axis is None:
            break
        sizes[axis] = -(-sizes[axis] // 2)
    return (*rows, *(max(1, n) * c for n, c in zip(sizes, chunks[axes:], strict=True)))


def as_run(grid: Sequence[int], tile: Sequence[int], step: Sequence[int]) -> tuple[int, ...]:
    """A tile made one run of the grid: all (in whole steps) behind the first axis along which it holds several.

    Examples
    --------
    >>> as_run((100, 3), (10, 2), (5, 2)), as_run((100, 3), (1, 2), (1, 1))
    ((10, 4), (1, 2))
    """
    level = _level(tile)
    behind = [-(-n // s) * s for n, s in zip(grid[level + 1 :], step[level + 1 :], strict=True)]
    return (*tile[: level + 1], *behind)


def fit_chunks(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Chunks as asked for, none larger than its axis; -1 is the whole axis.

    Raises
    ------
    UsageError
        There are not as many as axes, or one is no size.

    Examples
    --------
    >>> fit_chunks((256, 2048, 100), (64, -1, 128))
    (64, 2048, 100)
    """
    if len(chunks) != len(shape) or not all(c == -1 or c >= 1 for c in chunks):
        asked = ",".join(map(str, chunks))
        raise UsageError(f"chunks {asked} for an array of {len(shape)} axes", "give a size, or -1, for each axis")
    return tuple(max(1, n if c == -1 else min(c, n)) for n, c in zip(shape, chunks, strict=True))


def fit_shards(shape: Sequence[int], shards: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Shards as asked for; -1 is the whole axis, in whole chunks.

    Raises
    ------
    UsageError
        One is not a multiple of its chunk; the nearest that fits is named.

    Examples
    --------
    >>> fit_shards((256, 2048, 100), (64, -1, 100), (64, 64, 100))
    (64, 2048, 100)
    """
    if len(shards) != len(shape) or not all(s == -1 or s >= 1 for s in shards):
        asked = ",".join(map(str, shards))
        raise UsageError(f"shards {asked} for an array of {len(shape)} axes", "give a size, or -1, for each axis")
    whole = [n if s == -1 else s for n, s in zip(shape, shards, strict=True)]
    near = tuple(-(-w // c) * c for w, c in zip(whole, chunks, strict=True))
    if any(s not in (-1, n) for s, n in zip(shards, near, strict=True)):
        raise UsageError(
            f"shards {','.join(map(str, shards))} are not whole chunks of {','.join(map(str, chunks))}",
            f"the nearest that fits: {','.join(map(str, near))}",
        )
    return near
