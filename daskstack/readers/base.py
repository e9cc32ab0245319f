"""What every reader is: one open file as entries along axis 0, checked against what the stack is due.

A format fills in :meth:`Reader.open`; everything that all formats share (what "one file, one item"
and "pages joined" mean, the exact check of shape and dtype, the file's name in every error) is here.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from daskstack import files, pictures
from daskstack.ahead import opened_ahead
from daskstack.errors import BadFileError
from daskstack.readers.cast import WIDEST, can_hold_numbers, cast_exactly
from daskstack.readers.layout import Layout, LayoutReader
from daskstack.text import plural, shape_text

Join: TypeAlias = Literal["stack", "concat"]
Array: TypeAlias = NDArray[Any]

CAST_ALL = "; or cast all files by dtype="
NOT_THE_FILES_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# What people meet under an image's name; each with what to do about it.
FOREIGN = (
    (b"version https://git-lfs", "a Git LFS pointer (text, not data); fetch the data with: git lfs pull"),
    (b"/annex/objects/", "a git-annex pointer (text, not data); fetch the data with: git annex get"),
    (b"outs:\n- md5:", "a DVC pointer (text, not data); fetch the data with: dvc pull"),
    (b'{"', "a JSON text, as a failed download leaves it"),
    (b"<!doctype html", "an HTML page, as a failed download leaves it; download the file again"),
    (b"<html", "an HTML page, as a failed download leaves it; download the file again"),
    (b"<?xml", "an XML text"),
    (b"PK\x05\x06", "an empty ZIP archive"),
    (b"PK\x03\x04", "a ZIP archive, as np.savez writes it (.npz); save its arrays one by one with np.save"),
    (b"\x93NUMPY", "a NumPy .npy file under another suffix"),
    (b"II*\x00", "a TIFF file under another suffix"),
    (b"MM\x00*", "a TIFF file under another suffix"),
    (b"II+\x00", "a TIFF file under another suffix"),
    (b"MM\x00+", "a TIFF file under another suffix"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image; save its frames as PNG or TIFF files"),
    (b"RIFF", "a WebP image or another RIFF file"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 image"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL image"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "gzip-compressed data; unpack it first"),
    (b"BZh", "bzip2-compressed data; unpack it first"),
    (b"\xfd7zXZ", "xz-compressed data; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "Zstandard-compressed data; unpack it first"),
    (b"\x00\x05\x16\x07", "a resource fork of macOS (AppleDouble)"),
    *((bytes([0x80, protocol]), "a Python pickle; daskstack never loads pickles") for protocol in range(2, 6)),
)


@dataclass(frozen=True)
class Header:
    """What one file holds: ``rows`` items along axis 0, each of ``shape`` and (native) ``dtype``."""

    rows: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...] = ()

    @property
    def item_nbytes(self) -> int:
        """Size of one item in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """One open file: its own shape, of which the last ``page_ndim`` axes are a page, and how pages are read.

    ``read(out, start)`` fills ``out`` (C-contiguous, native dtype) of shape (k, *page shape) with the
    pages from ``start`` on, all leading axes counted as one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    page_ndim: int
    read: Callable[[Array, int], None]
    dims: tuple[str, ...] = ()

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page."""
        return self.shape[len(self.shape) - self.page_ndim :]

    @property
    def pages(self) -> int:
        """How many pages the file holds."""
        return math.prod(self.shape[: len(self.shape) - self.page_ndim])

    def header(self, join: Join) -> Header:
        """The file as items: itself as one, or its pages."""
        dtype = self.dtype.newbyteorder("=")
        if join == "stack":
            return Header(1, self.shape, dtype, self.dims)
        dims = self.dims[len(self.dims) - self.page_ndim :]
        return Header(self.pages, self.page_shape, dtype, dims)


@dataclass(frozen=True)
class Reader(ABC):
    """Reads the files of one format; frozen and picklable, so that tasks can carry it.

    Parameters
    ----------
    join : {"stack", "concat"}
        Whether a file is one item, or its pages (its entries along axis 0) are.
    dtype : str, optional
        What all numbers are cast to; each must be held exactly.  By default nothing is cast.
    """

    join: Join = "stack"
    dtype: str | None = None

    suffixes: ClassVar[tuple[str, ...]]
    alike_in_size: ClassVar[bool] = False  # whether files of equal items are equally long as a rule

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[Contents]:
        """Open the file and read its header, no pixels yet."""

    def layout(self, path: str) -> Layout | None:
        """How a file is laid out, where further files like it can be read without the library."""
        del path  # formats that are always read by their library have none
        return None

    def identity(self) -> bytes | None:
        """What tells one reader from another, from run to run; None where nothing does."""
        return repr(self).encode()

    def scratch(self, items: int, due: Header, file_nbytes: int) -> int:
        """Bytes that reading so many items of a file may take beside their place: as stored, and as decoded."""
        del file_nbytes  # what is held of a file is no longer than what it becomes
        widest = due.item_nbytes if self.dtype is None else math.prod(due.shape) * max(WIDEST, due.dtype.itemsize)
        return 2 * items * widest

    def probe(self, path: str) -> Header:
        """What the file holds, from its header alone; its numbers as they are after the cast that is asked for.

        Raises
        ------
        BadFileError
            The file cannot be read, or is of another kind.
        """
        with _naming(path), self.open(path) as contents:
            return self._header(path, contents)

    def _header(self, path: str, contents: Contents) -> Header:
        if self.join == "concat" and not contents.shape:
            raise BadFileError(path, "a single value, which has no axis to join along")
        header = contents.header(self.join)
        if self.dtype is None or header.dtype == self.dtype:
            return header
        if not can_hold_numbers(header.dtype) or header.dtype.itemsize > WIDEST:
            raise BadFileError(path, str(header.dtype), f"numbers, to be cast to {self.dtype}")
        return replace(header, dtype=np.dtype(self.dtype))

    def read(self, path: str, due: Header, out: Array, start: int = 0) -> None:
        """Fill ``out`` with the items of one file from ``start`` on.

        Parameters
        ----------
        path : str
            The file.
        due : Header
            What it must hold, exactly; byte order aside.
        out : array, shape (k, *due.shape), of due.dtype
            Where the items go; may be strided.
        start : int, optional
            The first item of the file to read.

        Raises
        ------
        BadFileError
            It cannot be read or holds something else.
        """
        with _naming(path), self.open(path) as contents:
            check(path, self._header(path, contents), due)
            stored = contents.dtype.newbyteorder("=")
            whole = out if out.flags.c_contiguous and stored == out.dtype else np.empty(out.shape, stored)
            if self.join == "stack":
                contents.read(whole.reshape(contents.pages, *contents.page_shape), 0)
            else:
                contents.read(whole, start)
            if stored != out.dtype:
                cast_exactly(path, whole, out)
            elif whole is not out:
                out[...] = whole

    def plane(self, path: str, due: Header, row: int, most_nbytes: float = math.inf) -> Array | None:
        """The pages of one item that a picture of its middle needs; no other is read.

        Parameters
        ----------
        path : str
            The file.
        due : Header
            What it must hold.
        row : int
            Which of its items.
        most_nbytes : float, optional
            What takes more than that is not read.

        Returns
        -------
        array or None
            The last axes of the item, as many as the plane or a page has; None where it is too large.

        Raises
        ------
        BadFileError
            It cannot be read or holds something else.
        """
        with _naming(path), self.open(path) as contents:
            check(path, self._header(path, contents), due)
            first, shape = pictures.pages_to_read(due.shape, due.dims, contents.page_ndim)
            if math.prod(shape) * due.dtype.itemsize > most_nbytes:
                return None
            page = shape[len(shape) - contents.page_ndim :]
            # As they are stored: a cast that is asked for changes no number.
            out = np.empty((math.prod(shape[: len(shape) - len(page)]), *page), contents.dtype.newbyteorder("="))
            if out.size:
                contents.read(out, row if self.join == "concat" else first)
            return out.reshape(shape)

    def read_into(
        self,
        paths: Sequence[str],
        out: Array,
        due: Header,
        pieces: Sequence[tuple[int, int, int]] | None = None,
        fast: LayoutReader | None = None,
        *,
        stamps: Sequence[tuple[int, int] | None] | None = None,
    ) -> list[BadFileError]:
        """Fill ``out`` with the items of many files, end to end; a bad file does not stop the others.

        Parameters
        ----------
        paths : sequence of str
            The files, in order.
        out : array, shape (items, *due.shape), of due.dtype
            Where the items go.
        due : Header
            What each file must hold (``rows`` of it where ``pieces`` do not say).
        pieces : sequence of (rows, start, stop), optional
            For each file how many items it must hold, and which of them are wanted; by default all.
        fast : LayoutReader, optional
            Reads files laid out like one of the stack whose header is ``due``.
        stamps : sequence of (int, int), optional
            Size and mtime that each file must have once it is read.

        Returns
        -------
        list of BadFileError
            The files whose place in ``out`` is undefined; empty where all is well.
        """
        bad: list[BadFileError] = []
        each = pieces or [(due.rows, 0, due.rows)] * len(paths)
        stamps = stamps or [None] * len(paths)
        alike = _Alike(fast, out, due) if fast and out.flags.c_contiguous else None
        at = 0
        with closing(opened_ahead(paths) if alike else (None for _ in paths)) as opened:
            for path, descriptor, (rows, start, stop), stamp in zip(paths, opened, each, stamps, strict=True):
                part = out[at : at + stop - start]
                at += stop - start
                try:
                    if alike and rows == alike.rows and alike.read(path, descriptor, part, start, stamp):
                        continue
                    self.read(path, due if rows == due.rows else replace(due, rows=rows), part, start)
                    if stamp is not None and stamp != files.stamp(path):
                        raise BadFileError(path, "changed since it was listed")  # noqa: TRY301
                except BadFileError as exc:
                    bad.append(exc)
        return bad


class _Alike:
    """Files laid out like the first one, read into their rows of a block, and cast where that is asked for."""

    def __init__(self, fast: LayoutReader, out: Array, due: Header) -> None:
        stored = fast.layout.stored.newbyteorder("=")
        self.fast, self.rows = fast, fast.layout.rows
        self.item_nbytes = math.prod(due.shape) * stored.itemsize
        self.room = None if stored == out.dtype else np.empty((self.rows, *due.shape), stored)  # for one file

    def read(self, path: str, descriptor: int | None, part: Array, start: int, stamp: tuple[int, int] | None) -> bool:
        """Whether a file, whose items from ``start`` on fill ``part``, was read."""
        stored = part if self.room is None else self.room[: len(part)]
        if not self.fast.read(descriptor, stored, start * self.item_nbytes, stamp):
            return False
        if stored is not part:
            cast_exactly(path, stored, part)
        return True


def dims(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the axes of an array that brings none of its own."""
    return ("y", "x") if len(shape) == 2 else tuple(f"dim_{k + 1}" for k in range(len(shape)))


def check(path: str, found: Header, due: Header) -> None:
    """Refuse a file whose items are not exactly as due.

    Raises
    ------
    BadFileError
        It says what was found and what was due; the shape is left out where only the dtype differs.
    """
    if found.shape != due.shape:
        raise BadFileError(path, f"{shape_text(found.shape)} {found.dtype}", f"{shape_text(due.shape)} {due.dtype}")
    if found.dtype != due.dtype:
        numbers = can_hold_numbers(found.dtype) and can_hold_numbers(due.dtype)
        raise BadFileError(path, str(found.dtype), f"{due.dtype}{CAST_ALL if numbers else ''}")
    if found.dims != due.dims and "s" in (*found.dims, *due.dims) and len(found.dims) == len(due.dims):
        # The samples of colour lie along another axis: the same numbers would mean other pixels.
        raise BadFileError(path, f"axes ({', '.join(found.dims)})", f"({', '.join(due.dims)})")
    if found.rows != due.rows:
        raise BadFileError(path, plural(found.rows, "item"), f"{due.rows}, as when the files were listed")


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Give every error that a file causes the file's name."""
    try:
        yield
    except (BadFileError, MemoryError):
        raise
    except FileNotFoundError as exc:
        raise BadFileError(path, "no such file (it was there when the files were listed)") from exc
    except OSError as exc:
        if exc.errno in NOT_THE_FILES_FAULT:
            raise
        raise BadFileError(path, (exc.strerror or str(exc)).lower()) from exc
    except Exception as exc:  # a library's, or a user's reader's, own kind
        raise BadFileError(path, f"cannot be read: {type(exc).__name__}: {exc}") from exc


@contextmanager
def open_regular(path: str) -> Iterator[tuple[int, int]]:
    """A descriptor and the size of a regular file; anything else (a pipe would hang) is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise BadFileError(path, "not a regular file")
        if not found.st_size:
            raise BadFileError(path, "empty file (0 bytes)")
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def refuse_foreign(path: str, head: bytes, kind: str) -> BadFileError:
    """The error for a file that does not begin as its kind does."""
    text = head.lstrip().lower()
    for magic, what in FOREIGN:
        if what == kind and head.startswith(magic):  # as a transfer of text leaves it, which changes ends of lines
            return BadFileError(path, f"{kind} whose first bytes are damaged: {head[:8]!r}")
        if head.startswith(magic) or text.startswith(magic.lower()):
            return BadFileError(path, f"not {kind} but {what}")
    if not head.strip(b"\x00"):
        return BadFileError(path, f"not {kind}: it begins with zeros, as an interrupted copy leaves it")
    return BadFileError(path, f"not {kind}: it begins with {head[:8]!r}")
