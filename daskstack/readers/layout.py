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
    head, tail : bytes
        All that lies before and behind its pixels.
    """

    stored: np.dtype[Any]
    rows: int
    head: bytes
    tail: bytes

    def agrees(self, head: bytearray, tail: bytearray) -> bool:
        """Whether a file of the same size says the same of its pixels, by what lies around them."""
        return head == self.head and tail == self.tail

    def locate(self, descriptor: int, head: memoryview, size: int) -> int | None:
        """Where the pixels of an open file begin that does not agree; None where it is laid out otherwise.

        Parameters
        ----------
        descriptor : int
            The file.
        head : memoryview
            Its first bytes.
        size : int
            Its length in bytes.
        """
        del descriptor, head, size  # a format whose files must agree has no other place
        return None


class LayoutReader:
    """Reads files that are laid out like the first one, one after another, in one thread."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._head, self._tail = bytearray(len(layout.head)), bytearray(len(layout.tail))
        self._begin = bytearray(len(layout.head) + MORE_HEAD)
        self._at_once = True  # whether the pixels of the file before lay where those of the first do

    def read(self, path: str, out: NDArray[Any], due: tuple[int, int] | None = None) -> bool:
        """Fill ``out`` with the pixels of one file; False where the library has to read it.

        Parameters
        ----------
        path : str
            The file.
        out : array
            Where its pixels go, C-contiguous, in native order; after False it may hold anything.
        due : (int, int), optional
            Size and mtime (ns) that the file must have once it is read.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                done = self._read(descriptor, as_bytes(out).data, due)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return False
        if done:
            to_native(out, self.layout.stored)
        return done

    def _read(self, descriptor: int, pixels: memoryview, due: tuple[int, int] | None) -> bool:
        """All of the file in one call where it is as long as the first and agrees; else by its own header."""
        got = 0
        if self._at_once:
            got = os.preadv(descriptor, [self._head, pixels, self._tail], 0)
            found = os.fstat(descriptor)
            agrees = got == found.st_size == len(self._head) + len(pixels) + len(self._tail)
            if agrees and self.layout.agrees(self._head, self._tail):
                return due is None or due == (found.st_size, found.st_mtime_ns)
        return self._read_by_header(descriptor, pixels, due, got)

    def _read_by_header(self, descriptor: int, pixels: memoryview, due: tuple[int, int] | None, got: int) -> bool:
        """The same where the pixels may lie elsewhere; ``got`` bytes of the file were read already."""
        head = memoryview(self._head)
        if got < len(head) or not got:
            head = memoryview(self._begin)[: os.preadv(descriptor, [self._begin], 0)]
        size = os.fstat(descriptor).st_size
        start = self.layout.locate(descriptor, head, size)
        self._at_once = start is None or start == len(self._head)
        if start is None or start + len(pixels) > size:
            return False
        done = max(0, got - start) if start == len(self._head) else 0
        read_at(descriptor, pixels[done:], start + done)
        found = os.fstat(descriptor)
        return due is None or due == (found.st_size, found.st_mtime_ns)


def to_native(out: NDArray[Any], stored: np.dtype[Any]) -> None:
    """Turn what was read as bytes of the stored dtype into native order, in place."""
    if stored == out.dtype:
        return
    if out.dtype.names is None:
        out.byteswap(inplace=True)
    else:  # each field has an order of its own
        out[...] = out.view(stored)
