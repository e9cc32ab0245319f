"""From blocks to files on disk: one module a format, chosen by the suffix of the output."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskstack.errors import UsageError
from daskstack.targets.base import Index, Target
from daskstack.targets.npy import NpyTarget
from daskstack.text import printable

__all__ = ["Index", "NpyTarget", "Target", "choose"]

FORMATS: tuple[type[Target], ...] = (NpyTarget,)


def choose(out: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Target:
    """The target for an output, by its suffix.

    Raises
    ------
    UsageError
        No format has that suffix.
    """
    for target in FORMATS:
        if out.endswith(target.suffix):
            return target(shape, dtype)
    raise UsageError(f"the output {printable(out)!r} has no known suffix", "let it end in .npy")
