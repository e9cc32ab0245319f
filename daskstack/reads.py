"""The block a task reads: small enough to travel, and everything that its reading needs."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import BadFileError, BadFilesError
from daskstack.readers import FunctionReader, Header, Layout, Reader
from daskstack.text import plural

T = TypeVar("T")

HEADER_THREADS = 8
ADVICE_FILES = "mend or leave out these files"


class ReadBlock(NamedTuple):
    """A block that was read: it, the files whose part of it is undefined, how many others a library had to parse."""

    array: NDArray[Any]
    bad: list[BadFileError]
    parsed: int


@dataclass(frozen=True, eq=False)
class BlockRead:
    """The block a task reads: its files, and which of their items; small, so that it can travel.

    Attributes
    ----------
    reader : Reader
        Reads each of them.
    packed : bytes
        The files' paths, compressed; in most stacks they differ by a number only.
    pieces : array of int64, shape (files, 3), optional
        For each file how many items it must hold, the first wanted and the one after the last; None
        where each is one item.
    due : Header
        What each item must be.
    items : int
        How many items the block holds.
    stamps : bytes
        Size and mtime of each file when it was listed, compressed.
    layout : Layout, optional
        How the file that gave ``due`` is laid out.
    """

    reader: Reader
    packed: bytes
    pieces: NDArray[np.int64] | None
    due: Header
    items: int
    stamps: bytes
    layout: Layout | None = None

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        """What Dask tells blocks apart by: all but the layout, which follows from it and would be pickled each time."""
        return self.reader, self.packed, self.pieces, self.due, self.items, self.stamps

    @property
    def paths(self) -> list[str]:
        """The files, in order."""
        return [os.fsdecode(p) for p in zlib.decompress(self.packed).split(b"\0")]

    def read(self) -> ReadBlock:
        """The block."""
        out = np.empty((self.items, *self.due.shape), self.due.dtype)
        pieces = None if self.pieces is None else [(int(r), int(a), int(b)) for r, a, b in self.pieces]
        stamps = list(zip(*self._stamps().tolist(), strict=True))
        fast = None if self.layout is None else self.layout.reader()
        paths = self.paths
        bad = self.reader.read_into(paths, out, self.due, pieces, fast, stamps=stamps)
        alike = len(paths) if isinstance(self.reader, FunctionReader) else fast.taken if fast else 0
        return ReadBlock(out, bad, max(0, len(paths) - alike - len(bad)))

    def _lengths(self) -> list[int]:
        """How many items of the block come from each of its files."""
        if self.pieces is None:
            return [1] * self.items
        return (self.pieces[:, 2] - self.pieces[:, 1]).tolist()  # type: ignore[no-any-return]

    def _stamps(self) -> NDArray[np.int64]:
        """Sizes and times of the files when they were listed."""
        return np.cumsum(np.frombuffer(zlib.decompress(self.stamps), "<i8").reshape(2, -1), axis=1, dtype=np.int64)

    def item_stamps(self) -> tuple[array[int], array[int]]:
        """Size and time of each item's file."""
        sizes, mtimes = np.repeat(self._stamps(), self._lengths(), axis=1)
        return array("q", sizes.tobytes()), array("q", mtimes.tobytes())

    def fill(self, out: NDArray[Any], bad: Sequence[BadFileError]) -> dict[int, str]:
        """Put the fill value in place of all items of bad files; which they are, and what was wrong."""
        problems = {b.path: b.problem for b in bad}
        filled: dict[int, str] = {}
        first = 0
        for path, length in zip(self.paths if problems else (), self._lengths(), strict=False):
            if path in problems:
                out[first : first + length] = fill_value(out.dtype)
                filled |= dict.fromkeys(range(first, first + length), problems[path])
            first += length
        return filled


def fill_value(dtype: np.dtype[Any]) -> Any:
    """What items of bad files hold where they are filled: NaN or NaT where the dtype has it, else zero.

    Examples
    --------
    >>> fill_value(np.dtype("f4")), fill_value(np.dtype("u2"))
    (np.float32(nan), np.uint16(0))
    """
    if dtype.kind in "fc":
        return dtype.type(np.nan)
    return dtype.type("NaT", np.datetime_data(dtype)) if dtype.kind in "mM" else np.zeros((), dtype)[()]


def packed_stamps(sizes: NDArray[np.int64], mtimes: NDArray[np.int64]) -> bytes:
    """Sizes and times as the bytes of their differences, which compress well."""
    return zlib.compress(np.diff([sizes, mtimes], prepend=0, axis=1).astype("<i8").tobytes(), 1)


def load_block(block: BlockRead, grid: tuple[int, ...]) -> NDArray[Any]:
    """What a delayed read does; ``grid`` is the shape of its items.

    Raises
    ------
    BadFilesError
        One report of all bad files of the block.
    """
    array, bad, _ = block.read()
    if bad:
        raise BadFilesError(f"{plural(len(bad), 'bad file')} in this block", ADVICE_FILES, bad)
    return array.reshape((*grid, *block.due.shape))


def in_threads(function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """The function of each row of the columns, in order; reading headers mostly waits."""
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        return list(pool.map(function, *columns))
