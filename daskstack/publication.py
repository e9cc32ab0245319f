"""How a finished output gets its final name, once and whole; and how an interrupted replacement is undone."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress

from daskstack import files
from daskstack.errors import OutputExistsError
from daskstack.staging import REPLACED, Staging, place_in
from daskstack.staging.locks import locked
from daskstack.staging.records import manifest_id
from daskstack.staging.root import staging_root
from daskstack.targets import Target
from daskstack.text import shown


def publish(
    staging: Staging, moves: Sequence[tuple[str, str]], target: Target, *, own_names: Callable[[], Sequence[str]]
) -> None:
    """Give the finished files their final names, the array last, or leave everything as it was.

    Parameters
    ----------
    staging : Staging
        The staging folder.
    moves : sequence of (staged path, final path)
        The array last: while it is not there, there is no output.
    target : Target
        Knows what an interrupted replacement has left.
    own_names : callable
        The files of daskstack's own that may be replaced, the array first: they are moved into the
        staging folder before, so that at no moment an array stands beside another's index.

    Raises
    ------
    OutputExistsError
        Somebody else's file took a name meanwhile; it is not touched.
    """
    final = moves[-1][1]
    parent = os.path.dirname(final)
    with files.writing(final), files.uninterrupted():
        done: list[tuple[str, str]] = []
        if os.path.isdir(os.path.join(staging.folder, REPLACED)):  # of a part that was killed at just this
            _put_back(staging.folder, final, target)
        try:
            _set_aside(staging.folder, own_names, done)
            files.sync_folder(parent)
            for source, name in moves:
                files.move_new(source, name)
                done.append((source, name))
            files.sync_folder(parent)
        except BaseException as exc:
            for source, name in reversed(done):
                with suppress(OSError):
                    files.move_new(name, source)
            if isinstance(exc, FileExistsError):
                raise OutputExistsError(
                    f"{shown(str(exc.filename2 or exc.filename))} appeared during the build and was not touched",
                    "move it away, or choose another OUT",
                ) from exc
            raise


def _set_aside(folder: str, own_names: Callable[[], Sequence[str]], done: list[tuple[str, str]]) -> None:
    """Move files into the staging folder; each must be the one that was looked at, not one put there since."""
    names = own_names()
    looked_at = {name: _identity(name) for name in names}
    aside = os.path.join(folder, REPLACED)
    os.mkdir(aside)
    for name in own_names():
        place = os.path.join(aside, os.path.basename(name))
        os.rename(name, place)
        done.append((name, place))
        if _identity(place) != looked_at.get(name):
            raise _taken(name)


def _identity(path: str) -> tuple[int, int, int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def recover(out: str, target: Target) -> None:
    """Undo what runs that were killed while they replaced an output had begun, or finish what they had done.

    Raises
    ------
    OutputExistsError
        A user's file holds the name of something that was set aside; both are kept.
    """
    root = staging_root(out)
    folders = [os.path.join(root, name) for name in os.listdir(root)] if os.path.isdir(root) else []
    for folder in folders:
        aside = os.path.join(folder, REPLACED)
        if os.path.isdir(aside) and not os.path.islink(aside) and manifest_id(folder) == os.path.basename(folder):
            with (
                files.writing(out),
                files.uninterrupted(),
                suppress(BlockingIOError, FileNotFoundError),
            ):  # a live run's own
                lock = locked(folder)
                try:
                    _put_back(folder, out, target)
                finally:
                    files.let_go(lock)


def _put_back(folder: str, out: str, target: Target) -> None:
    aside = os.path.join(folder, REPLACED)
    record = target.read_record(out)
    if record is not None and record["plan_id"] == os.path.basename(folder):
        published = target.own_names(out)
        if out in published:  # it was done but for throwing the old files away
            shutil.rmtree(aside)
            return
        for name in published:  # the new ones have left the folder; what is still there has its older twin in place
            if not os.path.lexists(os.path.join(place_in(folder), os.path.basename(name))):
                os.unlink(name)
    for name in os.listdir(aside):
        try:
            files.move_new(os.path.join(aside, name), os.path.join(os.path.dirname(out), name))
        except FileExistsError:
            raise OutputExistsError(
                f"{shown(os.path.join(os.path.dirname(out), name))} has the place of an older file that an interrupted "
                f"replacement set aside in {shown(aside)}",
                "move one of them away",
            ) from None
    os.rmdir(aside)


def _taken(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
