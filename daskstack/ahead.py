"""Files opened before it is their turn to be read, so that neither a server's answer nor a disk is waited for."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from daskstack.files import let_go

MOST_AHEAD = 32  # files that a thread has opened beside the one that it reads
OPEN_THREADS = 8
SLOW_OPEN = 500e-6  # seconds a file: a local disk takes 5 microseconds, a parallel file system about a millisecond
ENOUGH_OPENS = 8  # to judge by
SLOW_READ = 200e-6  # seconds a file: 68 KB take 30 microseconds from memory, 300 from a disk
TOO_MANY = -1  # in place of a descriptor
_will_need = getattr(os, "POSIX_FADV_WILLNEED", None)  # macOS has no such


def opened_ahead(paths: Sequence[str]) -> Generator[int | None]:
    """Descriptors of files to be read in this order; each is closed when the next is asked for.

    Some are opened before it is their turn, by several threads where each waits for a server, and where reading
    waits for a disk the system is told of them, so that it fetches them meanwhile.  None stands for a file that
    cannot be opened.
    """
    coming = deque(paths)
    opened: deque[int | None] = deque()
    with _ahead as most, ExitStack() as threads:
        open_all: Callable[..., Any] = _open_in_turn
        try:
            while opened or coming:
                if coming and len(opened) <= most // 2:
                    if _ahead.slow_opens and open_all is _open_in_turn:
                        open_all = threads.enter_context(ThreadPoolExecutor(OPEN_THREADS)).map
                    _open_more(coming, opened, most + 1 - len(opened), open_all)
                    begin, wanted = time.perf_counter(), len(opened)
                yield opened[0]
                _close(opened.popleft())
                if len(opened) == wanted // 2:
                    _ahead.slow_reads = time.perf_counter() - begin > SLOW_READ * (wanted - len(opened))
        finally:
            for descriptor in opened:
                _close(descriptor)


def _open_more(coming: deque[str], opened: deque[int | None], most: int, open_all: Callable[..., Any]) -> None:
    """Open the next files, as many as the process may have open; where that is none at all, the next one is None."""
    batch = [coming.popleft() for _ in range(min(most, len(coming)))]
    found = list(open_all(_open_to_read, batch))
    if TOO_MANY in found:
        kept = found.index(TOO_MANY)
        for descriptor in found[kept:]:
            _close(descriptor)
        coming.extendleft(reversed(batch[kept:]))
        found = found[:kept]
        if not found and not opened:
            alone = _open_to_read(coming.popleft())
            found = [None if alone == TOO_MANY else alone]
    opened.extend(found)


def _open_in_turn(open_one: Callable[[str], int | None], paths: Sequence[str]) -> list[int | None]:
    """The same as the map of a pool of threads; whether each of the files took long to open is remembered."""
    found = []
    fastest = SLOW_OPEN
    for path in paths:
        begin = time.perf_counter()
        found.append(open_one(path))
        fastest = min(fastest, time.perf_counter() - begin)
    _ahead.slow_opens = len(paths) >= ENOUGH_OPENS and fastest >= SLOW_OPEN
    return found


class _Ahead:
    """What threads that read share: how many files each may open ahead, and whether opening and reading are slow."""

    def __init__(self) -> None:
        self.share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        self.readers = 0
        self.lock = threading.Lock()
        self.slow_opens = self.slow_reads = False

    def __enter__(self) -> int:
        with self.lock:
            self.readers += 1
            return min(MOST_AHEAD, self.share // self.readers)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.readers -= 1


_ahead = _Ahead()


def _open_to_read(path: str) -> int | None:
    """A descriptor, or TOO_MANY; None for what cannot be opened at all."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as exc:
        return TOO_MANY if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE) else None
    if _ahead.slow_reads and _will_need is not None:
        with suppress(OSError):  # of a pipe
            os.posix_fadvise(descriptor, 0, 0, _will_need)
    return descriptor


def _close(descriptor: int | None) -> None:
    if descriptor is not None and descriptor != TOO_MANY:
        let_go(descriptor)
