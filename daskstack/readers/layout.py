"""The fast path that formats share: files laid out like the first, their pixels read straight into place.

A library parses one file of the stack.  For each further one it is checked that all that decides where
its pixels lie and what they mean is the same; then they are read with preadv(2), which releases the
GIL, into their rows of the block: open, preadv, fstat, close.  Whatever differs sends a file through
the library instead, which gives the same pixels or names what is wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.blocks import as_bytes
from daskstack.files import read_at

MOST_NBYTES = 1 << 16  # a layout travels with every block, and what lies around the pixels is read from each file
MORE_HEAD = 1 << 10  # what lies before the pixels may be longer in another file


@dataclass(frozen=True)
class Layout:
    """How the first file is laid out: its pixels are one run of bytes.  Small, so that it can travel.

    Attributes
    ----------
    stored : numpy.dtype
        Their dtype, byte order included.
    rows : int
        How many items it holds.
    nbytes : int
        How many bytes its pixels take.
    head, tail : bytes
        All that lies before and behind them.
    """

    stored: np.dtype[Any]
    rows: int
    nbytes: int
    head: bytes
    tail: bytes

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return len(self.head) + self.nbytes + len(self.tail)

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
        tail = bytearray(os.pread(descriptor, len(self.tail), size - len(self.tail)))
        agrees = size == self.size and self.agrees(bytearray(head[: len(self.head)]), tail)
        return len(self.head) if agrees else None


class LayoutReader:
    """Reads files that are laid out like the first one, one after another, in one thread.

    Attributes
    ----------
    taken : int
        How many it has read.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.taken = 0
        self._head, self._tail = bytearray(len(layout.head)), bytearray(len(layout.tail))
        self._begin = bytearray(len(layout.head) + MORE_HEAD)
        self._at_once = True  # whether the pixels of the file before lay where those of the first do

    def read(self, path: str, out: NDArray[Any], start: int = 0, due: tuple[int, int] | None = None) -> bool:
        """Fill ``out`` with pixels of one file; False where the library has to read it.

        Parameters
        ----------
        path : str
            The file.
        out : array
            Where they go, C-contiguous, in native order; after False it may hold anything.
        start : int, optional
            How many bytes of the pixels come before those that are wanted.
        due : (int, int), optional
            Size and mtime (ns) that the file must have once it is read.
        """
        pixels = as_bytes(out).data
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                got, found = 0, None
                if self._at_once and len(pixels) == self.layout.nbytes:
                    got = os.preadv(descriptor, [self._head, pixels, self._tail], 0)
                    found = self._agreed(descriptor, got)
                if found is None:
                    found = self._read_by_header(descriptor, pixels, start, got)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return False
        if found is None or due not in (None, (found.st_size, found.st_mtime_ns)):
            return False
        to_native(out, self.layout.stored)
        self.taken += 1
        return True

    def _agreed(self, descriptor: int, got: int) -> os.stat_result | None:
        """What the system says of the file once it is read, where it is as long as the first and agrees."""
        found = os.fstat(descriptor)
        agrees = got == found.st_size == self.layout.size and self.layout.agrees(self._head, self._tail)
        return found if agrees else None

    def _read_by_header(self, descriptor: int, pixels: memoryview, start: int, got: int) -> os.stat_result | None:
        """The same where the pixels may lie elsewhere; ``got`` bytes of the file were read already."""
        head = memoryview(self._head)
        if got < len(head) or not got:
            head = memoryview(self._begin)[: os.preadv(descriptor, [self._begin], 0)]
        size = os.fstat(descriptor).st_size
        begin = self.layout.locate(descriptor, head, size)
        self._at_once = begin is None or begin == len(self._head)
        if begin is None or begin + self.layout.nbytes > size:
            return None
        done = max(0, got - begin) if begin == len(self._head) else 0
        read_at(descriptor, pixels[done:], begin + start + done)
        return os.fstat(descriptor)


def to_native(out: NDArray[Any], stored: np.dtype[Any]) -> None:
    """Turn what was read as bytes of the stored dtype into native order, in place."""
    if stored == out.dtype:
        return
    if out.dtype.names is None:
        out.byteswap(inplace=True)
    else:  # each field has an order of its own
        out[...] = out.view(stored)
