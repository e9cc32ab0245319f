"""TIFF files of one image whose strips or tiles are compressed or scattered, laid out like the first.

As in :mod:`daskstack.readers.tiff_layout` the directory must be that of the first file; where each strip
or tile lies and how long it is are each file's own.  A file is read in one call and its segments are
decoded, without the GIL, straight into place.  Whatever a decoder does not take as a whole sends the
file through tifffile.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from daskstack.blocks import as_bytes
from daskstack.readers.layout import MOST_NBYTES, Layout, LayoutReader, to_native
from daskstack.readers.tiff_directory import (
    STRIP_OFFSETS,
    TILE_OFFSETS,
    Directory,
    Entry,
    Format,
    directories,
    read_directory,
)

STRIP_COUNTS, TILE_COUNTS = 279, 325
STORED, LZW, DEFLATE, OLD_DEFLATE, PACKBITS, ZSTD = 1, 5, 8, 32946, 32773, 50000
CODECS = frozenset({STORED, LZW, DEFLATE, OLD_DEFLATE, PACKBITS, ZSTD})
NO_PREDICTOR, HORIZONTAL, FLOATING_POINT = 1, 2, 3
PREDICTORS = frozenset({NO_PREDICTOR, HORIZONTAL, FLOATING_POINT})
# Decodes a segment into bytes; whether it filled them.
Decoder: TypeAlias = Callable[[memoryview, NDArray[np.uint8]], bool]


@dataclass(frozen=True)
class Cut:
    """How an image is cut into segments.

    Attributes
    ----------
    compression, predictor : int
        As the tags of these names say.
    shape : (int, int, int, int)
        Of the image: planes, rows, columns, samples that lie side by side.
    rows, columns : int
        Of a segment.
    tiled : bool
        Whether segments at the edges are stored whole, as tiles are, or end there, as strips do.
    """

    compression: int
    predictor: int
    shape: tuple[int, int, int, int]
    rows: int
    columns: int
    tiled: bool

    @property
    def number(self) -> int:
        """How many segments there are."""
        planes, length, width, _ = self.shape
        return planes * math.ceil(length / self.rows) * math.ceil(width / self.columns)

    @property
    def segment(self) -> tuple[int, int, int]:
        """Shape of a whole segment."""
        return self.rows, self.columns, self.shape[3]

    def place(self, k: int) -> tuple[int, slice, slice]:
        """Where the k-th segment lies in the image."""
        across = math.ceil(self.shape[2] / self.columns)
        plane, inside = divmod(k, across * math.ceil(self.shape[1] / self.rows))
        down, right = divmod(inside, across)
        row, column = down * self.rows, right * self.columns
        return plane, slice(row, row + self.rows), slice(column, column + self.columns)


@dataclass(frozen=True)
class SegmentLayout(Layout):
    """One image in segments that lie anywhere in the file.

    Attributes
    ----------
    directory : Directory
        What must be the same in another file's.
    cut : Cut
        How the image is cut into segments.
    offsets, counts : Entry
        The entries of the first file that say where its segments lie and how long they are.
    """

    directory: Directory
    cut: Cut
    offsets: Entry
    counts: Entry

    def reader(self) -> SegmentReader:
        return SegmentReader(self)


class SegmentReader(LayoutReader):
    """Reads a file in one call and decodes its segments straight into place."""

    layout: SegmentLayout

    def __init__(self, layout: SegmentLayout) -> None:
        self.layout = layout

    def _fill(self, descriptor: int, out: NDArray[Any], start: int) -> os.stat_result | None:
        size = os.fstat(descriptor).st_size
        # More than that is not all pixels, or is compressed to more than it was.
        data = os.pread(descriptor, size, 0) if size <= 2 * out.nbytes + MOST_NBYTES else b""
        if not data or len(data) != size or not self._decode(data, out):
            return None
        return os.fstat(descriptor)

    def _decode(self, data: bytes, out: NDArray[Any]) -> bool:
        def bytes_at(offset: int, count: int) -> bytes:
            return data[offset : offset + count]

        layout, cut = self.layout, self.layout.cut
        directory = layout.directory.match(bytes_at, data, len(data))
        if directory is None:
            return False
        offsets, counts = (
            layout.directory.numbers(entry.numbers, directory, entry.at, bytes_at)
            for entry in (layout.offsets, layout.counts)
        )
        if not offsets or not counts:
            return False
        view, image = memoryview(data), out.reshape(cut.shape)
        fill = _fill_tile if cut.tiled else _fill_strip
        for k, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
            # A tile that is not stored is filled by tifffile, with the value that the file gives for it.
            if not offset or not count or offset + count > len(data):
                return False
            if not fill(view[offset : offset + count], image[cut.place(k)], cut, layout.stored):
                return False
        return True


def _fill_strip(data: memoryview, part: NDArray[Any], cut: Cut, stored: np.dtype[Any]) -> bool:
    decoded = np.empty_like(part) if cut.predictor == FLOATING_POINT else part  # that one cannot be undone in place
    if not decoder(cut.compression)(data, as_bytes(decoded)):
        return False
    if cut.predictor == FLOATING_POINT:  # its bytes are in an order of their own, whatever the file's is
        _unpredict(FLOATING_POINT)(decoded, axis=-2, out=part)
        return True
    to_native(part, stored)
    if cut.predictor == HORIZONTAL:
        _unpredict(HORIZONTAL)(part, axis=-2, out=part)
    return True


def _fill_tile(data: memoryview, part: NDArray[Any], cut: Cut, stored: np.dtype[Any]) -> bool:
    tile = np.empty(cut.segment, part.dtype)
    if not _fill_strip(data, tile, cut, stored):
        return False
    part[...] = tile[: part.shape[0], : part.shape[1]]
    return True


@cache
def _unpredict(predictor: int) -> Callable[..., Any]:
    """What tifffile undoes a predictor with."""
    from tifffile import TIFF

    undo: Callable[..., Any] = TIFF.UNPREDICTORS[predictor]
    return undo


@cache
def decoder(compression: int) -> Decoder:
    """What decodes a segment: what tifffile decodes it with, but for LZW."""
    if compression == STORED:
        return _copy
    if compression == LZW:
        return _decode_lzw
    from tifffile import TIFF

    decompress: Callable[..., Any] = TIFF.DECOMPRESSORS[compression]

    def decode(data: memoryview, out: NDArray[np.uint8]) -> bool:
        return len(decompress(data, out=out)) == out.size

    return decode


def _copy(data: memoryview, out: NDArray[np.uint8]) -> bool:
    if len(data) != out.size:
        return False
    out[:] = np.frombuffer(data, np.uint8)
    return True


def _decode_lzw(data: memoryview, out: NDArray[np.uint8]) -> bool:
    """Have libtiff decode it, which takes 0.6 of the time: as the one strip, a row of bytes, of a TIFF of its own."""
    import imagecodecs

    entries = {256: out.size, 257: 1, 258: 8, 259: LZW, 262: 1, 273: 8 + 114, 277: 1, 278: 1, 279: len(data)}
    directory = b"".join(struct.pack("=HHII", code, 4, 1, value) for code, value in entries.items())
    magic = b"II*\0" if sys.byteorder == "little" else b"MM\0*"
    head = magic + struct.pack("=IH", 8, len(entries)) + directory + bytes(4)
    imagecodecs.tiff_decode(b"".join([head, data]), out=out.reshape(1, -1))
    return True


def cut_of(page: Any) -> Cut | None:
    """How a page of tifffile's is cut into segments; None where tifffile has to decode them.

    Parameters
    ----------
    page : tifffile.TiffPage
        The one page of a file.
    """
    planes, depth, length, width, samples = map(int, page.shaped)
    bits = page.bitspersample
    plain = (
        page.compression in CODECS
        and page.predictor in PREDICTORS
        and bits in (8, 16, 32, 64)
        and np.dtype(page.dtype).itemsize * 8 == bits
        and page.fillorder == 1
        and depth == 1
        and not page.is_subsampled
    )
    if not plain:
        return None
    rows, columns = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, width)
    if page.is_tiled and page.tiledepth != 1:
        return None
    return Cut(page.compression, page.predictor, (planes, length, width, samples), rows, columns, page.is_tiled)


def read_segments(descriptor: int, cut: Cut, stored: np.dtype[Any]) -> SegmentLayout | None:
    """How an open file with one directory of segments is laid out; None where it is not simple enough.

    Parameters
    ----------
    descriptor : int
        The file.
    cut : Cut
        How a library says that it is cut.
    stored : numpy.dtype
        Dtype of its pixels, byte order included.
    """
    form = Format.of(os.pread(descriptor, 16, 0))
    found, *more = directories(descriptor, form)
    codes = (TILE_OFFSETS, TILE_COUNTS) if cut.tiled else (STRIP_OFFSETS, STRIP_COUNTS)
    what = None if more else read_directory(descriptor, form, found, frozenset(codes))
    if what is None:
        return None
    directory, places = what
    if len(places) != 2 or directory.weight > MOST_NBYTES or any(p.count != cut.number for p in places.values()):
        return None
    return SegmentLayout(stored, 1, directory, cut, *(places[code] for code in codes))
