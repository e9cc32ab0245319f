"""The fast path that formats share: files laid out like the first, their pixels read straight into place.

A library parses one file of the stack.  For each further one it is checked that all that decides where
its pixels lie and what they mean is the same; then they are read with preadv(2), which releases the
GIL, into their rows of the block: open, preadv, fstat, close.  Whatever differs sends a file through
the library instead, which gives the same pixels or names what is wrong.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.blocks import as_bytes
from daskstack.files import read_at

MOST_NBYTES = 1 << 16  # a layout travels with every block, and what lies around the pixels is read from each file
MORE_HEAD = 1 << 10  # what lies before the pixels may be longer in another file
SMALL_NBYTES = 1 << 18  # pixels that are read with what lies before them, for a call less
SWAPPED_NBYTES = 1 << 18  # at once: they stay in the cache of a core, and of records NumPy makes a copy meanwhile


@dataclass(frozen=True)
class Layout(ABC):
    """How the first file is laid out; small, so that it can travel.

    Attributes
    ----------
    stored : numpy.dtype
        The dtype of its pixels, byte order included.
    rows : int
        How many items it holds.
    """

    stored: np.dtype[Any]
    rows: int

    @abstractmethod
    def reader(self) -> LayoutReader:
        """What reads files that are laid out so, in one thread."""


class LayoutReader(ABC):
    """Reads files that are laid out like the first one, one after another, in one thread.

    Attributes
    ----------
    layout : Layout
        The layout.
    taken : int
        How many files it has read.
    """

    layout: Layout
    taken: int = 0

    def read(
        self, descriptor: int | None, out: NDArray[Any], start: int = 0, due: tuple[int, int] | None = None
    ) -> bool:
        """Fill ``out`` with pixels of one file; False where the library has to read it.

        Parameters
        ----------
        descriptor : int, optional
            The file, open; None where it could not be opened.
        out : array
            Where they go, C-contiguous, in native order; after False it may hold anything.
        start : int, optional
            How many bytes of the pixels come before those that are wanted.
        due : (int, int), optional
            Size and mtime (ns) that the file must have once it is read.
        """
        if descriptor is None:
            return False
        try:
            found = self._fill(descriptor, out, start)
        except Exception:  # noqa: BLE001  # whatever a decoder raises; the library meets it again and says it in its words
            return False
        if found is None or due not in (None, (found.st_size, found.st_mtime_ns)):
            return False
        self.taken += 1
        return True

    @abstractmethod
    def _fill(self, descriptor: int, out: NDArray[Any], start: int) -> os.stat_result | None:
        """What the system says of the file once it is read; None where it is laid out otherwise."""


@dataclass(frozen=True)
class RunLayout(Layout):
    """Pixels that are one run of bytes, stored as they are.

    Attributes
    ----------
    nbytes : int
        How many bytes they take.
    head, tail : bytes
        All that lies before and behind them.
    """

    nbytes: int
    head: bytes
    tail: bytes

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return len(self.head) + self.nbytes + len(self.tail)

    def reader(self) -> RunReader:
        return RunReader(self)

    def agrees(self, head: bytearray, tail: bytearray) -> bool:
        """Whether a file of the same size says the same of its pixels, by what lies around them."""
        return head == self.head and tail == self.tail

    def locate(self, descriptor: int, head: memoryview, size: int) -> int | None:
        """Where the pixels of an open file begin; None where it is laid out otherwise.

        Parameters
        ----------
        descriptor : int
            The file.
        head : memoryview
            Its first bytes.
        size : int
            Its length in bytes.
        """
        if size != self.size:
            return None
        tail = bytearray(os.pread(descriptor, len(self.tail), size - len(self.tail)))
        return len(self.head) if self.agrees(bytearray(head[: len(self.head)]), tail) else None


class RunReader(LayoutReader):
    """Reads runs of bytes straight into place: a file at one go where it is laid out just like the first."""

    layout: RunLayout

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self._head, self._tail = bytearray(len(layout.head)), bytearray(len(layout.tail))
        self._begin = bytearray(len(layout.head) + MORE_HEAD + (layout.nbytes if layout.nbytes <= SMALL_NBYTES else 0))
        self._at_once = True  # whether the pixels of the file before lay where those of the first do

    def _fill(self, descriptor: int, out: NDArray[Any], start: int) -> os.stat_result | None:
        pixels = as_bytes(out).data
        got, found = 0, None
        if self._at_once and len(pixels) == self.layout.nbytes:
            got = os.preadv(descriptor, [self._head, pixels, self._tail], 0)
            found = self._agreed(descriptor, got)
        if found is None:
            found = self._read_by_header(descriptor, pixels, start, got)
        if found is not None:
            to_native(out, self.layout.stored)
        return found

    def _agreed(self, descriptor: int, got: int) -> os.stat_result | None:
        """What the system says of the file that was read, where it is as long as the first and agrees."""
        found = os.fstat(descriptor)
        agrees = got == found.st_size == self.layout.size and self.layout.agrees(self._head, self._tail)
        return found if agrees else None

    def _read_by_header(self, descriptor: int, pixels: memoryview, start: int, got: int) -> os.stat_result | None:
        """The same where the pixels may lie elsewhere; ``got`` bytes of the file were read already."""
        head = memoryview(self._head)
        if got < len(head) or not got:
            head, got = memoryview(self._begin), 0
            head = head[: os.preadv(descriptor, [head], 0)]
        found = os.fstat(descriptor)
        begin = self.layout.locate(descriptor, head, found.st_size)
        self._at_once = begin is None or begin == len(self._head)
        if begin is None or begin + self.layout.nbytes > found.st_size:
            return None
        if got and begin == len(self._head):
            done = got - begin
        else:
            there = head[begin + start :][: len(pixels)]
            done = len(there)
            pixels[:done] = there
        read_at(descriptor, pixels[done:], begin + start + done)
        return found if len(head) == found.st_size else os.fstat(descriptor)


def to_native(out: NDArray[Any], stored: np.dtype[Any]) -> None:
    """Turn what was read as bytes of the stored dtype into native order, in place.

    A piece is copied over itself, which NumPy does several times faster than its own ``byteswap(inplace=True)``.
    """
    if stored == out.dtype:
        return
    flat = out.reshape(-1)
    step = max(1, SWAPPED_NBYTES // out.dtype.itemsize)
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        part[...] = part.view(stored)
