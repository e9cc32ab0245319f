"""Integer arithmetic on blocks: how many items one task takes, and where blocks begin and end.

Pure functions of numbers, tested against brute force.  A stack of ``n`` items is cut at ``bounds``,
an increasing array of integers from 0 to ``n``: block ``k`` is the items ``bounds[k]`` to
``bounds[k + 1]``, one Dask chunk, one task, one byte range of a ``.npy``.
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


def choose_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Chunks for an array of items: one item each; a large item is halved, tiny ones are joined.

    Examples
    --------
    >>> choose_chunks((20_000, 184, 184), 2), choose_chunks((100, 4096, 4096), 2), choose_chunks((1000, 10), 8)
    ((1, 184, 184), (1, 1024, 2048), (410, 10))
    """
    count, *item = shape
    while math.prod(item) * itemsize > MOST_CHUNK_NBYTES:
        longest = item.index(max(item))
        item[longest] = -(-item[longest] // 2)
    joined = max(1, -(-FEWEST_CHUNK_NBYTES // max(1, math.prod(item) * itemsize)))
    return (min(count, joined), *(max(1, n) for n in item))


def choose_shards(shape: Sequence[int], itemsize: int, chunks: Sequence[int], most_items: int) -> tuple[int, ...]:
    """Shards for given chunks: whole items, as many as a block usually takes, in whole chunks.

    A shard of more than 128 MiB is halved along the axes of the item, as long as whole chunks remain.

    Examples
    --------
    >>> choose_shards((20_000, 184, 184), 2, (1, 184, 184), 247)
    (247, 184, 184)
    >>> choose_shards((256, 2048, 2048), 2, (64, 64, 64), 2)
    (64, 512, 2048)
    """
    rows = max(1, most_items // chunks[0]) * chunks[0]
    grid = [-(-n // c) for n, c in zip(shape[1:], chunks[1:], strict=True)]
    while rows * math.prod(g * c for g, c in zip(grid, chunks[1:], strict=True)) * itemsize > MAX_BLOCK_NBYTES:
        axis = next((k for k, g in enumerate(grid) if g > 1), None)
        if axis is None:
            break
        grid[axis] = -(-grid[axis] // 2)
    return (rows, *(max(1, g) * c for g, c in zip(grid, chunks[1:], strict=True)))


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


def even_bounds(count: int, step: int) -> NDArray[np.int64]:
    """Bounds for blocks of ``step`` items each; the last may hold fewer.

    Examples
    --------
    >>> even_bounds(10, 4).tolist()
    [0, 4, 8, 10]
    """
    return np.append(np.arange(0, count, step, dtype=np.int64), count)
