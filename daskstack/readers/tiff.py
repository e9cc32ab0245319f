"""TIFF through tifffile, one file at a time, its own pages only.

tifffile is lenient: it logs trouble and goes on, drops pages of another size, takes zeros for strips
that are not there and opens other files that a file names.  Here all of that is an error.  The axes of
an OME-TIFF are those of its description where that tells of every page of the file, and of no other
file's; else its pages are taken in order.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import numpy as np

from daskstack.blocks import as_bytes
from daskstack.errors import BadFileError
from daskstack.files import read_at
from daskstack.readers.base import Array, Contents, Reader, open_regular, refuse_foreign
from daskstack.readers.layout import Layout, to_native
from daskstack.readers.tiff_directory import Page, read_chain
from daskstack.readers.tiff_layout import read_layout
from daskstack.readers.tiff_segments import cut_of, read_segments
from daskstack.text import plural, shape_text

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

MAGICS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
# tifffile's letters for axes that mean something; others (unknown, sequence) get a number.
AXES = {"T": "t", "Z": "z", "C": "c", "Y": "y", "X": "x", "S": "s"}
MOST_RECORDS = 20
# What tifffile may not do: follow the names of other files, and compute other values from those of a scanner of gels.
OFF: dict[str, Any] = {"is_mmstack": False, "is_ndtiff": False, "is_mdgel": False}
SLIDES = frozenset(
    ("avs", "bif", "ndpi", "ome", "philips", "qpi", "scn", "svs")
)  # kinds that say which pages are levels
NO_IMAGE = "a TIFF file without an image that can be read"
MOST_LISTED = 8
ONE_IMAGE = ("shaped", "imagej", "ome", "uniform", "generic")  # tifffile's kinds of series that say nothing of strips
NODATA = 42113  # GDAL's tag
CCITT = (2, 3, 4)  # of fax machines
# How many bytes one stored byte stands for at most: LZW, Deflate (by two numbers), PackBits, Zstandard.
MOST_EXPANDED = {5: 4096, 8: 1040, 32946: 1040, 32773: 64, 50000: 1 << 16}
MOST_TILE_NBYTES = 64 << 20  # of a tile that is larger than its page
# What tifffile warns of that says nothing of the pixels, with the reason.
HARMLESS = (
    "parsing GDAL_NODATA tag raised",  # what tiles hold that are not stored: _check_fill sees to those
    "imagej_metadata> raised",  # ImageJ's own tags (overlays, display ranges, texts), which no reader needs for pixels
)


@dataclass(frozen=True)
class TiffReader(Reader):
    """Reads TIFF and BigTIFF files: stored values, never inverted, expanded or scaled.

    Parameters
    ----------
    join
        As for :class:`Reader`.
    series : int or str, optional
        Which of a file's series of pages, by number or name; without it a file must have just one.
    level : int, optional
        Which resolution of a pyramid; 0, the full one, by default.
    pages : str, optional
        Which of the pages: a number, or a slice such as ``0:10:2``.
    """

    series: int | str | None = None
    level: int | None = None
    pages: str | None = None

    suffixes: ClassVar[tuple[str, ...]] = (".tif", ".tiff")

    @contextmanager
    def open(self, path: str) -> Iterator[Contents]:
        """Open the file and check its pages."""
        with self._opened(path) as (tif, series, page_ndim):

            def read(out: Array, start: int) -> None:
                with _strict(path), _decoding(path):
                    _read(tif, series, out, start)

            shape, dtype = tuple(map(int, series.shape)), np.dtype(series.dtype)
            contents = Contents(shape, dtype, page_ndim, read, dims=_dims(series.axes))
            yield contents if self.pages is None else _some_pages(path, contents, self.pages)

    def layout(self, path: str) -> Layout | None:
        """How a file is laid out: its pixels are one run of bytes, or one image in strips or tiles."""
        if self.pages is not None:
            return None
        with self._opened(path) as (tif, series, page_ndim):
            if len(series.levels) > 1:
                return None
            descriptor, stored = tif.filehandle.fileno(), np.dtype(series.dtype).newbyteorder(tif.byteorder)
            if series.dataoffset is not None:
                rows = 1 if self.join == "stack" else math.prod(series.shape[:-page_ndim])
                nbytes = math.prod(series.shape) * stored.itemsize
                return read_layout(descriptor, series.dataoffset, nbytes, stored, rows)
            cut = cut_of(series.keyframe) if series.kind in ONE_IMAGE else None
            return None if cut is None else read_segments(descriptor, cut, stored)

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[TiffFile, TiffPageSeries, int]]:
        """An open file, the series of pages to read, and how many of the last axes are a page."""
        with open_regular(path) as (descriptor, size):
            head = os.pread(descriptor, 256, 0)
            if not head.startswith(MAGICS):
                raise refuse_foreign(path, head, "a TIFF file")
            chain = read_chain(path, descriptor, head)
            with os.fdopen(descriptor, "rb", closefd=False) as handle, _strict(path) as said:
                tif = _parsed(handle, os.path.basename(path), said)
                try:
                    whole = _chosen_series(path, tif, self.series)
                    series = _chosen_level(path, whole, self.level)
                    held = len(tif.pages) if self.series is None else len(series)
                    page_ndim = _check_pages(path, series, size, held=held, levels=len(whole.levels))
                    _check_frames(path, tif, series, chain)
                except RuntimeError as exc:  # tifffile's "incompatible keyframe"
                    raise BadFileError(path, f"not all pages are stored as page 0 is ({exc})") from exc
                _refuse_logged(path, said)
                yield tif, series, page_ndim


def parsed_pages(text: str) -> int | slice:
    """Which pages a number or a slice in words means.

    Raises
    ------
    ValueError
        It is neither.

    Examples
    --------
    >>> parsed_pages("-1"), parsed_pages("0:10:2"), parsed_pages("5:")
    (-1, slice(0, 10, 2), slice(5, None, None))
    """
    parts = [int(part) if part.strip() else None for part in text.split(":")]
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    if not 2 <= len(parts) <= 3 or parts[2:] == [0]:
        raise ValueError(text)
    return slice(*parts)


def _some_pages(path: str, contents: Contents, chosen: str) -> Contents:
    """Some of the pages: one, without an axis of its own, or those of a slice, along one axis."""
    which, number = parsed_pages(chosen), contents.pages
    if isinstance(which, slice):
        taken = range(number)[which]
    else:
        taken = range(number)[which:][:1] if -number <= which < number else range(0)
    if not taken:
        raise BadFileError(path, plural(number, "page"), f"pages={chosen}, counted from 0")

    def read(out: Array, start: int) -> None:
        if taken.step == 1:
            contents.read(out, taken.start + start)
            return
        for k in range(len(out)):
            contents.read(out[k : k + 1], taken[start + k])

    axes = contents.dims[len(contents.dims) - contents.page_ndim :]
    if isinstance(which, int):
        return replace(contents, shape=contents.page_shape, read=read, dims=axes)
    pages = contents.dims[:1] if len(contents.shape) == contents.page_ndim + 1 else ("dim_1",)
    return replace(contents, shape=(len(taken), *contents.page_shape), read=read, dims=(*pages, *axes))


def _parsed(handle: BinaryIO, name: str, said: list[str]) -> TiffFile:
    """The file as OME-TIFF where its description tells of its own pages, all of them; else without."""
    from tifffile import TiffFile

    tif = TiffFile(handle, name=name, _multifile=False, **OFF)
    if not tif.is_ome:
        return tif
    before = len(said)
    try:
        fits = _is_whole(tif) and len(said) == before
    except Exception:  # noqa: BLE001  # whatever odd XML leads to
        fits = False
    if fits:
        return tif
    del said[before:]
    handle.seek(0)
    return TiffFile(handle, name=name, is_ome=False, **OFF)


def _is_whole(tif: TiffFile) -> bool:
    """Whether the series of an OME-TIFF have each of its pages once, and nothing else."""
    pages = [page for series in tif.series for page in series]
    if any(series.kind != "ome" for series in tif.series) or any(page is None for page in pages):
        return False
    return sorted(page.index for page in pages if page is not None) == list(range(len(tif.pages)))


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
def _decoding(path: str) -> Iterator[None]:
    """Say what a decoder means."""
    try:
        yield
    except Exception as exc:
        if isinstance(exc, ImportError) or "imagecodecs" in str(exc):
            problem = "is compressed in a way that needs the package imagecodecs: pip install imagecodecs"
            raise BadFileError(path, problem) from exc
        if type(exc).__module__.startswith("imagecodecs"):  # a codec's own kind
            raise BadFileError(path, f"its pixels cannot be decoded ({type(exc).__name__}: {exc})") from exc
        raise


def _refuse_logged(path: str, taken: list[str]) -> None:
    if taken:
        message = taken[0].partition("> ")[2] if taken[0].startswith("<tifffile.") else taken[0]
        raise BadFileError(path, f"tifffile says: {message or taken[0]}")


def _chosen_series(path: str, tif: TiffFile, chosen: int | str | None) -> TiffPageSeries:
    """The one image, or stack of pages, that the file holds; or that was chosen."""
    series = tif.series
    if not series or not len(tif.pages.first.tags):
        raise BadFileError(path, NO_IMAGE)
    if chosen is None:
        _refuse_others(path, series)
        chosen = 0
    found = [s for k, s in enumerate(series) if chosen in (k, s.name)]
    if len(found) != 1:
        what = f"no series {chosen!r}" if not found else f"{len(found)} series named {chosen!r}"
        raise BadFileError(path, what, f"one of: {_listed(series)}")
    dtype: object = found[0].keyframe.dtype  # None where tifffile has no dtype for the samples
    if dtype is None or not found[0].size:
        raise BadFileError(path, NO_IMAGE)
    return found[0]


def _refuse_others(path: str, series: Sequence[TiffPageSeries]) -> None:
    """Refuse pages beside those of the first series."""
    # What tifffile takes for the lower levels of a pyramid must say that it is reduced, or lie in a sub-directory.
    odd: list[Any] = [p for s in series[1:] for p in s.pages]
    if series[0].kind not in SLIDES:
        odd += [p for level in series[0].levels[1:] for p in level.pages if not _is_lower_level(p)]
    if not odd:
        return
    first = min(odd, key=lambda p: p.index)
    found = f"{shape_text(first.shape)} {first.dtype}"
    due = f"{shape_text(series[0].keyframe.shape)} {series[0].dtype}"
    choice = f"; or choose one by series=: {_listed(series)}" if len(series) > 1 else ""
    if found == due:
        raise BadFileError(path, f"page {first.index} is stored in another way than page 0{choice}")
    raise BadFileError(path, f"page {first.index} {found}", f"{due}, as page 0{choice}")


def _listed(series: Sequence[TiffPageSeries]) -> str:
    """The series of a file, each with number, name, shape and dtype."""
    texts = [
        f"{k} {f'{s.name!r} ' if s.name else ''}{shape_text(s.shape)} {s.dtype}"
        for k, s in enumerate(series[:MOST_LISTED])
    ]
    return ", ".join([*texts, *(["..."] if len(series) > MOST_LISTED else [])])


def _chosen_level(path: str, series: TiffPageSeries, level: int | None) -> TiffPageSeries:
    if level is not None and level >= len(series.levels):
        raise BadFileError(path, plural(len(series.levels), "level"), f"level {level}, counted from 0")
    return series.levels[level or 0]


def _is_lower_level(page: Any) -> bool:
    return page.keyframe.is_reduced or len(page.treeindex) > 1


def _check_pages(path: str, series: TiffPageSeries, size: int, *, held: int, levels: int) -> int:
    """Refuse what tifffile would leave out or fill with zeros; how many of the last axes are a page."""
    page = series.keyframe
    page_size = math.prod(page.shape)
    page_ndim = min(len(page.shape), len(series.shape))
    while math.prod(series.shape[-page_ndim:]) > page_size and page_ndim > 1:
        page_ndim -= 1  # tifffile leaves axes of length 1 out of the series that its page has
    while page_ndim < len(series.shape) and math.prod(series.shape[-page_ndim:]) < page_size:
        page_ndim += 1  # a description may give a page more axes, of length 1
    frames = math.prod(series.shape) // page_size
    if math.prod(series.shape[-page_ndim:]) != page_size:
        raise BadFileError(path, f"{shape_text(series.shape)} in pages of {shape_text(page.shape)}", "whole pages")
    if held not in (1, frames, frames * levels):
        raise BadFileError(path, plural(held, "page"), f"{frames}, as its description says")
    if held < frames:  # ImageJ and others: one directory, the pixels of all pages in one run
        end = page.dataoffsets[0] + frames * page.nbytes if page.is_contiguous else size + 1
        if end > size:
            raise BadFileError(path, f"{held} page", f"{frames}, as its description says")
    for number, one in enumerate(series):
        if one is None:
            raise BadFileError(path, f"page {number} is missing")
        _check_segments(path, number, one, size)
    return page_ndim


def _check_frames(path: str, tif: TiffFile, series: TiffPageSeries, chain: Sequence[Page]) -> None:
    """Refuse pages that tifffile takes to be stored as the first one is, though their directories say otherwise."""
    key, start, nbytes = series.keyframe, series.dataoffset, series.keyframe.nbytes
    if len(key.treeindex) > 1:  # in sub-directories, which are in no chain
        if any(one is not None and one is not key and one.aspage().hash != key.hash for one in series):
            raise BadFileError(path, f"pages of level {key.treeindex[-1] + 1} are stored in several ways")
        return
    if len(series) > 1:
        own = start is None  # then a page with a directory of its own is read along that
        frames = [(k, p.index) for k, p in enumerate(series) if p is not None and not (own and p.keyframe is p)]
    else:  # tifffile takes the directory of the first page for all
        last = min(len(tif.pages), key.index + series.size // key.size)
        frames = list(enumerate(range(key.index, last)))[1:]
    for number, index in frames:
        page, first = chain[index], chain[key.index]
        if page.decisive != first.decisive:
            raise BadFileError(path, f"page {index} is stored in another way than page {key.index}")
        if key.is_contiguous and page.steps != first.steps:
            raise BadFileError(path, f"page {index} has its strips in another order than page {key.index}")
        if start is not None and page.strips[:1] != (start + number * nbytes,):
            raise BadFileError(path, f"page {index} lies elsewhere than the description of page {key.index} says")


def _check_segments(path: str, number: int, page: Any, size: int) -> None:
    """Every strip is stored, whole, inside the file; a tile may be left out, as the format allows."""
    key: TiffPage = page.keyframe
    if len(page.dataoffsets) != len(page.databytecounts) or len(page.dataoffsets) < math.prod(key.chunked):
        raise BadFileError(path, f"page {number} has {len(page.dataoffsets)} strips", f"{math.prod(key.chunked)}")
    for offset, length in zip(page.dataoffsets, page.databytecounts, strict=True):
        if (not offset or not length) and (offset or length or not key.is_tiled):
            raise BadFileError(path, f"page {number} has a strip that is not stored")
        if offset + length > size:
            found = f"page {number} ends at byte {offset + length}, the file at {size}"
            raise BadFileError(path, f"cut short, or not yet copied: {found}")
    if not all(page.dataoffsets):
        _check_fill(path, number, key)
    if key.compression in CCITT and key.bitspersample != 1:
        raise BadFileError(path, f"page {number} of {key.bitspersample} bits", "1, as its compression is for")
    if key.bitspersample == 24 and key.dtype is not None and key.dtype.kind != "f":
        raise BadFileError(path, f"page {number} of 24-bit integers", "8, 16 or 32: readers differ in their byte order")
    if key.is_tiled:
        _check_tile(path, number, key)
    else:
        _check_strips(path, number, sum(page.databytecounts), key)


def _check_fill(path: str, number: int, key: TiffPage) -> None:
    """Refuse tiles that are not stored where their value is none of their dtype: tifffile would take 0."""
    given = key.tags.valueof(NODATA)
    with suppress(ValueError):
        if given is None or np.array_equal(float(given.replace(",", ".")), key.nodata, equal_nan=True):
            return
    raise BadFileError(path, f"page {number} has tiles that are not stored, of value {given}, which is no {key.dtype}")


def _check_tile(path: str, number: int, key: TiffPage) -> None:
    """Refuse a tile that would take far more memory than its page, before it is decoded."""
    nbytes = key.tiledepth * key.tilelength * key.tilewidth * key.samplesperpixel * key.dtype.itemsize  # type: ignore[union-attr]
    if nbytes > max(MOST_TILE_NBYTES, 4 * key.nbytes):
        found = f"tiles of {key.tilelength} x {key.tilewidth} pixels in page {number} of {shape_text(key.shape)}"
        raise BadFileError(path, found, "tiles of a sensible size")


def _check_strips(path: str, number: int, stored: int, key: TiffPage) -> None:
    """Refuse a page that claims more pixels than its bytes can stand for, before it is decoded."""
    bits: object = key.bitspersample  # a tuple where samples differ, whatever the annotation says
    expanded = 1 if key.compression == 1 else MOST_EXPANDED.get(key.compression, math.inf)
    needed = key.size * bits // 8 if isinstance(bits, int) else 0
    if stored * expanded < needed:
        due = f"{needed}" if expanded == 1 else f"at least {math.ceil(needed / expanded)}"
        raise BadFileError(path, f"page {number} has {stored} bytes of pixels", due)


def _read(tif: TiffFile, series: TiffPageSeries, out: Array, start: int) -> None:
    """Fill ``out`` with pages, decoded in this thread."""
    page = series.keyframe
    if series.dataoffset is not None:  # uncompressed, in one run: read without the GIL, straight into place
        read_at(tif.filehandle.fileno(), as_bytes(out).data, series.dataoffset + start * page.nbytes)
        to_native(out, np.dtype(page.dtype).newbyteorder(tif.byteorder))
    elif len(out) * math.prod(page.shape) == math.prod(series.shape):
        out[...] = tif.asarray(series=series, maxworkers=1).reshape(out.shape)
    else:
        for k in range(len(out)):
            one: Any = series[start + k]  # never None: _check_pages saw them all
            out[k] = one.asarray(maxworkers=1).reshape(out.shape[1:])


def _dims(axes: str) -> tuple[str, ...]:
    """Names for the axes, from tifffile's letters where each is known and single."""
    known = [AXES[a] for a in axes if a in AXES]
    if len(known) == len(set(known)):
        return tuple(AXES.get(a, f"dim_{k + 1}") for k, a in enumerate(axes))
    return tuple(f"dim_{k + 1}" for k in range(len(axes)))
