"""The directories of TIFF files: what they say of pixels, and what must be the same in files that are laid out alike.

Along the TIFF 6.0 and BigTIFF specifications: a directory is a number of entries (tag code, type,
count, value or offset) and the offset of the next directory.  Two files of one stack have the same
entries but for where things lie and for what says nothing of the pixels.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from daskstack.errors import BadFileError

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
MOST_VALUE_NBYTES = 1 << 26  # such as the offsets of a page's tiles
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
    count_offset : str
        Of the count of an entry and the value, or its offset, behind it.
    width, number_size, entry_size : int
        Bytes of an offset, of a number, of a whole entry.
    """

    magic: bytes
    order: str
    offset: str
    number: str
    entry: str
    count_offset: str
    width: int
    number_size: int
    entry_size: int

    @staticmethod
    def of(head: bytes) -> Format:
        """That of a file, from its first bytes."""
        order = "<" if head.startswith(b"II") else ">"
        if head[2:4] in (b"+\0", b"\0+"):
            return Format(head[:8], order, order + "Q", order + "Q", order + "HHQ", order + "QQ", 8, 8, 20)
        return Format(head[:4], order, order + "I", order + "H", order + "HHI", order + "II", 4, 2, 12)


@dataclass(frozen=True)
class Entry:
    """An entry of a directory.

    Attributes
    ----------
    at : int
        Where in the directory its value stands, or the offset of it.
    code, kind, count : int
        Tag, type and how many numbers or characters.
    begin : int
        Where in the file these are.
    """

    at: int
    code: int
    kind: int
    count: int
    begin: int

    @property
    def length(self) -> int:
        """Bytes of its numbers or characters; 0 for a type that is not known."""
        return self.count * TYPE_SIZES.get(self.kind, 0)

    @property
    def numbers(self) -> str:
        """Its numbers as a code of the module struct, where they are of a type that offsets have."""
        return f"{self.count}{STRIP_TYPES[self.kind]}"

    @property
    def is_plain(self) -> bool:
        """Whether it is of a type that the specification knows, and offsets of pixels are of one that is for them."""
        return self.kind in (STRIP_TYPES if self.code in (STRIP_OFFSETS, TILE_OFFSETS) else TYPE_SIZES)

    @property
    def rule(self) -> Rule:
        """What its value must be in another file; of ImageJ's description more may differ."""
        if self.code == DATE_TIME:
            return "ascii"
        return "any" if self.code in FREE else "equal"


class Found(NamedTuple):
    """A directory of an open file: where it begins, its bytes, its entries."""

    begin: int
    data: bytes
    entries: list[Entry]


def directories(descriptor: int, form: Format) -> Iterator[Found]:
    """Each directory of the chain, as far as the file goes; one that is cut short has no entries."""
    offset = os.pread(descriptor, form.width, len(form.magic))
    while len(offset) == form.width:
        (begin,) = struct.unpack(form.offset, offset)
        data = os.pread(descriptor, form.number_size, begin) if 0 < begin < 1 << 63 else b""
        if len(data) < form.number_size:
            return
        (number,) = struct.unpack(form.number, data)
        if number > MOST_ENTRIES:
            return
        length = form.number_size + number * form.entry_size
        data = os.pread(descriptor, length + form.width, begin)
        yield Found(begin, data, _entries(form, begin, data[:length], number))
        offset = data[length:]


def _entries(form: Format, begin: int, data: bytes, number: int) -> list[Entry]:
    found = []
    for k in range(number):
        start = form.number_size + k * form.entry_size
        at = start + form.entry_size - form.width
        if at + form.width > len(data):
            return []
        code, kind, count = struct.unpack_from(form.entry, data, start)
        inside = count * TYPE_SIZES.get(kind, 0) <= form.width
        where = begin + at if inside else struct.unpack_from(form.offset, data, at)[0]
        found.append(Entry(at, code, kind, count, where))
    return found


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
    form = Format.of(head)
    chain: list[Page] = []
    seen: dict[int, int] = {}
    for found in directories(descriptor, form):
        if found.begin in seen:
            raise BadFileError(path, f"a chain of pages that comes back to page {seen[found.begin]}")
        seen[found.begin] = len(seen)
        chain.append(_page(form, found.entries, descriptor))
    return chain


def _page(form: Format, entries: list[Entry], descriptor: int) -> Page:
    decisive: dict[int, tuple[int, ...]] = dict.fromkeys(ONE_BY_DEFAULT, (1,))
    strips: tuple[int, ...] = ()
    for entry in entries:
        places = entry.code in (STRIP_OFFSETS, TILE_OFFSETS)
        if entry.kind not in STRIP_TYPES or not (entry.code in DECISIVE or places):
            continue
        data = value_of(descriptor, entry)
        if data is None:
            continue
        numbers = struct.unpack(form.order + entry.numbers, data)
        if places:
            strips = numbers
        else:
            decisive[entry.code] = numbers
    return Page(decisive, strips)


def value_of(descriptor: int, entry: Entry) -> bytes | None:
    """The bytes of an entry's numbers or characters; None where they are not in the file, or beyond all sense."""
    if entry.length > MOST_VALUE_NBYTES or entry.begin >= 1 << 63:
        return None
    data = os.pread(descriptor, entry.length, entry.begin)
    return data if len(data) == entry.length else None


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
        What it is in the first file, without what may differ.
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
            return _DISPLAY_RANGE.sub(b"", found) == self.due
        return self.rule == "any" or found.isascii()


@dataclass(frozen=True)
class Directory:
    """What must be the same in the one directory of another file: all but offsets and free tags.

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

    @property
    def weight(self) -> int:
        """Bytes of it that travel."""
        return sum(len(value.due) for value in self.values)

    def match(self, bytes_at: BytesAt, head: bytes | memoryview, size: int) -> bytes | None:
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
        magic = len(form.magic)
        if head[:magic] != form.magic or len(head) < magic + form.width:
            return None
        (begin,) = struct.unpack_from(form.offset, head, magic)
        directory = bytes_at(begin, self.length) if begin + self.length <= size else b""
        if len(directory) < self.length or int.from_bytes(directory, "little") & self.mask != self.masked:
            return None
        return directory if all(self._agrees(value, directory, bytes_at, size) for value in self.values) else None

    def _agrees(self, value: Value, directory: bytes, bytes_at: BytesAt, size: int) -> bool:
        """Whether a value of this file is in it and says the same."""
        width = self.form.width
        count, begin = struct.unpack_from(self.form.count_offset, directory, value.at - width)
        length = count * value.unit
        if length <= width:
            return value.agrees(directory[value.at : value.at + length])
        if begin < 8 or begin + length > size:
            return False
        return value.rule == "any" or value.agrees(bytes_at(begin, length))

    def numbers(self, codes: str, directory: bytes, at: int, bytes_at: BytesAt) -> tuple[int, ...] | None:
        """The numbers of an entry whose value stands at ``at``, in or outside the directory."""
        form = self.form
        stored = form.order + codes
        length = struct.calcsize(stored)
        if length <= form.width:
            return struct.unpack_from(stored, directory, at)
        data = bytes_at(struct.unpack_from(form.offset, directory, at)[0], length)
        return struct.unpack(stored, data) if len(data) == length else None


def read_directory(
    descriptor: int, form: Format, found: Found, placing: frozenset[int]
) -> tuple[Directory, dict[int, Entry]] | None:
    """What must be the same in files like an open one of one directory; None where it is not simple enough.

    Parameters
    ----------
    descriptor : int
        The file.
    form : Format
        Its byte order and kind.
    found : Found
        Its directory.
    placing : frozenset of int
        Codes of the entries that say where the pixels lie, whose values are each file's own.

    Returns
    -------
    Directory, dict of int to Entry
        What must be equal in other files; the entries of those codes.
    """
    mask = bytearray(b"\xff" * len(found.data))
    values: list[Value] = []
    places: dict[int, Entry] = {}
    for entry in found.entries:
        end = entry.at + form.width
        data = value_of(descriptor, entry)
        if data is None or entry.kind not in TYPE_SIZES or entry.code == SUB_DIRECTORIES:
            return None
        if entry.code in placing:
            if entry.kind not in STRIP_TYPES or entry.code in places:
                return None
            places[entry.code] = entry
            mask[entry.at : end] = bytes(form.width)
        elif entry.length > form.width or entry.code in FREE:
            values.append(_value(entry, data))
            free_from = entry.at if values[-1].rule == "equal" else entry.at - form.width  # its count may differ, too
            mask[free_from:end] = bytes(end - free_from)
    bits = int.from_bytes(mask, "little")
    masked = int.from_bytes(found.data, "little") & bits
    return Directory(form, len(found.data), bits, masked, tuple(values)), places


def _value(entry: Entry, data: bytes) -> Value:
    unit = TYPE_SIZES[entry.kind]
    if entry.rule != "equal":
        return Value(entry.at, unit, entry.rule, b"")
    if entry.code == DESCRIPTION and data.startswith(b"ImageJ="):
        return Value(entry.at, unit, "imagej", _DISPLAY_RANGE.sub(b"", data))
    return Value(entry.at, unit, "equal", data)
