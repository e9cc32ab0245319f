"""From folders, patterns and names to the ordered list of files, each with its size and time.

What is *named* (a file) is taken as it is; what is *scanned* (a folder, a pattern) leaves out what no
one means: hidden files, system litter, kinds of file that are not read, and what daskstack made.
"""

from __future__ import annotations

import gc
import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from daskstack.discover.scan import NAMED, Found, expand
from daskstack.errors import SourceError, UsageError
from daskstack.files import clipped_mtime, stamp
from daskstack.order import natural_key
from daskstack.text import count, first_of, printable

Source: TypeAlias = "str | os.PathLike[str]"

SLOW_STAT = 200e-6  # seconds a call: a local disk takes 2 microseconds, a parallel file system about a millisecond
STAT_THREADS = 32
STATS_AT_ONCE = 256  # a task of these threads


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
    found = Found()
    for source in sources:
        expand(os.fspath(source), suffixes, found)
    files = _in_natural_order(found.files)
    for source in in_order:
        found.files = []
        expand(os.fspath(source), suffixes, found)
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
    lines = [f"{count(len(problems))} sources cannot be used", *first_of(problems)]
    return SourceError("\n  ".join(lines), "check the names")


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


def _stat_all(paths: Sequence[str], problems: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Size and mtime of every file; on several threads where a call waits for a server."""
    begin = time.perf_counter()
    first = _stat_some(paths[:64])
    is_slow = (time.perf_counter() - begin) / 64 > SLOW_STAT
    rest = [paths[k : k + STATS_AT_ONCE] for k in range(64, len(paths), STATS_AT_ONCE)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        results = [first, *(pool.map if is_slow else map)(_stat_some, rest)]
    for _, wrong in results:
        problems += wrong
    table = np.concatenate([part for part, _ in results])
    return table[:, 0].copy(), table[:, 1].copy()


def _stat_some(paths: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """A row of size and mtime a file, and what is wrong with those that are none."""
    found = [_stat(path) for path in paths]
    wrong = [f for f in found if isinstance(f, str)]
    return np.array([(0, 0) if isinstance(f, str) else f for f in found], np.int64).reshape(-1, 2), wrong


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
