"""TIFF through tifffile, one file at a time, its own pages only.

tifffile is lenient: it logs trouble and goes on, drops pages of another size, takes zeros for strips
that are not there and opens other files that a file names.  Here all of that is an error.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from daskstack.blocks import as_bytes
from daskstack.errors import BadFileError
from daskstack.files import read_at
from daskstack.readers.base import Array, Contents, Reader, open_regular, refuse_foreign
from daskstack.readers.layout import Layout, to_native
from daskstack.readers.tiff_layout import read_layout, refuse_loop
from daskstack.readers.tiff_segments import cut_of, read_segments
from daskstack.text import shape_text

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

MAGICS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
# tifffile's letters for axes that mean something; others (unknown, sequence) get a number.
AXES = {"T": "t", "Z": "z", "C": "c", "Y": "y", "X": "x", "S": "s"}
MOST_RECORDS = 20
ONE_IMAGE = ("shaped", "imagej", "uniform", "generic")  # tifffile's kinds of series that say nothing of strips
CCITT = (2, 3, 4)  # of fax machines
# How many bytes one stored byte stands for at most: LZW, Deflate (by two numbers), PackBits, Zstandard.
MOST_EXPANDED = {5: 4096, 8: 1040, 32946: 1040, 32773: 64, 50000: 1 << 16}
MOST_TILE_NBYTES = 64 << 20  # of a tile that is larger than its page
# What tifffile warns of that says nothing of the pixels, with the reason.
HARMLESS = (
    "imagej_metadata> raised",  # ImageJ's own tags (overlays, display ranges, texts), which no reader needs for pixels
)


@dataclass(frozen=True)
class TiffReader(Reader):
    """Reads TIFF and BigTIFF files: stored values, never inverted, expanded or scaled."""

    suffixes: ClassVar[tuple[str, ...]] = (".tif", ".tiff")

    @contextmanager
    def open(self, path: str) -> Iterator[Contents]:
        """Open the file and check its pages."""
        with _opened(path) as (tif, series, page_ndim):

            def read(out: Array, start: int) -> None:
                with _strict(path), _needing_codecs(path):
                    _read(tif, series, out, start)

            shape, dtype = tuple(map(int, series.shape)), np.dtype(series.dtype)
            yield Contents(shape, dtype, page_ndim, read, dims=_dims(series.axes))

    def layout(self, path: str) -> Layout | None:
        """How a file is laid out, if it has one directory: one run of bytes, or one image in strips or tiles."""
        with _opened(path) as (tif, series, page_ndim):
            if len(tif.pages) > 1 or len(series.levels) > 1:
                return None
            descriptor, stored = tif.filehandle.fileno(), np.dtype(series.dtype).newbyteorder(tif.byteorder)
            rows = 1 if self.join == "stack" else math.prod(series.shape[:-page_ndim])
            if series.dataoffset is not None:
                return read_layout(descriptor, series.dataoffset, stored, rows)
            cut = cut_of(series.keyframe) if series.kind in ONE_IMAGE else None
            return None if cut is None else read_segments(descriptor, cut, stored)


@contextmanager
def _opened(path: str) -> Iterator[tuple[TiffFile, TiffPageSeries, int]]:
    """An open file, its one series of pages, and how many of the last axes are a page."""
    from tifffile import TiffFile

    with open_regular(path) as (descriptor, size):
        head = os.pread(descriptor, 256, 0)
        if not head.startswith(MAGICS):
            raise refuse_foreign(path, head, "a TIFF file")
        refuse_loop(path, descriptor, head)
        # The flags keep tifffile from following the names of other files that a file gives.
        with (
            os.fdopen(descriptor, "rb", closefd=False) as handle,
            _strict(path) as said,
            TiffFile(handle, name=os.path.basename(path), is_ome=False, is_mmstack=False, is_ndtiff=False) as tif,
        ):
            series = _only_series(path, tif)
            page_ndim = _check_pages(path, tif, series, size)
            _refuse_logged(path, said)
            yield tif, series, page_ndim


class _Collector:
    """Stands in for tifffile's logger in a thread that reads, whatever the program did to logging."""

    def __init__(self, taken: list[str]) -> None:
        self.taken = taken

    def warning(self, message: str, *_: Any) -> None:
        """Keep a record from WARNING up, but for those that say nothing of the pixels."""
        if len(self.taken) < MOST_RECORDS and not any(part in message for part in HARMLESS):
            self.taken.append(message)

    error = exception = critical = warning

    def debug(self, *_: Any) -> None:
        """Below WARNING nothing is kept."""

    info = debug


_reading = threading.local()


@lru_cache(maxsize=1)
def _collect_records() -> None:
    """Have tifffile ask for its logger where reading threads have one of their own; once a process."""
    import tifffile.tifffile as module

    real = module.logger

    def logger() -> Any:
        taken = getattr(_reading, "taken", None)
        return real() if taken is None else _Collector(taken)

    module.logger = logger


@contextmanager
def _strict(path: str) -> Iterator[list[str]]:
    """Make an error of whatever tifffile logs in this thread from WARNING up; what it did so far."""
    _collect_records()
    before = getattr(_reading, "taken", None)
    taken: list[str] = []
    _reading.taken = taken
    try:
        yield taken
    finally:
        _reading.taken = before
    _refuse_logged(path, taken)


@contextmanager
def _needing_codecs(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        if isinstance(exc, ImportError) or "imagecodecs" in str(exc):
            problem = "is compressed in a way that needs the package imagecodecs: pip install imagecodecs"
            raise BadFileError(path, problem) from exc
        raise


def _refuse_logged(path: str, taken: list[str]) -> None:
    if taken:
        message = taken[0].partition("> ")[2] if taken[0].startswith("<tifffile.") else taken[0]
        raise BadFileError(path, f"tifffile says: {message or taken[0]}")


def _only_series(path: str, tif: TiffFile) -> TiffPageSeries:
    """The one image, or stack of pages, that the file holds."""
    series = tif.series
    dtype: object = series[0].keyframe.dtype if series else None  # None where tifffile has no dtype for the samples
    if dtype is None or not series[0].size or not len(tif.pages.first.tags):
        raise BadFileError(path, "a TIFF file without an image that can be read")
    # What tifffile takes for the lower levels of a pyramid must say that it is reduced, or lie in a sub-directory.
    odd: list[Any] = [p for s in series[1:] for p in s.pages]
    odd += [p for level in series[0].levels[1:] for p in level.pages if not _is_lower_level(p)]
    if odd:
        first = min(odd, key=lambda p: p.index)
        found = f"{shape_text(first.shape)} {first.dtype}"
        due = f"{shape_text(series[0].keyframe.shape)} {series[0].dtype}"
        if found == due:
            raise BadFileError(path, f"page {first.index} is stored in another way than page 0")
        raise BadFileError(path, f"page {first.index} {found}", f"{due}, as page 0")
    return series[0]


def _is_lower_level(page: Any) -> bool:
    return page.keyframe.is_reduced or len(page.treeindex) > 1


def _check_pages(path: str, tif: TiffFile, series: TiffPageSeries, size: int) -> int:
    """Refuse what tifffile would leave out or fill with zeros; how many of the last axes are a page."""
    page = series.keyframe
    page_size = math.prod(page.shape)
    page_ndim = len(page.shape)
    while page_ndim < len(series.shape) and math.prod(series.shape[-page_ndim:]) < page_size:
        page_ndim += 1  # a description may give a page more axes, of length 1
    frames = math.prod(series.shape) // page_size
    if math.prod(series.shape[-page_ndim:]) != page_size:
        raise BadFileError(path, f"{shape_text(series.shape)} in pages of {shape_text(page.shape)}", "whole pages")
    stored = len(tif.pages)
    if stored not in (1, frames, frames * len(series.levels)):
        raise BadFileError(path, f"{stored} pages", f"{frames}, as its description says")
    if stored < frames:  # ImageJ and others: one directory, the pixels of all pages in one run
        end = page.dataoffsets[0] + frames * page.nbytes if page.is_contiguous else size + 1
        if end > size:
            raise BadFileError(path, f"{stored} page", f"{frames}, as its description says")
    for number, one in enumerate(series.pages):
        if one is None:
            raise BadFileError(path, f"page {number} is missing")
        _check_segments(path, number, one, size)
    return page_ndim


def _check_segments(path: str, number: int, page: Any, size: int) -> None:
    """Every strip is stored, whole, inside the file; a tile may be left out, as the format allows."""
    key: TiffPage = page.keyframe
    if len(page.dataoffsets) != len(page.databytecounts) or len(page.dataoffsets) < math.prod(key.chunked):
        raise BadFileError(path, f"page {number} has {len(page.dataoffsets)} strips", f"{math.prod(key.chunked)}")
    for offset, length in zip(page.dataoffsets, page.databytecounts, strict=True):
        if (not offset or not length) and (offset or length or not key.is_tiled):
            raise BadFileError(path, f"page {number} has a strip that is not stored")
        if offset + length > size:
            raise BadFileError(path, f"page {number} ends at byte {offset + length}", f"within its {size} bytes")
    if key.compression in CCITT and key.bitspersample != 1:
        raise BadFileError(path, f"page {number} of {key.bitspersample} bits", "1, as its compression is for")
    if key.is_tiled:
        _check_tile(path, number, key)
    else:
        _check_strips(path, number, sum(page.databytecounts), key)


def _check_tile(path: str, number: int, key: TiffPage) -> None:
    """Refuse a tile that would take far more memory than its page, before it is decoded."""
    nbytes = key.tiledepth * key.tilelength * key.tilewidth * key.samplesperpixel * key.dtype.itemsize  # type: ignore[union-attr]
    if nbytes > max(MOST_TILE_NBYTES, 4 * key.nbytes):
        found = f"tiles of {key.tilelength} x {key.tilewidth} pixels in page {number} of {shape_text(key.shape)}"
        raise BadFileError(path, found, "tiles of a sensible size")


def _check_strips(path: str, number: int, stored: int, key: TiffPage) -> None:
    """Refuse a page that claims more pixels than its bytes can stand for, before it is decoded."""
    bits: object = key.bitspersample  # a tuple where samples differ, whatever the annotation says
    packed = not isinstance(bits, int) or bits % 8
    expanded = 1 if key.compression == 1 else MOST_EXPANDED.get(key.compression, math.inf)
    if stored * expanded < key.nbytes and not packed:
        due = f"{key.nbytes}" if expanded == 1 else f"at least {math.ceil(key.nbytes / expanded)}"
        raise BadFileError(path, f"page {number} has {stored} bytes of pixels", due)


def _read(tif: TiffFile, series: TiffPageSeries, out: Array, start: int) -> None:
    """Fill ``out`` with pages, decoded in this thread."""
    page = series.keyframe
    if series.dataoffset is not None:  # uncompressed, in one run: read without the GIL, straight into place
        read_at(tif.filehandle.fileno(), as_bytes(out).data, series.dataoffset + start * page.nbytes)
        to_native(out, np.dtype(page.dtype).newbyteorder(tif.byteorder))
    elif len(out) * math.prod(page.shape) == math.prod(series.shape):
        out[...] = tif.asarray(series=0, maxworkers=1).reshape(out.shape)
    else:
        for k in range(len(out)):
            one: Any = series.pages[start + k]  # never None: _check_pages saw them all
            out[k] = one.asarray(maxworkers=1)


def _dims(axes: str) -> tuple[str, ...]:
    """Names for the axes, from tifffile's letters where each is known and single."""
    known = [AXES[a] for a in axes if a in AXES]
    if len(known) == len(set(known)):
        return tuple(AXES.get(a, f"dim_{k + 1}") for k, a in enumerate(axes))
    return tuple(f"dim_{k + 1}" for k in range(len(axes)))
