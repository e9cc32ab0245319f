"""The locks of a staging folder: that its run is alive, and that one process at a time publishes it.

They only tell people, and runs, of each other: nothing that is written depends on them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from daskstack import files
from daskstack.errors import OutputError
from daskstack.text import shown

LOCK = "lock"
PUBLISHING = "publishing"
WHO_BYTES = 200  # all of it is written at once, over who was there before
MOST_WHO_BYTES = 4096

log = logging.getLogger("daskstack")


def locked(folder: str, *, shared: bool = False) -> int:
    """A descriptor that holds the folder's lock and says who does; freed when the process ends, however it does.

    Raises
    ------
    BlockingIOError
        Another process holds it.
    """
    descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not files.lock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB):
            log.debug("%s: no locks on this file system; nothing will tell of a second run", folder)
        holder = f"{socket.gethostname()}, pid {os.getpid()}, since {datetime.now(UTC).isoformat(timespec='seconds')}"
        os.pwrite(descriptor, holder.encode().ljust(WHO_BYTES), 0)
    except BaseException:
        files.let_go(descriptor)
        raise
    return descriptor


def beside_another_host(folder: str) -> int:
    """The lock's file, not locked, where a run on another host holds it: both write the same bytes."""
    holder = who(folder)
    if holder.split(",")[0] == socket.gethostname():
        raise OutputError(f"{shown(folder)} is held by another run of this build ({holder})", "wait for it, or stop it")
    log.warning("another run of this build is at work (%s); both do all of it", holder)
    return os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def who(folder: str) -> str:
    """Who has the folder: host, process and since when, in words."""
    return files.read_regular(os.path.join(folder, LOCK), MOST_WHO_BYTES).decode(errors="replace").strip()


@contextmanager
def publishing(folder: str) -> Iterator[bool]:
    """Let one process at a time publish a folder; False where another one has done so meanwhile."""
    path = os.path.join(folder, PUBLISHING)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        files.lock(descriptor, fcntl.LOCK_EX)
        yield os.path.lexists(path)
    finally:
        files.let_go(descriptor)


def check_same(descriptor: int, path: str) -> None:
    """A folder that its owner removed and another run made anew has another lock by the same name."""
    if not files.is_same(descriptor, path):
        raise gone(path)


def gone(path: str) -> FileNotFoundError:
    """The error of a folder that was there a moment ago."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
