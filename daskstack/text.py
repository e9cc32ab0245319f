"""How sizes, counts, times and names are put into words: one way for every message."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
SHOWN = 20  # lines of a list that may be long


def count(number: int) -> str:
    """A whole number with its thousands set apart.

    Examples
    --------
    >>> count(220000)
    '220,000'
    """
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """A count with its noun, in the singular where it is one.

    Examples
    --------
    >>> plural(1, "file"), plural(2000, "file")
    ('1 file', '2,000 files')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{count(number)} {noun}{ending}"


def nbytes(number: float) -> str:
    """A number of bytes in decimal units.

    Examples
    --------
    >>> nbytes(84), nbytes(14_900_000_000), nbytes(67_712)
    ('84 B', '14.9 GB', '67.7 kB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(number) < 999.5 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """A time as ``m:ss`` or ``h:mm:ss``; a short one in seconds.

    Examples
    --------
    >>> duration(0.52), duration(99), duration(7322)
    ('0.5 s', '1:39', '2:02:02')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(name: str) -> str:
    r"""A name with all that would disturb a terminal escaped: control characters, bytes that are no UTF-8.

    Examples
    --------
    >>> printable("a\nb.tif")
    'a\\nb.tif'
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def shown(path: str) -> str:
    """A path as people read it: below the current folder without that folder's own path."""
    try:
        here = os.getcwd() + os.sep
    except FileNotFoundError:  # the current folder was removed
        here = ""
    return printable(path[len(here) :] if here and path.startswith(here) and len(path) > len(here) else path)


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of many names, and the last where some are left out.

    Examples
    --------
    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c ... e'
    """
    if len(names) <= most + 1:
        return ", ".join(map(printable, names))
    return f"{', '.join(map(printable, names[:most]))} ... {printable(names[-1])}"


def first_of(lines: Sequence[object], most: int = SHOWN) -> list[str]:
    """The first of many lines, and how many more there are.

    Examples
    --------
    >>> first_of(["a", "b", "c"]), first_of(["a", "b", "c"], 2)
    (['a', 'b', 'c'], ['a', 'b', 'and 1 more'])
    """
    left = len(lines) - most
    return [*map(str, lines[:most]), *([f"and {count(left)} more"] if left > 0 else [])]


def shape_text(shape: Sequence[int]) -> str:
    """A shape as NumPy writes it, whatever kind of integers it holds.

    Examples
    --------
    >>> shape_text([184, 92])
    '(184, 92)'
    """
    return str(tuple(int(n) for n in shape))


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Words and what they stand for in two columns, wrapped at 80 characters.

    Examples
    --------
    >>> print(table([("files", "220,000 in frames"), ("order", "natural")]))
    files   220,000 in frames
    order   natural
    """
    lines: list[str] = []
    for word, text in rows:
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"{word:<8}",
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [word]
    return "\n".join(lines)
