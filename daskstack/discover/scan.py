"""What the sources stand for: the files in a folder, those that a pattern matches, and what of them no one means."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from daskstack.errors import UsageError
from daskstack.files import absolute, is_url, read_regular
from daskstack.order import composed
from daskstack.text import listed, printable

LITTER = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
LOCKS = "~$"  # what office programs put before the name of a file that is open
LITTER_FOLDERS = frozenset(
    {"__macosx", "@eadir", "$recycle.bin", "#recycle", "system volume information", "lost+found"}
)
UNFINISHED = ("~", ".tmp", ".part", ".partial", ".crdownload", ".swp")
MOST_RECORD_BYTES = 16 << 20
NAMED = -1  # stands for the start of the part below the source folder until all files named one by one are known
_MAGIC = re.compile(r"[*?[]")


@dataclass
class Found:
    """What the sources gave so far: (path, where its part below the source folder begins)."""

    files: list[tuple[str, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def expand(source: str, suffixes: tuple[str, ...] | None, found: Found) -> None:
    """Add to ``found`` what one source stands for."""
    if is_url(source):
        raise UsageError(f"{source!r} is a URL; daskstack reads files", "copy the files to a disk first")
    if not source or "\0" in source:
        raise UsageError(f"{source!r} is no name of a file", "name folders, files or quoted patterns")
    path = absolute(source)
    before, left_before = len(found.files), len(found.left_out)
    if os.path.isdir(path):
        _scan(path, len(path.rstrip("/")) + 1, suffixes, found)
        what = f"no usable file in the folder {source!r}"
    elif (missing := _missing(path)) is None:
        found.files.append((path, NAMED))
    elif _MAGIC.search(source) or not source.isascii():
        fixed, parts = _split_pattern(path)
        _match(fixed, parts, len(fixed.rstrip("/")) + 1, suffixes, found)
        what = f"no usable file matches {source!r}"
    else:
        found.problems.append(f"{missing}: {source!r}")
        return
    if len(found.files) == before:
        out = found.left_out[left_before:]
        found.problems.append(what + (f" (left out: {listed(out)})" if out else ""))


def _missing(path: str) -> str | None:
    """Why there is nothing of that name; None where there is."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "no such file or folder"
    except OSError as exc:
        return str(exc.strerror).lower()
    return None


def _split_pattern(path: str) -> tuple[str, list[str]]:
    """The longest leading folder that is there as it is written, and the parts of the pattern below it."""
    parts = path.split("/")
    k = 1
    while k < len(parts) - 1 and os.path.isdir("/".join(parts[: k + 1])):
        k += 1
    return "/".join(parts[:k]) or "/", parts[k:]


def _matcher(part: str) -> Callable[[str], object]:
    """How names are compared with one part of a pattern: accents composed, the suffix in any case."""
    stem, suffix = os.path.splitext(composed(part))
    any_case = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in suffix)
    literal = not re.search(r"[]*?[]", suffix)
    match = re.compile(fnmatch.translate(stem + any_case if literal else composed(part))).match
    return lambda name: name == part or match(composed(name))


def _match(folder: str, parts: Sequence[str], start: int, suffixes: tuple[str, ...] | None, found: Found) -> None:
    """Add the files below ``folder`` that the parts of a pattern name; ``**`` is any number of folders."""
    part, *rest = parts
    if part == "**":
        if not rest:
            _scan(folder, start, suffixes, found)
            return
        for below, _ in _folders(folder, found):
            _match(below, rest, start, suffixes, found)
        return
    matches = _matcher(part)
    hidden = part.startswith(".")
    folders, names = _entries(folder, found)
    own = _own_outputs(folder, names) if not rest else frozenset()
    for name in filter(matches, names if not rest else ()):
        _take(os.path.join(folder, name), start, suffixes, found, own, hidden=hidden)
    for name in filter(matches, folders):
        below = os.path.join(folder, name)
        if _is_wanted_folder(below, found, hidden=hidden):
            if rest:
                _match(below, rest, start, suffixes, found)
            else:
                _scan(below, start, suffixes, found)


def _scan(folder: str, start: int, suffixes: tuple[str, ...] | None, found: Found) -> None:
    """Add every usable file in the folder and in those below it."""
    for below, names in _folders(folder, found):
        own = _own_outputs(below, names)
        for name in names:
            _take(os.path.join(below, name), start, suffixes, found, own)


def _folders(folder: str, found: Found) -> Iterator[tuple[str, list[str]]]:
    """The folder and all wanted ones below it, with the names of the files in each; no link back to one above it."""
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while todo:
        path, above = todo.pop()
        try:
            here = os.stat(path)
        except OSError as exc:
            found.problems.append(f"cannot list the folder {printable(path)}: {exc.strerror}")
            continue
        if (here.st_dev, here.st_ino) in above:
            found.left_out.append(os.path.basename(path) + "/")
            continue
        folders, names = _entries(path, found)
        yield path, names
        below = [os.path.join(path, name) for name in folders]
        todo += [(b, above | {(here.st_dev, here.st_ino)}) for b in below if _is_wanted_folder(b, found)]


def _entries(folder: str, found: Found) -> tuple[list[str], list[str]]:
    """The names of the folders in a folder, and those of all else."""
    folders: list[str] = []
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:  # the names alone are kept: an entry takes many times as much
                (folders if _is_folder(entry) else names).append(entry.name)
    except OSError as exc:
        found.problems.append(f"cannot list the folder {printable(folder)}: {exc.strerror}")
    return folders, names


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that loops: not a folder, and reported when it is looked at
        return False


def _is_wanted_folder(path: str, found: Found, *, hidden: bool = False) -> bool:
    """Whether to look into a folder: not hidden ones, litter, Zarr stores and staging folders."""
    name = os.path.basename(path).lower()
    unwanted = (name.startswith(".") and not hidden) or name in LITTER_FOLDERS or name.endswith(".zarr")
    if unwanted or (name.endswith(".part") and _is_staging(path)):
        found.left_out.append(os.path.basename(path) + "/")
        return False
    return True


def _is_staging(folder: str) -> bool:
    try:
        return any(os.path.isfile(os.path.join(folder, name, "manifest.json")) for name in os.listdir(folder))
    except OSError:  # reported when it is scanned
        return False


def _take(
    path: str,
    start: int,
    suffixes: tuple[str, ...] | None,
    found: Found,
    own: frozenset[str],
    *,
    hidden: bool = False,
) -> None:
    """Add one scanned file, unless nobody means it."""
    name = os.path.basename(path)
    lower = name.lower()
    out = (name.startswith(".") and not hidden) or name.startswith(LOCKS) or lower in LITTER or name in own
    unusable = lower.endswith(UNFINISHED) if suffixes is None else not lower.endswith(suffixes)
    if out or unusable:
        found.left_out.append(name)
    else:
        found.files.append((path, start))


def _own_outputs(folder: str, names: Sequence[str]) -> frozenset[str]:
    """The names in a folder that daskstack made: arrays as long as their records say, and what lies beside them."""
    own: set[str] = set()
    for record in (name for name in names if name.endswith(".npy.json")):
        array = record.removesuffix(".json")
        try:
            made = json.loads(read_regular(os.path.join(folder, record), MOST_RECORD_BYTES))["daskstack"]
            if os.stat(os.path.join(folder, array)).st_size == made["bytes"]:
                labels = {f"{array.removesuffix('.npy')}.{label}.npy" for label in made["labels"]}
                own |= {array, record, f"{array}.index.csv", *labels}
        except (OSError, ValueError, LookupError, TypeError):
            continue  # somebody else's
    return frozenset(own)
