"""From files to arrays: one module a format, chosen by suffix and checked against the first bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from daskstack.errors import UsageError
from daskstack.readers.base import Contents, Header, Join, Reader, check, dims
from daskstack.readers.cast import number_dtype
from daskstack.readers.function import FunctionReader
from daskstack.readers.image import BmpReader, Jpeg2000Reader, JpegReader, JpegXlReader, PngReader, WebpReader
from daskstack.readers.layout import Layout
from daskstack.readers.npy import NpyReader
from daskstack.readers.tiff import TiffReader, parsed_pages
from daskstack.text import shown

__all__ = [
    "SUFFIXES",
    "BmpReader",
    "Contents",
    "FunctionReader",
    "Header",
    "Join",
    "Jpeg2000Reader",
    "JpegReader",
    "JpegXlReader",
    "Layout",
    "NpyReader",
    "PngReader",
    "Reader",
    "TiffReader",
    "WebpReader",
    "check",
    "choose",
    "dims",
    "number_dtype",
    "parts_of_files",
]

FORMATS: tuple[type[Reader], ...] = (
    NpyReader,
    TiffReader,
    PngReader,
    JpegReader,
    Jpeg2000Reader,
    JpegXlReader,
    WebpReader,
    BmpReader,
)
SUFFIXES = tuple(s for f in FORMATS for s in f.suffixes)


def choose(
    path: str,
    join: Join,
    function: Callable[[str], Any] | None = None,
    dtype: npt.DTypeLike | None = None,
    *,
    series: int | str | None = None,
    level: int | None = None,
    pages: str | None = None,
) -> Reader:
    """The reader for a file, by its suffix in any case; ``function`` goes before all.

    Raises
    ------
    UsageError
        No reader has that suffix, ``join`` is neither "stack" nor "concat", ``dtype`` is none of numbers,
        or it is no TIFF file of which ``series``, ``level`` or ``pages`` could choose a part.
    """
    parts = {"series": series, "level": level, "pages": pages}
    parts = {name: value for name, value in parts.items() if value is not None}
    if join not in ("stack", "concat"):
        raise UsageError(f"join={join!r}", 'choose "stack" or "concat"')
    cast = None if dtype is None else number_dtype(dtype)
    if parts and (function is not None or not path.lower().endswith(TiffReader.suffixes)):
        raise UsageError(f"{', '.join(parts)} of files that are no TIFF, or have a reader", "leave it out")
    if function is not None:
        return FunctionReader(join, cast, function=function)
    if parts:
        return TiffReader(join, cast, series, level, pages)
    suffix = os.path.splitext(path)[1].lower()
    for reader in FORMATS:
        if suffix in reader.suffixes:
            return reader(join, cast)
    raise UsageError(
        f"no reader for {suffix or 'a file without a suffix'}: {shown(path)}",
        f"daskstack reads {', '.join(SUFFIXES)}; for others give reader=, a function from path to array",
    )


def parts_of_files(series: Any, level: Any, pages: Any) -> dict[str, Any]:
    """What the options say of the part of each TIFF file that is read, in one way of writing it.

    Raises
    ------
    UsageError
        One of them cannot be meant.

    Examples
    --------
    >>> parts_of_files("Baseline", None, slice(0, 10, 2))
    {'series': 'Baseline', 'level': None, 'pages': '0:10:2'}
    """
    if isinstance(pages, slice):
        ends = (pages.start, pages.stop, *([] if pages.step is None else [pages.step]))
        pages = ":".join("" if end is None else str(end) for end in ends)
    if not (series is None or isinstance(series, str) or _is_count(series)) or series == "":
        raise UsageError(f"series={series!r}", "give its number, counted from 0, or its name")
    if not (level is None or _is_count(level)):
        raise UsageError(f"level={level!r}", "give a number; 0 is the full resolution")
    if pages is not None:
        try:
            parsed_pages(pages := str(pages))
        except ValueError as exc:
            raise UsageError(f"pages={pages!r}", 'give a number, or a slice as in "0:10:2"') from exc
    return {
        "series": int(series) if _is_count(series) else series,
        "level": None if level is None else int(level),
        "pages": pages,
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)
