"""TIFF files laid out like the first, recognised by their directory.

Along the TIFF 6.0 and BigTIFF specifications: a directory is a number of entries (tag code, type,
count, value or offset) and the offset of the next directory.  Two files of one stack have the same
entries but for where things lie and for what says nothing of the pixels.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from daskstack.errors import BadFileError
from daskstack.readers.layout import Layout

DESCRIPTION, STRIP_OFFSETS, DATE_TIME, TILE_OFFSETS = 270, 273, 306, 324
# Tags that say nothing of the pixels: resolution, date and time, ImageJ's own metadata (two tags).
FREE = frozenset({282, 283, DATE_TIME, 50838, 50839})
SUB_DIRECTORIES = 330
# Width, length, bits, compression, photometric, fill order, samples, rows a strip, planes, predictor, tiles (two tags),
# format, depths (two).
ONE_BY_DEFAULT = (258, 259, 266, 277, 284, 317, 339)
DECISIVE = frozenset((256, 257, 258, 259, 262, 266, 277, 278, 284, 317, 322, 323, 339, 32997, 32998))
MOST_ENTRIES = 1 << 16  # of a directory; tifffile refuses more than 4096
STRIP_TYPES = {3: "H", 4: "I", 16: "Q"}  # SHORT, LONG, LONG8
MOST_NBYTES = 1 << 16  # a layout travels with every block, and what lies before the pixels is read from each file
MOST_TABLE_NBYTES = 1 << 26  # of the offsets of a page's tiles
TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
BytesAt: TypeAlias = Callable[[int, int], bytes]
_DISPLAY_RANGE = re.compile(rb"^(min|max)=[-+.eE\d]*\n", re.MULTILINE)  # as ImageJ writes them for each image


@dataclass(frozen=True)
class Format:
    """The sizes that tell classic TIFF from BigTIFF, as struct codes with the byte order."""

    magic: bytes
    order: str
    big: bool

    @property
    def offset(self) -> struct.Struct:
        """An offset, or the value of an entry; the first one is that of the first directory."""
        return struct.Struct(self.order + ("Q" if self.big else "I"))

    @property
    def number(self) -> struct.Struct:
        """How many entries a directory has."""
        return struct.Struct(self.order + ("Q" if self.big else "H"))

    @property
    def entry(self) -> struct.Struct:
        """Code, type and count of an entry; its value follows."""
        return struct.Struct(self.order + ("HHQ" if self.big else "HHI"))

    @property
    def entry_size(self) -> int:
        """Bytes of an entry."""
        return self.entry.size + self.offset.size


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
    rule: Literal["equal", "imagej", "ascii", "any"]
    due: bytes

    def agrees(self, found: bytes) -> bool:
        """Whether another file's value says the same of its pixels."""
        if self.rule == "equal":
            return found == self.due
        if self.rule == "imagej":
            return _DISPLAY_RANGE.sub(b"", found) == _DISPLAY_RANGE.sub(b"", self.due)
        return self.rule == "any" or found.isascii()


@dataclass(frozen=True)
class DirectoryLayout(Layout):
    """A file whose one directory is the same but for offsets and free tags.

    Attributes
    ----------
    form : Format
        Byte order and kind.
    length : int
        Bytes of the directory, the offset of the next included.
    mask, masked : int
        The bits of the directory that must be equal, and what they are.
    values : tuple of Value
        Values outside it, or of any length.
    """

    form: Format
    length: int
    mask: int
    masked: int
    values: tuple[Value, ...]

    def directory(self, bytes_at: BytesAt, head: bytes | bytearray, size: int) -> bytes | None:
        """The directory of another file; None where it is another.

        Parameters
        ----------
        bytes_at : function
            Bytes of the file from an offset on, as many as asked for, or fewer at its end.
        head : bytes
            Its first 16 bytes at least.
        size : int
            Its length in bytes.
        """
        form = self.form
        if head[: len(form.magic)] != form.magic or size < len(form.magic) + form.offset.size:
            return None
        (begin,) = form.offset.unpack_from(head, len(form.magic))
        directory = bytes_at(begin, self.length) if begin + self.length <= size else b""
        if len(directory) < self.length or int.from_bytes(directory, "little") & self.mask != self.masked:
            return None
        for value in self.values:
            found = self._value(value, directory, bytes_at, size)
            if found is None or not value.agrees(found):
                return None
        return directory

    def _value(self, value: Value, directory: bytes, bytes_at: BytesAt, size: int) -> bytes | None:
        """The bytes of a value of this file; None where they are not in it."""
        offset = self.form.offset
        (count,) = offset.unpack_from(directory, value.at - offset.size)
        length = count * value.unit
        if length <= offset.size:
            return directory[value.at : value.at + length]
        (begin,) = offset.unpack_from(directory, value.at)
        if begin < 8 or begin + length > size:
            return None
        return b"" if value.rule == "any" else bytes_at(begin, length)

    def numbers(self, codes: str, directory: bytes, at: int, bytes_at: BytesAt) -> tuple[int, ...] | None:
        """The numbers of an entry whose value stands at ``at``, in or outside the directory."""
        stored = struct.Struct(self.form.order + codes)
        if stored.size <= self.form.offset.size:
            return stored.unpack_from(directory, at)
        (begin,) = self.form.offset.unpack_from(directory, at)
        data = bytes_at(begin, stored.size)
        return stored.unpack(data) if len(data) == stored.size else None


@dataclass(frozen=True)
class TiffLayout(DirectoryLayout):
    """One run of bytes, stored as they are.

    Attributes
    ----------
    strips_at : int
        Where the entry of the strips' (or tiles') offsets has its value.
    strips : struct.Struct format
        How those offsets are stored.
    steps : tuple of int
        How far each strip is from the first.
    """

    strips_at: int
    strips: str
    steps: tuple[int, ...]

    def locate(self, descriptor: int, head: bytearray, size: int, nbytes: int) -> int | None:
        if len(head) < 16:
            head = bytearray(os.pread(descriptor, 16, 0))

        def bytes_at(offset: int, count: int) -> bytes:
            if offset + count <= len(head):
                return bytes(head[offset : offset + count])
            return os.pread(descriptor, count, offset)

        directory = self.directory(bytes_at, head, size)
        offsets = directory and self.numbers(self.strips, directory, self.strips_at, bytes_at)
        if not offsets:
            return None
        first = offsets[0]
        if not first or any(offset - first != step for offset, step in zip(offsets, self.steps, strict=True)):
            return None
        return first


class Page(NamedTuple):
    """What a directory says: the entries that decide how its pixels are stored, and where its strips or tiles lie."""

    decisive: dict[int, tuple[int, ...]]
    strips: tuple[int, ...]

    @property
    def steps(self) -> list[int]:
        """How far each strip is from the first."""
        return [offset - self.strips[0] for offset in self.strips]


def read_chain(path: str, descriptor: int, head: bytes) -> list[Page]:
    """Follow the chain of directories once, since tifffile follows one that comes back for ever.

    Returns
    -------
    list of Page
        One a directory, as far as they can be read.

    Raises
    ------
    BadFileError
        It comes back to a directory that it had.
    """
    chain: list[Page] = []
    if len(head) < 16:
        return chain
    form = _format(head)
    seen: dict[int, int] = {}
    data, at = head, len(form.magic)
    while len(data) >= at + form.offset.size:
        (begin,) = form.offset.unpack_from(data, at)
        if not begin:
            break
        if begin in seen:
            raise BadFileError(path, f"a chain of pages that comes back to page {seen[begin]}")
        seen[begin] = len(seen)
        number = os.pread(descriptor, form.number.size, begin)
        if len(number) < form.number.size:
            break
        (entries,) = form.number.unpack(number)
        if entries > MOST_ENTRIES:
            break
        at = entries * form.entry_size
        data = os.pread(descriptor, at + form.offset.size, begin + form.number.size)
        if len(data) >= at:
            chain.append(_page(form, data[:at], descriptor))
    return chain


def _page(form: Format, entries: bytes, descriptor: int) -> Page:
    decisive: dict[int, tuple[int, ...]] = dict.fromkeys(ONE_BY_DEFAULT, (1,))
    strips: tuple[int, ...] = ()
    for code, kind, count, value in struct.iter_unpack(f"{form.entry.format}{form.offset.size}s", entries):
        if kind not in STRIP_TYPES or (code not in DECISIVE and code not in (STRIP_OFFSETS, TILE_OFFSETS)):
            continue
        length = count * TYPE_SIZES[kind]
        data = value[:length]
        if length > form.offset.size:
            data = os.pread(descriptor, min(length, MOST_TABLE_NBYTES), *form.offset.unpack(value))
        if len(data) < length:
            continue
        numbers = struct.unpack(f"{form.order}{count}{STRIP_TYPES[kind]}", data)
        if code in DECISIVE:
            decisive[code] = numbers
        else:
            strips = numbers
    return Page(decisive, strips)


def _format(head: bytes) -> Format:
    big = head[2:4] in (b"+\0", b"\0+")
    return Format(head[: 8 if big else 4], "<" if head.startswith(b"II") else ">", big)


@dataclass(frozen=True)
class Entry:
    """An entry of a directory: where its value stands in it, its type, its count, and the value's bytes."""

    at: int
    kind: int
    count: int
    data: bytes


def read_layout(descriptor: int, skip: int, stored: np.dtype[Any], rows: int) -> TiffLayout | None:
    """How an open file with one directory is laid out; None where it is not simple enough.

    Parameters
    ----------
    descriptor : int
        The file; a library found that its pixels are one run of bytes, stored as they are.
    skip, stored, rows
        As for :class:`Layout`.
    """
    found = read_directory(descriptor, frozenset((STRIP_OFFSETS, TILE_OFFSETS)))
    if found is None:
        return None
    matching, places = found
    if len(places) != 1 or skip + matching.weight > MOST_NBYTES:
        return None
    (place,) = places.values()
    codes = f"{place.count}{STRIP_TYPES[place.kind]}"
    offsets = struct.unpack(matching.form.order + codes, place.data)
    steps = tuple(offset - offsets[0] for offset in offsets)
    return TiffLayout(skip, stored, rows, *matching, place.at, codes, steps)


class Matching(NamedTuple):
    """What must be equal in another file's directory: the own attributes of :class:`DirectoryLayout`."""

    form: Format
    length: int
    mask: int
    masked: int
    values: tuple[Value, ...]

    @property
    def weight(self) -> int:
        """Bytes of it that travel."""
        return sum(len(value.due) for value in self.values)


def read_directory(descriptor: int, placing: frozenset[int]) -> tuple[Matching, dict[int, Entry]] | None:
    """What an open file's first directory holds; None where an entry is of a type that is not known.

    Parameters
    ----------
    descriptor : int
        The file.
    placing : frozenset of int
        Codes of the entries that say where the pixels lie, whose values are each file's own.

    Returns
    -------
    Matching, dict of int to Entry
        What must be equal in other files; the entries of those codes.
    """
    head = os.pread(descriptor, 16, 0)
    form = _format(head)
    (begin,) = form.offset.unpack_from(head, len(form.magic))
    (number,) = form.number.unpack(os.pread(descriptor, form.number.size, begin))
    length = form.number.size + number * form.entry_size + form.offset.size
    directory = os.pread(descriptor, length, begin)
    mask = bytearray(b"\xff" * length)
    values: list[Value] = []
    places: dict[int, Entry] = {}
    for at in range(form.number.size, length - form.offset.size, form.entry_size):
        code, kind, count = form.entry.unpack_from(directory, at)
        value_at = at + form.entry.size
        unit = TYPE_SIZES.get(kind, 0)
        if not unit or code == SUB_DIRECTORIES:
            return None
        outside = count * unit > form.offset.size
        begins = form.offset.unpack_from(directory, value_at)[0]
        data = os.pread(descriptor, count * unit, begins) if outside else directory[value_at : value_at + count * unit]
        if code in placing:
            if kind not in STRIP_TYPES or code in places:
                return None
            places[code] = Entry(value_at, kind, count, data)
            mask[value_at : value_at + form.offset.size] = bytes(form.offset.size)
        elif outside or code in FREE:
            rule = _rule(code, data)
            values.append(Value(value_at, unit, rule, data if rule in ("equal", "imagej") else b""))
            free_from = value_at if rule == "equal" else value_at - form.offset.size  # its count may differ, too
            mask[free_from : value_at + form.offset.size] = bytes(value_at + form.offset.size - free_from)
    bits = int.from_bytes(mask, "little")
    masked = int.from_bytes(directory, "little") & bits
    return Matching(form, length, bits, masked, tuple(values)), places


def _rule(code: int, data: bytes) -> Literal["equal", "imagej", "ascii", "any"]:
    if code == DATE_TIME:
        return "ascii"
    if code in FREE:
        return "any"
    return "imagej" if code == DESCRIPTION and data.startswith(b"ImageJ=") else "equal"
