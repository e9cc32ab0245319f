"""From folders, patterns and names to the ordered list of files, each with its size and time.

What is *named* (a file) is taken as it is; what is *scanned* (a folder, a pattern) leaves out what no
one means: hidden files, system litter, kinds of file that are not read, and what daskstack made.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import SourceError, UsageError
from daskstack.files import absolute, clipped_mtime, is_url, read_regular, stamp
from daskstack.order import composed, natural_key
from daskstack.text import count, listed, printable

Source: TypeAlias = "str | os.PathLike[str]"

LITTER = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"})
LOCKS = "~$"  # what office programs put before the name of a file that is open
LITTER_FOLDERS = frozenset(
    {"__macosx", "@eadir", "$recycle.bin", "#recycle", "system volume information", "lost+found"}
)
UNFINISHED = ("~", ".tmp", ".part", ".partial", ".crdownload", ".swp")
SLOW_STAT = 200e-6  # seconds a call: a local disk takes 2 microseconds, a parallel file system about a millisecond
STAT_THREADS = 32
MOST_REPORTED = 20
MOST_RECORD_BYTES = 16 << 20
NAMED = -1  # stands for the start of the part below the source folder until all files named one by one are known
_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class Listing:
    """The files of a stack, in order.

    Attributes
    ----------
    paths : list of str
        Absolute, links not resolved.
    below : list of str
        The part of each path below its source folder (of a pattern: below its fixed folder; of files
        named one by one: below their common folder); what labels are read from.
    sizes, mtimes : array of int64, shape (files,)
        Bytes, and nanoseconds since 1970.
    sources : tuple of str
        What was asked for, as it was written.
    left_out : tuple of str
        Names that the scan left out.
    natural : bool
        Whether the order is the natural one (else the given one).
    rows : array of int64, shape (files,), optional
        How many items each file holds, where that is known already.
    """

    paths: list[str]
    below: list[str]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    sources: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    natural: bool = True
    rows: NDArray[np.int64] | None = None

    def take(self, order: NDArray[np.int64]) -> Listing:
        """Some of the files, in another order."""
        return replace(
            self,
            paths=[self.paths[k] for k in order],
            below=[self.below[k] for k in order],
            sizes=self.sizes[order],
            mtimes=self.mtimes[order],
            rows=None if self.rows is None else self.rows[order],
        )

    def looked_at_again(self, which: NDArray[np.int64]) -> Listing:
        """The same files, size and mtime of some of them as they are now; -1 where one is gone."""
        sizes, mtimes = self.sizes.copy(), self.mtimes.copy()
        for k in which.tolist():
            sizes[k], mtimes[k] = stamp(self.paths[k])
        return replace(self, sizes=sizes, mtimes=mtimes)


@dataclass
class _Found:
    """What the sources gave so far: (path, where its part below the source folder begins)."""

    files: list[tuple[str, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold Python's cycle collector off where hundreds of thousands of names and tuples are made.

    None of them is garbage, yet looking through them again and again took a third of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@collector_paused()
def find(
    sources: Sequence[Source],
    *,
    in_order: Sequence[Source] = (),
    suffixes: tuple[str, ...] | None,
) -> Listing:
    """The files that the sources stand for, in order.

    Parameters
    ----------
    sources : sequence of path
        Folders (scanned with all below them), patterns and files; their files together are put in
        natural order, each taken once.
    in_order : sequence of path, optional
        More of them, kept in the order given, repeats included; they follow.
    suffixes : tuple of str, optional
        Suffixes in lower case of the files that a scan takes; None takes every kind.

    Returns
    -------
    Listing

    Raises
    ------
    SourceError
        A name that is not there, a pattern or folder that gives nothing, a broken link, something
        that is no regular file: all that were met, in one report.
    UsageError
        No source at all, or a URL.
    """
    asked = tuple(os.fspath(s) for s in (*sources, *in_order))
    if not asked:
        raise UsageError("no source is given", "name folders, files or quoted patterns")
    found = _Found()
    for source in sources:
        _expand(os.fspath(source), suffixes, found)
    files = _in_natural_order(found.files)
    for source in in_order:
        found.files = []
        _expand(os.fspath(source), suffixes, found)
        files += _in_natural_order(found.files)
    files = _below_common_folder(files)
    paths = [path for path, _ in files]
    sizes, mtimes = _stat_all(paths, found.problems)
    if found.problems:
        raise _report(found.problems)
    return Listing(
        paths=paths,
        below=[path[start:] for path, start in files],
        sizes=sizes,
        mtimes=mtimes,
        sources=asked,
        left_out=tuple(found.left_out),
        natural=not in_order,
    )


def _report(problems: Sequence[str]) -> SourceError:
    if len(problems) == 1:
        return SourceError(problems[0], "check the name; patterns are quoted, as in 'frames/*.tif'")
    shown = [
        *problems[:MOST_REPORTED],
        *([f"and {count(len(problems) - MOST_REPORTED)} more"] * (len(problems) > MOST_REPORTED)),
    ]
    return SourceError(f"{count(len(problems))} sources cannot be used\n  " + "\n  ".join(shown), "check the names")


def _in_natural_order(files: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Each path once, folder by folder, those of a folder before those of the folders in it."""
    starts = dict(reversed(files))
    names: dict[str, list[str]] = {}
    for path in starts:
        folder, _, name = path.rpartition("/")
        names.setdefault(folder, []).append(name)
    ordered = sorted(names, key=lambda folder: [natural_key(part) for part in folder.split("/")])
    paths = [f"{folder}/{name}" for folder in ordered for name in sorted(names[folder], key=natural_key)]
    return [(path, starts[path]) for path in paths]


def _below_common_folder(files: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Files named one by one begin below the folder that all of them share."""
    folders = {os.path.dirname(path) for path, start in files if start == NAMED}
    common = len(os.path.commonpath(folders).rstrip("/")) + 1 if folders else 0
    return [(path, common if start == NAMED else start) for path, start in files]


def _expand(source: str, suffixes: tuple[str, ...] | None, found: _Found) -> None:
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


def _match(folder: str, parts: Sequence[str], start: int, suffixes: tuple[str, ...] | None, found: _Found) -> None:
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
    entries = _entries(folder, found)
    own = _own_outputs(folder, entries) if not rest else frozenset()
    for entry in filter(lambda e: matches(e.name), entries):
        if _is_folder(entry):
            if _is_wanted_folder(entry, found, hidden=part.startswith(".")):
                if rest:
                    _match(entry.path, rest, start, suffixes, found)
                else:
                    _scan(entry.path, start, suffixes, found)
        elif not rest:
            _take(entry, start, suffixes, found, own, hidden=part.startswith("."))


def _scan(folder: str, start: int, suffixes: tuple[str, ...] | None, found: _Found) -> None:
    """Add every usable file in the folder and in those below it."""
    for below, entries in _folders(folder, found):
        own = _own_outputs(below, entries)
        for entry in entries:
            if not _is_folder(entry):
                _take(entry, start, suffixes, found, own)


def _folders(folder: str, found: _Found) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """The folder and all wanted ones below it, with what is in them; a link back to a folder above is not followed."""
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
        entries = _entries(path, found)
        yield path, entries
        below = [entry.path for entry in entries if _is_folder(entry) and _is_wanted_folder(entry, found)]
        todo += [(path, above | {(here.st_dev, here.st_ino)}) for path in below]


def _entries(folder: str, found: _Found) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as exc:
        found.problems.append(f"cannot list the folder {printable(folder)}: {exc.strerror}")
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that loops: not a folder, and reported when it is looked at
        return False


def _is_wanted_folder(entry: os.DirEntry[str], found: _Found, *, hidden: bool = False) -> bool:
    """Whether to look into a folder: not hidden ones, litter, Zarr stores and staging folders."""
    name = entry.name.lower()
    unwanted = (name.startswith(".") and not hidden) or name in LITTER_FOLDERS or name.endswith(".zarr")
    if unwanted or (name.endswith(".part") and _is_staging(entry.path)):
        found.left_out.append(entry.name + "/")
        return False
    return True


def _is_staging(folder: str) -> bool:
    try:
        return any(os.path.isfile(os.path.join(folder, name, "manifest.json")) for name in os.listdir(folder))
    except OSError:  # reported when it is scanned
        return False


def _take(
    entry: os.DirEntry[str],
    start: int,
    suffixes: tuple[str, ...] | None,
    found: _Found,
    own: frozenset[str],
    *,
    hidden: bool = False,
) -> None:
    """Add one scanned file, unless nobody means it."""
    name = entry.name.lower()
    out = (name.startswith(".") and not hidden) or name.startswith(LOCKS) or name in LITTER or entry.name in own
    unusable = name.endswith(UNFINISHED) if suffixes is None else not name.endswith(suffixes)
    if out or unusable:
        found.left_out.append(entry.name)
    else:
        found.files.append((entry.path, start))


def _own_outputs(folder: str, entries: Sequence[os.DirEntry[str]]) -> frozenset[str]:
    """The names in a folder that daskstack made: arrays as long as their records say, and what lies beside them."""
    own: set[str] = set()
    for record in (e.name for e in entries if e.name.endswith(".npy.json")):
        array = record.removesuffix(".json")
        try:
            made = json.loads(read_regular(os.path.join(folder, record), MOST_RECORD_BYTES))["daskstack"]
            if os.stat(os.path.join(folder, array)).st_size == made["bytes"]:
                labels = {f"{array.removesuffix('.npy')}.{label}.npy" for label in made["labels"]}
                own |= {array, record, f"{array}.index.csv", *labels}
        except (OSError, ValueError, LookupError, TypeError):
            continue  # somebody else's
    return frozenset(own)


def _stat_all(paths: Sequence[str], problems: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Size and mtime of every file; on several threads where a call waits for a server."""
    begin = time.perf_counter()
    first = [_stat(p) for p in paths[:64]]
    if paths[64:] and (time.perf_counter() - begin) / 64 > SLOW_STAT:
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            results = [*first, *pool.map(_stat, paths[64:], chunksize=256)]
    else:
        results = [*first, *map(_stat, paths[64:])]
    problems += [r for r in results if isinstance(r, str)]
    good = [(0, 0) if isinstance(r, str) else r for r in results]
    table = np.array(good, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def _stat(path: str) -> tuple[int, int] | str:
    try:
        found = os.stat(path)
    except OSError as exc:
        if os.path.islink(path):
            return f"broken link: {printable(path)} -> {printable(os.readlink(path))} ({exc.strerror})"
        return f"{printable(path)}: {exc.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"not a regular file: {printable(path)}"
    return found.st_size, clipped_mtime(found)
