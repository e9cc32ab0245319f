"""NumPy's .npy, header versions 1 to 3.

The header is parsed here, along the format's description (numpy.lib.format, NEP 1), since NumPy has
no public function for version 3, and its others refuse the long headers of record arrays.
"""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from daskstack.blocks import as_bytes
from daskstack.errors import BadFileError
from daskstack.files import read_at
from daskstack.readers.base import Array, Contents, Reader, dims, open_regular, refuse_foreign
from daskstack.readers.layout import Layout, RunLayout, to_native

MAGIC = b"\x93NUMPY"
FIRST_READ = 4096
MOST_HEADER_BYTES = 1 << 20
SLAB_NBYTES = 4 << 20
MOST_AXES = 60  # NumPy holds 64
MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class NpyHeader:
    """Where the data of a .npy file lies and what it means."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def size(self) -> int:
        """How long the file must be."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class NpyReader(Reader):
    """Reads .npy files without memory maps; object arrays are refused, nothing is ever unpickled."""

    suffixes: ClassVar[tuple[str, ...]] = (".npy",)
    alike_in_size: ClassVar[bool] = True

    @contextmanager
    def open(self, path: str) -> Iterator[Contents]:
        """Open the file and hold its header against its size."""
        with open_regular(path) as (descriptor, size):
            header = read_header(path, descriptor)
            if size != header.size:
                more = size > header.size and os.pread(descriptor, len(MAGIC), header.size) == MAGIC
                found = f"{size} bytes{', several arrays one after another' if more else ''}"
                raise BadFileError(path, found, f"{header.size} for {header.shape} {header.dtype} as its header says")

            def read(out: Array, start: int) -> None:
                if header.fortran and len(header.shape) > 1:
                    _read_fortran(descriptor, header, out, start)
                else:
                    read_at(descriptor, as_bytes(out).data, header.offset + start * (out.nbytes // max(1, len(out))))
                    to_native(out, header.dtype)

            yield Contents(header.shape, header.dtype, max(0, len(header.shape) - 1), read, dims=dims(header.shape))

    def layout(self, path: str) -> Layout | None:
        with open_regular(path) as (descriptor, _):
            header = read_header(path, descriptor)
            text = os.pread(descriptor, header.offset, 0)
        if header.fortran and len(header.shape) > 1:
            return None
        rows = 1 if self.join == "stack" else header.shape[0]
        return RunLayout(header.dtype, rows, header.size - header.offset, text, b"")


def _read_fortran(descriptor: int, header: NpyHeader, out: Array, start: int) -> None:
    """Read entries along axis 0 of an array in Fortran order: slab by slab along its last axis, which is the
    slowest there, so that no more than a slab is held.
    """
    if not out.size:
        return
    *leading, last = header.shape
    step = math.prod(leading) * header.dtype.itemsize
    at_once = max(1, min(SLAB_NBYTES, out.nbytes) // step)
    for k in range(0, last, at_once):
        slab = np.empty((min(at_once, last - k), *leading[::-1]), header.dtype)
        read_at(descriptor, as_bytes(slab).data, header.offset + k * step)
        out[..., k : k + len(slab)] = slab.T[start : start + len(out)]


def read_header(path: str, descriptor: int) -> NpyHeader:
    """Parse the header of an open file.

    Raises
    ------
    BadFileError
        It is no .npy file, its header is damaged, or it holds pickled objects.
    """
    head = os.pread(descriptor, FIRST_READ, 0)
    if not head.startswith(MAGIC):
        raise refuse_foreign(path, head, "a .npy file")
    if len(head) < 10 or head[6] not in (1, 2, 3) or head[7]:
        version = f"{head[6]}.{head[7]}" if len(head) > 7 else "none"
        raise BadFileError(path, f"a .npy header of version {version}", "1.0, 2.0 or 3.0")
    begin = 10 if head[6] == 1 else 12
    length = int.from_bytes(head[8:begin], "little")
    if length > MOST_HEADER_BYTES:
        raise BadFileError(path, f"a .npy header of {length} bytes", f"at most {MOST_HEADER_BYTES}")
    if begin + length > len(head):
        head = os.pread(descriptor, begin + length, 0)
    if begin + length > len(head):
        raise BadFileError(path, f"{len(head)} bytes", f"a header of {begin + length}")
    try:
        return _parse(head[begin : begin + length], begin + length, "utf-8" if head[6] == 3 else "latin-1")
    except (ValueError, SyntaxError, TypeError, LookupError, MemoryError, RecursionError) as exc:
        raise BadFileError(path, f"a .npy header that cannot be read: {exc}") from exc


@lru_cache(maxsize=256)
def _parse(text: bytes, offset: int, encoding: str) -> NpyHeader:
    """The header's dictionary, checked; cached, since in a stack nearly all are alike."""
    source = text.decode(encoding).strip(" \t\n")  # no more than NumPy does
    header = _literal(source) or _literal(re.sub(r"(?<=\d)L\b", "", source))  # Python 2 wrote long integers as 5L
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"it is no dictionary of descr, fortran_order and shape: {source[:200]!r}")
    shape, fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its shape is {shape!r}")
    if fortran not in (True, False):
        raise ValueError(f"its fortran_order is {fortran!r}")
    dtype = np.lib.format.descr_to_dtype(header["descr"])
    if dtype.hasobject:
        raise ValueError("it holds Python objects (a pickle), which are never loaded; save plain numbers")
    if dtype.shape or not dtype.itemsize:
        raise ValueError(f"its dtype is {header['descr']!r}")
    if len(shape) > MOST_AXES or math.prod(max(1, n) for n in shape) * dtype.itemsize > MOST_BYTES:
        raise ValueError(f"its shape is {shape!r}")
    return NpyHeader(offset, shape, dtype, bool(fortran))


def _literal(source: str) -> Any:
    """A Python literal; None where it is none, or too deep to be one of NumPy's."""
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
