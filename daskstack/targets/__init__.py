"""From blocks to files on disk: one module a format, chosen by the suffix of the output."""

from __future__ import annotations

from daskstack.errors import UsageError
from daskstack.targets.base import Index, Target, Tiling, along_axes, crc32c
from daskstack.targets.npy import NpyTarget
from daskstack.targets.zarr import ZarrTarget
from daskstack.text import printable

__all__ = ["SUFFIXES", "Index", "NpyTarget", "Target", "Tiling", "ZarrTarget", "along_axes", "crc32c", "format_of"]

FORMATS: tuple[type[Target], ...] = (NpyTarget, ZarrTarget)
SUFFIXES = tuple(target.suffix for target in FORMATS)


def format_of(out: str) -> type[Target]:
    """The format of an output, by its suffix.

    Raises
    ------
    UsageError
        No format has that suffix.
    """
    for target in FORMATS:
        if out.endswith(target.suffix):
            return target
    raise UsageError(f"the output {printable(out)!r} has no known suffix", f"let it end in {' or '.join(SUFFIXES)}")
