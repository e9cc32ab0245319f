"""The fast path that formats share: files laid out like the first, their pixels read straight into place.

A library parses one file of the stack.  For each further one it is checked that all that decides where
its pixels lie and what they mean is the same; then they are read with preadv(2), which releases the
GIL, into their rows of the block: open, fstat, preadv, close.  Whatever differs sends a file through
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


@dataclass(frozen=True)
class Layout(ABC):
    """How the first file is laid out; small, so that it can travel.

    Attributes
    ----------
    skip : int
        Where its pixels begin.
    stored : numpy.dtype
        Their dtype, byte order included.
    rows : int
        How many items it holds.
    """

    skip: int
    stored: np.dtype[Any]
    rows: int

    @abstractmethod
    def locate(self, descriptor: int, head: bytearray, size: int, nbytes: int) -> int | None:
        """Where the pixels of an open file begin, or None where it is laid out otherwise.

        Parameters
        ----------
        descriptor : int
            The file.
        head : bytearray
            Its first bytes, as many as lie before the pixels of the first file.
        size : int
            Its length in bytes.
        nbytes : int
            How many bytes its pixels take.
        """

    def read(self, path: str, out: NDArray[Any], head: bytearray) -> bool:
        """Fill ``out`` with the pixels of one file; False where the library has to read it.

        ``out`` may hold anything after False.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                pixels = as_bytes(out).data
                # The head is as long as that of the first file: mostly, one call brings all there is.
                got = os.preadv(descriptor, [head, pixels], 0)
                if got < len(head):
                    return False
                start = self.locate(descriptor, head, size, len(pixels))
                if start is None or start + len(pixels) > size:
                    return False
                done = got - len(head) if start == len(head) else 0
                read_at(descriptor, pixels[done:], start + done)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            return False
        to_native(out, self.stored)
        return True


def to_native(out: NDArray[Any], stored: np.dtype[Any]) -> None:
    """Turn what was read as bytes of the stored dtype into native order, in place."""
    if stored == out.dtype:
        return
    if out.dtype.names is None:
        out.byteswap(inplace=True)
    else:  # each field has an order of its own
        out[...] = out.view(stored)
