"""The natural order of names, and the one spelling in which they are compared."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Any

_DIGITS = re.compile(r"(\d+)")


def natural_key(name: str) -> tuple[Any, ...]:
    """A sort key that puts ``img_2`` before ``img_10``: runs of digits count as whole numbers.

    A hyphen is a separator, never a minus; upper and lower case sort together; the suffix counts last.

    Examples
    --------
    >>> sorted(["img_10.tif", "img_2.tif", "IMG_1.tif"], key=natural_key)
    ['IMG_1.tif', 'img_2.tif', 'img_10.tif']
    """
    stem, suffix = os.path.splitext(composed(name).casefold())
    parts: list[Any] = _DIGITS.split(stem)
    parts[1::2] = map(int, parts[1::2])
    return parts, suffix, name


def composed(name: str) -> str:
    """The name with its accents in composed form (NFC), as keyboards give them and macOS does not."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)
