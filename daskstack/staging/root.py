"""The folder around staging folders, ``<OUT>.part``: made, marked as daskstack's own, swept and removed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from daskstack import files
from daskstack.errors import OutputError
from daskstack.staging.locks import LOCK, PUBLISHING
from daskstack.staging.records import LISTING, MANIFEST
from daskstack.text import shown

TURN = "turn"
TRIES = 10
NEW_FOR = 60.0  # seconds
OWN_MODE = 0o1777  # the sticky bit marks what daskstack made, from the first moment to the last, empty or not
PLAN = re.compile(r"[0-9a-f]{16}")
PLACE = re.compile(r"[0-9a-f]{32}")
_PRIVATE = re.compile(r"\.[0-9a-f]{32}")
_GONE = re.compile(r"\.[0-9a-f]{32}\.gone")  # being thrown away


def staging_root(out: str) -> str:
    """The folder beside an output that holds its staging folders."""
    return f"{out}.part"


def make_root(root: str) -> bool:
    """Whether the folder is daskstack's own: made now, or by another run that is at work in it or was killed."""
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # another run was done and removed it
            try:
                os.mkdir(root, OWN_MODE)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(root).st_mode):
                    raise OutputError(
                        f"{shown(root)} is in the way: it is no folder", "move it away, or choose another OUT"
                    ) from None
                return is_own(root)
            else:
                return True
    return False


def is_own(root: str) -> bool:
    """Whether daskstack made the folder: it has the mark, or, where the system has no such, names of ours in it."""
    return bool(os.stat(root).st_mode & stat.S_ISVTX) or any(map(_is_own_name, os.listdir(root)))


def _is_own_name(name: str) -> bool:
    return name == TURN or any(kind.fullmatch(name) for kind in (_PRIVATE, _GONE, PLAN))


@contextmanager
def making(root: str, kind: int) -> Iterator[bool]:
    """The lock on the folder itself that who makes a private one shares, so that others see which are of the living.

    Where a file system has no such lock, or another host does not see it, a private folder may go while it is
    made: then it is made again.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield files.lock(descriptor, kind)
    finally:
        files.let_go(descriptor)


def sweep(root: str) -> None:
    """Remove what killed processes left under random names."""
    names = os.listdir(root)
    for name in filter(_GONE.fullmatch, names):
        shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    private = list(filter(_PRIVATE.fullmatch, names))
    if not private:
        return
    with suppress(BlockingIOError), making(root, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        for path in (os.path.join(root, name) for name in private):
            with suppress(FileNotFoundError, NotADirectoryError):
                if _holds_own_only(path) and (alone or time.time() - os.lstat(path).st_mtime > NEW_FOR):
                    throw_away(path)


def _holds_own_only(private: str) -> bool:
    """Whether daskstack may have made all that lies in a private folder."""
    known = (LOCK, PUBLISHING, LISTING, MANIFEST)
    return all(name in known or PLACE.fullmatch(name) for name in os.listdir(private))


def throw_away(folder: str) -> None:
    """Take a folder out of everybody's way at once, then delete it."""
    private = os.path.join(os.path.dirname(folder), f".{uuid.uuid4().hex}.gone")
    with suppress(FileNotFoundError):
        os.rename(folder, private)
    shutil.rmtree(private, ignore_errors=True)


def remove_if_empty(root: str) -> None:
    """Remove the folder around staging folders, unless it holds another one, or something of the user's."""
    for _ in range(TRIES):
        remove_turn(root)
        with suppress(OSError):
            os.rmdir(root)
        try:
            left = os.listdir(root)
        except OSError:
            return
        if not all(name == TURN or _GONE.fullmatch(name) for name in left):
            return
        time.sleep(0.01)  # others are about to take away what is left


def remove_turn(root: str) -> None:
    """Remove the file of the turns, where no staging folder is left and nobody waits."""
    with suppress(OSError):
        if [name for name in os.listdir(root) if _is_own_name(name)] == [TURN]:
            path = os.path.join(root, TURN)
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                files.lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                files.let_go(descriptor)


def size_of(out: str, plan_id: str = "") -> int:
    """Bytes of the disk that the staging folder of a plan, or of all plans for an output, takes already."""
    total = 0
    for where, _, names in os.walk(os.path.join(staging_root(out), plan_id)):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total
