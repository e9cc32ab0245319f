"""TIFF files whose pixels are one run of bytes, stored as they are, laid out like the first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskstack.readers.layout import MOST_NBYTES, RunLayout
from daskstack.readers.tiff_directory import (
    STRIP_OFFSETS,
    TILE_OFFSETS,
    Directory,
    Entry,
    Format,
    Found,
    directories,
    read_directory,
)


@dataclass(frozen=True)
class Free:
    """Bytes around the pixels, head and tail put together, that may differ: into other text alone, or into anything."""

    start: int
    stop: int
    ascii: bool


@dataclass(frozen=True)
class TiffLayout(RunLayout):
    """One directory, which is the same but for offsets and free tags.

    Attributes
    ----------
    free : tuple of Free, optional
        What may differ in a file whose offsets are those of the first; None where that cannot be told by what lies
        around its pixels.
    directory : Directory
        What must be equal in it.
    strips_at : int
        Where the entry of the strips' (or tiles') offsets has its value.
    strips : struct.Struct format
        How those offsets are stored.
    steps : tuple of int
        How far each strip is from the first.
    """

    free: tuple[Free, ...] | None
    directory: Directory
    strips_at: int
    strips: str
    steps: tuple[int, ...]

    def agrees(self, head: bytearray, tail: bytearray) -> bool:
        if self.free is None or super().agrees(head, tail):
            return self.free is not None
        due, found = self.head + self.tail, head + tail
        for free in self.free:
            part = slice(free.start, free.stop)
            if free.ascii and not found[part].isascii():
                return False
            found[part] = due[part]
        return found == due

    def locate(self, descriptor: int, head: memoryview, size: int) -> int | None:
        if len(head) < 16:
            head = memoryview(os.pread(descriptor, 16, 0))

        def bytes_at(offset: int, count: int) -> bytes:
            if offset + count <= len(head):
                return bytes(head[offset : offset + count])
            return os.pread(descriptor, count, offset)

        directory = self.directory.match(bytes_at, head, size)
        offsets = directory and self.directory.numbers(self.strips, directory, self.strips_at, bytes_at)
        if not offsets:
            return None
        first = offsets[0]
        if not first or any(offset - first != step for offset, step in zip(offsets, self.steps, strict=True)):
            return None
        return first


class _Around:
    """The bytes before and behind the pixels of a file, put together."""

    def __init__(self, descriptor: int, skip: int, nbytes: int) -> None:
        self.skip, self.end = skip, skip + nbytes
        self.size = os.fstat(descriptor).st_size
        self.whole = skip + self.size - self.end <= MOST_NBYTES
        self.head = os.pread(descriptor, skip, 0)
        self.tail = os.pread(descriptor, self.size - self.end, self.end) if self.whole else b""

    def place(self, begin: int, length: int) -> slice | None:
        """Where in them some bytes of the file are; None for bytes that are not wholly in them."""
        if begin + length <= self.skip:
            return slice(begin, begin + length)
        at = begin - self.end + self.skip
        return slice(at, at + length) if self.whole and self.end <= begin <= self.size - length else None


def read_layout(descriptor: int, skip: int, nbytes: int, stored: np.dtype[Any], rows: int) -> RunLayout | None:
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
    chain = list(directories(descriptor, form))
    if not all(entry.is_plain for found in chain for entry in found.entries) or skip > MOST_NBYTES:
        return None
    around = _Around(descriptor, skip, nbytes)
    alike = RunLayout(stored, rows, nbytes, around.head, around.tail)
    if len(chain) == 1:
        return _read_single(descriptor, form, around, alike, chain[0])
    # Of several pages only files are alike whose every byte but the pixels is.
    parts = [(found.begin, len(found.data)) for found in chain]
    parts += [(entry.begin, entry.length) for found in chain for entry in found.entries]
    return None if any(around.place(*part) is None for part in parts) else alike


def _read_single(descriptor: int, form: Format, around: _Around, alike: RunLayout, found: Found) -> TiffLayout | None:
    what = read_directory(descriptor, form, found, frozenset((STRIP_OFFSETS, TILE_OFFSETS)))
    if what is None or len(what[1]) != 1 or len(alike.head) + what[0].weight > MOST_NBYTES:
        return None
    directory, (place,) = what[0], what[1].values()
    offsets = directory.numbers(place.numbers, found.data, place.at, lambda at, n: os.pread(descriptor, n, at))
    if offsets is None:
        return None
    steps = tuple(offset - offsets[0] for offset in offsets)
    free = _free(around, found)
    return TiffLayout(
        **vars(alike), free=free, directory=directory, strips_at=place.at, strips=place.numbers, steps=steps
    )


def _free(around: _Around, found: Found) -> tuple[Free, ...] | None:
    """Which bytes around the pixels may differ; None where some of those that may not are not around them."""

    def is_inside(entry: Entry) -> bool:
        return entry.begin == found.begin + entry.at

    required = bytearray(len(around.head) + len(around.tail))
    parts = [((0, 16), 1), ((found.begin, len(found.data)), 1)]
    parts += [((e.begin, e.length), 0) for e in found.entries if e.rule != "equal" and is_inside(e)]
    parts += [((e.begin, e.length), 1) for e in found.entries if e.rule == "equal" and not is_inside(e)]
    for part, mark in parts:
        at = around.place(*part)
        if at is None:
            return None
        required[at] = bytes([mark]) * (at.stop - at.start)
    free = []
    for entry in found.entries:
        at = around.place(entry.begin, entry.length)
        if entry.rule != "equal" and at is not None and not any(required[at]):
            free.append(Free(at.start, at.stop, entry.rule == "ascii"))
    return tuple(free)
