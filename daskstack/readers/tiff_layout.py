"""TIFF files laid out like the first, recognised by their directory.

Along the TIFF 6.0 and BigTIFF specifications: a directory is a number of entries (tag code, type,
count, value or offset) and the offset of the next directory.  Two files of one stack have the same
entries but for where things lie and for what says nothing of the pixels.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from daskstack.errors import BadFileError
from daskstack.readers.layout import MOST_NBYTES, Layout

DESCRIPTION, STRIP_OFFSETS, DATE_TIME, TILE_OFFSETS = 270, 273, 306, 324
# Tags that say nothing of the pixels: resolution, date and time, ImageJ's own metadata (two tags).
FREE = frozenset({282, 283, DATE_TIME, 50838, 50839})
SUB_DIRECTORIES = 330
MOST_ENTRIES = 1 << 16  # of a directory; tifffile refuses more than 4096
STRIP_TYPES = {3: "H", 4: "I", 16: "Q"}  # SHORT, LONG, LONG8
TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
Rule: TypeAlias = Literal["equal", "imagej", "ascii", "any"]
BytesAt: TypeAlias = Callable[[int, int], bytes]
_DISPLAY_RANGE = re.compile(rb"^(min|max)=[-+.eE\d]*\n", re.MULTILINE)  # as ImageJ writes them for each image


@dataclass(frozen=True)
class Format:
    """What tells classic TIFF from BigTIFF, and the byte order, as codes of the module struct.

    Attributes
    ----------
    magic : bytes
        What the file begins with; the offset of the first directory follows.
    order : str
        "<" or ">".
    offset : str
        Of an offset, or of the value of an entry.
    number : str
        Of how many entries a directory has.
    entry : str
        Of an entry's code, type and count; its value follows.
    width, number_size, entry_size : int
        Bytes of an offset, of a number, of a whole entry.
    """

    magic: bytes
    order: str
    offset: str
    number: str
    entry: str
    width: int
    number_size: int
    entry_size: int

    @staticmethod
    def of(head: bytes) -> Format:
        """That of a file, from its first bytes."""
        order = "<" if head.startswith(b"II") else ">"
        if head[2:4] in (b"+\0", b"\0+"):
            return Format(head[:8], order, order + "Q", order + "Q", order + "HHQ", 8, 8, 20)
        return Format(head[:4], order, order + "I", order + "H", order + "HHI", 4, 2, 12)


@dataclass(frozen=True)
class Value:
    """A value outside the directory, or of any length: what it must be.

    Attributes
    ----------
    at : int
        Where its offset stands in the directory.
    unit : int
        Size of one of its numbers or characters.
    rule : {"equal", "imagej", "ascii", "any"}
        The very bytes of ``due``; those but for what ImageJ writes of each image; any text; anything.
    due : bytes
        What it is in the first file.
    """

    at: int
    unit: int
    rule: Rule
    due: bytes

    def agrees(self, found: bytes) -> bool:
        """Whether another file's value says the same of its pixels."""
        if self.rule == "equal":
            return found == self.due
        if self.rule == "imagej":
            return _DISPLAY_RANGE.sub(b"", found) == _DISPLAY_RANGE.sub(b"", self.due)
        return self.rule == "any" or found.isascii()


@dataclass(frozen=True)
class Free:
    """Bytes around the pixels, head and tail put together, that may differ: into other text alone, or into anything."""

    start: int
    stop: int
    ascii: bool


@dataclass(frozen=True)
class TiffLayout(Layout):
    """One directory, which is the same but for offsets and free tags.

    Attributes
    ----------
    free : tuple of Free, optional
        What may differ in a file whose offsets are those of the first; None where that cannot be told by what lies
        around its pixels.
    form : Format
        Byte order and kind.
    length : int
        Bytes of the directory, the offset of the next included.
    mask, masked : int
        The bits of the directory that must be equal, and what they are.
    values : tuple of Value
        Values outside it, or of any length.
    strips_at : int
        Where the entry of the strips' (or tiles') offsets has its value.
    strips : struct.Struct format
        How those offsets are stored.
    steps : tuple of int
        How far each strip is from the first.
    """

    free: tuple[Free, ...] | None
    form: Format
    length: int
    mask: int
    masked: int
    values: tuple[Value, ...]
    strips_at: int
    strips: str
    steps: tuple[int, ...]

    def agrees(self, head: bytearray, tail: bytearray) -> bool:
        if not self.free:
            return self.free is not None and super().agrees(head, tail)
        due, found = self.head + self.tail, head + tail
        for free in self.free:
            part = slice(free.start, free.stop)
            if free.ascii and not found[part].isascii():
                return False
            found[part] = due[part]
        return found == due

    def locate(self, descriptor: int, head: memoryview, size: int) -> int | None:
        form = self.form
        magic = len(form.magic)
        if len(head) < 16:
            head = memoryview(os.pread(descriptor, 16, 0))
        if head[:magic] != form.magic or len(head) < magic + form.width:
            return None

        def bytes_at(offset: int, count: int) -> bytes:
            if offset + count <= len(head):
                return bytes(head[offset : offset + count])
            return os.pread(descriptor, count, offset)

        (begin,) = struct.unpack_from(form.offset, head, magic)
        directory = bytes_at(begin, self.length) if begin + self.length <= size else b""
        if len(directory) < self.length or int.from_bytes(directory, "little") & self.mask != self.masked:
            return None
        for value in self.values:
            found = self._value(value, directory, bytes_at, size)
            if found is None or not value.agrees(found):
                return None
        return self._first_strip(directory, bytes_at)

    def _value(self, value: Value, directory: bytes, bytes_at: BytesAt, size: int) -> bytes | None:
        """The bytes of a value of this file; None where they are not in it."""
        form = self.form
        (count,) = struct.unpack_from(form.offset, directory, value.at - form.width)
        length = count * value.unit
        if length <= form.width:
            return directory[value.at : value.at + length]
        (begin,) = struct.unpack_from(form.offset, directory, value.at)
        if begin < 8 or begin + length > size:
            return None
        return b"" if value.rule == "any" else bytes_at(begin, length)

    def _first_strip(self, directory: bytes, bytes_at: BytesAt) -> int | None:
        stored = self.form.order + self.strips
        length = struct.calcsize(stored)
        if length <= self.form.width:
            offsets = struct.unpack_from(stored, directory, self.strips_at)
        else:
            data = bytes_at(struct.unpack_from(self.form.offset, directory, self.strips_at)[0], length)
            if len(data) < length:
                return None
            offsets = struct.unpack(stored, data)
        first = int(offsets[0])
        if not first or any(offset - first != step for offset, step in zip(offsets, self.steps, strict=True)):
            return None
        return first


def refuse_loop(path: str, descriptor: int, head: bytes) -> None:
    """Follow the chain of directories once, since tifffile follows one that comes back for ever.

    Raises
    ------
    BadFileError
        It comes back to a directory that it had.
    """
    seen: dict[int, int] = {}
    for begin, _ in _directories(descriptor, Format.of(head)):
        if begin in seen:
            raise BadFileError(path, f"a chain of pages that comes back to page {seen[begin]}")
        seen[begin] = len(seen)


def _directories(descriptor: int, form: Format) -> Iterator[tuple[int, bytes]]:
    """Where each directory of the chain begins, and its bytes, as far as the file goes."""
    offset = os.pread(descriptor, form.width, len(form.magic))
    while len(offset) == form.width:
        (begin,) = struct.unpack(form.offset, offset)
        if not begin:
            return
        number = os.pread(descriptor, form.number_size, begin)
        if len(number) < form.number_size:
            yield begin, number
            return
        (entries,) = struct.unpack(form.number, number)
        if entries > MOST_ENTRIES:
            yield begin, number
            return
        directory = os.pread(descriptor, form.number_size + entries * form.entry_size + form.width, begin)
        yield begin, directory
        offset = directory[form.number_size + entries * form.entry_size :]


@dataclass(frozen=True)
class _Entry:
    """An entry of a directory: where in it its value stands, and where in the file its data are."""

    at: int
    code: int
    kind: int
    unit: int
    begin: int
    length: int

    @property
    def rule(self) -> Rule:
        """What its data must be in another file; of ImageJ's description more may differ."""
        if self.code == DATE_TIME:
            return "ascii"
        return "any" if self.code in FREE else "equal"

    @property
    def is_plain(self) -> bool:
        """Whether it is of a type that the specification knows, and offsets of pixels are of one that is for them."""
        return self.kind in (STRIP_TYPES if self.code in (STRIP_OFFSETS, TILE_OFFSETS) else TYPE_SIZES)

    def is_inside(self, directory: tuple[int, int]) -> bool:
        """Whether its data stand in the directory (begin, length) itself."""
        return self.begin == directory[0] + self.at


def _entries(form: Format, begin: int, directory: bytes) -> list[_Entry]:
    found = []
    for start in range(form.number_size, len(directory) - form.width, form.entry_size):
        code, kind, count = struct.unpack_from(form.entry, directory, start)
        at, unit = start + form.entry_size - form.width, TYPE_SIZES.get(kind, 0)
        inside = count * unit <= form.width
        where = begin + at if inside else struct.unpack_from(form.offset, directory, at)[0]
        found.append(_Entry(at, code, kind, unit, where, count * unit))
    return found


class _Around:
    """The bytes before and behind the pixels of a file, put together."""

    def __init__(self, descriptor: int, skip: int, nbytes: int) -> None:
        self.skip, self.end = skip, skip + nbytes
        self.size = os.fstat(descriptor).st_size
        self.whole = skip + self.size - self.end <= MOST_NBYTES
        self.head = os.pread(descriptor, skip, 0) if skip <= MOST_NBYTES else b""
        self.tail = os.pread(descriptor, self.size - self.end, self.end) if self.whole else b""

    def place(self, begin: int, length: int) -> slice | None:
        """Where in them some bytes of the file are; None for bytes that are not wholly in them."""
        if begin + length <= self.skip:
            return slice(begin, begin + length)
        at = begin - self.end + self.skip
        return slice(at, at + length) if self.whole and self.end <= begin <= self.size - length else None


def read_layout(descriptor: int, skip: int, nbytes: int, stored: np.dtype[Any], rows: int) -> Layout | None:
    """How an open file is laid out; None where it is not simple enough.

    Parameters
    ----------
    descriptor : int
        The file; a library found that its pixels are one run of bytes, stored as they are.
    skip, nbytes : int
        Where that run begins, and how long it is.
    stored, rows
        As for :class:`Layout`.
    """
    form = Format.of(os.pread(descriptor, 16, 0))
    directories = list(_directories(descriptor, form))
    entries = [_entries(form, begin, directory) for begin, directory in directories]
    if not all(entry.is_plain for of_one in entries for entry in of_one) or skip > MOST_NBYTES:
        return None
    around = _Around(descriptor, skip, nbytes)
    alike = Layout(stored, rows, nbytes, around.head, around.tail)
    if len(directories) == 1:
        return _read_single(descriptor, form, around, alike, *directories[0], entries[0])
    # Of several pages only files are alike whose every byte but the pixels is.
    parts = [(begin, len(directory)) for begin, directory in directories]
    parts += [(entry.begin, entry.length) for of_one in entries for entry in of_one]
    return None if any(around.place(*part) is None for part in parts) else alike


def _read_single(  # noqa: PLR0917  # what read_layout knows
    descriptor: int,
    form: Format,
    around: _Around,
    alike: Layout,
    begin: int,
    directory: bytes,
    entries: Sequence[_Entry],
) -> TiffLayout | None:
    strips = next((entry for entry in entries if entry.code in (STRIP_OFFSETS, TILE_OFFSETS)), None)
    if strips is None or any(entry.code == SUB_DIRECTORIES for entry in entries):
        return None
    codes = f"{strips.length // strips.unit}{STRIP_TYPES[strips.kind]}"
    offsets = struct.unpack(form.order + codes, os.pread(descriptor, strips.length, strips.begin))
    mask = bytearray(b"\xff" * len(directory))
    mask[strips.at : strips.at + form.width] = bytes(form.width)
    values = []
    for entry in entries:
        if entry is not strips and (entry.length > form.width or entry.code in FREE):
            values.append(_value(descriptor, entry))
            free_from = entry.at if values[-1].rule == "equal" else entry.at - form.width  # its count may differ, too
            mask[free_from : entry.at + form.width] = bytes(entry.at + form.width - free_from)
    if len(alike.head) + sum(len(value.due) for value in values) > MOST_NBYTES:
        return None
    bits = int.from_bytes(mask, "little")
    return TiffLayout(
        **vars(alike),
        free=_free(around, (begin, len(directory)), entries),
        form=form,
        length=len(directory),
        mask=bits,
        masked=int.from_bytes(directory, "little") & bits,
        values=tuple(values),
        strips_at=strips.at,
        strips=codes,
        steps=tuple(offset - offsets[0] for offset in offsets),
    )


def _value(descriptor: int, entry: _Entry) -> Value:
    if entry.rule != "equal":
        return Value(entry.at, entry.unit, entry.rule, b"")
    data = os.pread(descriptor, entry.length, entry.begin)
    imagej = entry.code == DESCRIPTION and data.startswith(b"ImageJ=")
    return Value(entry.at, entry.unit, "imagej" if imagej else "equal", data)


def _free(around: _Around, directory: tuple[int, int], entries: Sequence[_Entry]) -> tuple[Free, ...] | None:
    """Which bytes around the pixels may differ; None where some of those that may not are not around them."""
    required = bytearray(len(around.head) + len(around.tail))
    parts = [((0, 16), 1), (directory, 1)]
    parts += [((e.begin, e.length), 0) for e in entries if e.rule != "equal" and e.is_inside(directory)]
    parts += [((e.begin, e.length), 1) for e in entries if e.rule == "equal" and not e.is_inside(directory)]
    for part, mark in parts:
        at = around.place(*part)
        if at is None:
            return None
        required[at] = bytes([mark]) * (at.stop - at.start)
    found = []
    for entry in entries:
        at = around.place(entry.begin, entry.length)
        if entry.rule != "equal" and at is not None and not any(required[at]):
            found.append(Free(at.start, at.stop, entry.rule == "ascii"))
    return tuple(found)
