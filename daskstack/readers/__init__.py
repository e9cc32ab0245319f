"""From files to arrays: one module a format, chosen by suffix and checked against the first bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from daskstack.errors import UsageError
from daskstack.readers.base import Contents, Header, Join, Reader, check, dims
from daskstack.readers.function import FunctionReader
from daskstack.readers.layout import Layout, LayoutReader
from daskstack.readers.npy import NpyReader
from daskstack.readers.tiff import TiffReader
from daskstack.text import shown

__all__ = [
    "SUFFIXES",
    "Contents",
    "FunctionReader",
    "Header",
    "Join",
    "Layout",
    "LayoutReader",
    "NpyReader",
    "Reader",
    "TiffReader",
    "check",
    "choose",
    "dims",
]

FORMATS: tuple[type[Reader], ...] = (NpyReader, TiffReader)
SUFFIXES = tuple(s for f in FORMATS for s in f.suffixes)


def choose(path: str, join: Join, function: Callable[[str], Any] | None = None) -> Reader:
    """The reader for a file, by its suffix in any case; ``function`` goes before all.

    Raises
    ------
    UsageError
        No reader has that suffix, or ``join`` is neither "stack" nor "concat".
    """
    if join not in ("stack", "concat"):
        raise UsageError(f"join={join!r}", 'choose "stack" or "concat"')
    if function is not None:
        return FunctionReader(join, function=function)
    suffix = os.path.splitext(path)[1].lower()
    for reader in FORMATS:
        if suffix in reader.suffixes:
            return reader(join)
    raise UsageError(
        f"no reader for {suffix or 'a file without a suffix'}: {shown(path)}",
        f"daskstack reads {', '.join(SUFFIXES)}; for others give reader=, a function from path to array",
    )
