"""The staging folder: where an output grows until it is whole, and how it gets its final name.

``<OUT>.part/<plan id>/`` holds the manifest, the growing target and a lock that the run holds.  It is
prepared under a random name and renamed into place, so that it is never there without its manifest;
whoever loses that race meets the winner's lock.  Everything in it is written by tasks that put the same
bytes in the same place however often they run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from daskstack import files
from daskstack.errors import OutputError, OutputExistsError
from daskstack.targets import Target
from daskstack.text import shown

MANIFEST = "manifest.json"
LOCK = "lock"
REPLACED = "replaced"
MOST_MANIFEST_BYTES = 1 << 20
TRIES = 10
NEW_FOR = 60.0  # seconds
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}  # Lustre without -o flock, FUSE
_PRIVATE = re.compile(r"\.[0-9a-f]{32}")
_OWN = re.compile(rf"{_PRIVATE.pattern}|[0-9a-f]{{16}}")

log = logging.getLogger("daskstack")


@dataclass(frozen=True)
class Staging:
    """A staging folder that this process holds.

    Attributes
    ----------
    folder : str
        Where the target grows.
    lock : int
        The descriptor whose lock says that the run is alive.
    root_is_own : bool
        Whether daskstack made the folder around it.
    """

    folder: str
    lock: int
    root_is_own: bool


def staging_root(out: str) -> str:
    """The folder beside an output that holds its staging folders."""
    return f"{out}.part"


def prepare(out: str, plan_id: str, manifest: Mapping[str, Any], target: Target) -> Staging:
    """Make the staging folder of a plan, or take over the one that a killed run left.

    Raises
    ------
    OutputError
        A live run holds it (its host, pid and start are named), something else is in its place, or
        it cannot be made.
    NoSpaceError
        There is no room; nothing is left behind.
    """
    root = staging_root(out)
    folder = os.path.join(root, plan_id)
    with files.writing(root, target.nbytes):
        for _ in range(TRIES):
            own = _make_root(root)
            try:
                with suppress(FileNotFoundError):  # a run that is done by now removed it
                    _sweep(root)
                    with suppress(FileExistsError):  # another run was faster
                        return _make(root, folder, plan_id, manifest, target, root_is_own=own)
                    return _take_over(folder, plan_id, target)
            except BaseException:
                if own:
                    _remove_if_empty(root)
                raise
    raise OutputError(f"{shown(folder)} comes and goes: other runs of this build are at work", "wait for them")


def _make_root(root: str) -> bool:
    """Whether the folder is daskstack's own: made now, or by another run that is at work in it or was killed."""
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # another run was done and removed it
            try:
                os.mkdir(root)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(root).st_mode):
                    raise OutputError(
                        f"{shown(root)} is in the way: it is no folder", "move it away, or choose another OUT"
                    ) from None
                if any(_OWN.fullmatch(name) for name in os.listdir(root)):
                    return True
            else:
                return True
        time.sleep(0.01)  # it is a user's, or was made this very moment
    return False


def _make(
    root: str, folder: str, plan_id: str, manifest: Mapping[str, Any], target: Target, *, root_is_own: bool
) -> Staging:
    if os.path.lexists(folder):
        raise _taken(folder)
    private = os.path.join(root, f".{uuid.uuid4().hex}")
    os.mkdir(private)
    lock = -1
    try:
        lock = _locked(private, os.O_CREAT | os.O_EXCL)
        target.create(private)
        files.write_new(os.path.join(private, MANIFEST), json.dumps({**manifest, "plan_id": plan_id}).encode())
        files.sync_folder(private)
        files.move_new(private, folder)
        files.sync_folder(root)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        raise
    return Staging(folder, lock, root_is_own=root_is_own)


def _locked(folder: str, flags: int) -> int:
    """A descriptor that holds the folder's lock and says who does; freed when the process ends, however it does."""
    descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno not in NO_LOCKS:
                raise
            log.debug("%s: no locks on this file system; nothing will tell of a second run", folder)
        who = f"{socket.gethostname()}, pid {os.getpid()}, since {datetime.now(UTC).isoformat(timespec='seconds')}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, who.encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _take_over(folder: str, plan_id: str, target: Target) -> Staging:
    """The folder of a run that was killed, as it was when it had just been made."""
    if _manifest_id(folder) != plan_id:
        raise OutputError(f"{shown(folder)} is no staging folder of this build", "move it away")
    try:
        lock = _locked(folder, 0)
    except BlockingIOError:
        who = files.read_regular(os.path.join(folder, LOCK), MOST_MANIFEST_BYTES).decode()
        message = f"{shown(folder)} is held by another run of this build ({who})"
        raise OutputError(message, "wait for it, or stop it") from None
    try:
        _check_same(lock, os.path.join(folder, LOCK))
        target.renew(folder)
    except BaseException:
        os.close(lock)
        raise
    return Staging(folder, lock, root_is_own=True)


def _check_same(descriptor: int, path: str) -> None:
    """A folder that its owner removed and another run made anew has another lock by the same name."""
    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _manifest_id(folder: str) -> str | None:
    """The plan id in a folder's manifest; None where it has none that can be read."""
    found = _manifest(folder).get("plan_id")
    return found if isinstance(found, str) else None


def _manifest(folder: str) -> dict[str, Any]:
    """A folder's manifest; empty where it has none that can be read."""
    if os.path.islink(folder):
        return {}
    try:
        manifest = json.loads(files.read_regular(os.path.join(folder, MANIFEST), MOST_MANIFEST_BYTES))
    except FileNotFoundError:
        if not os.path.lexists(folder):
            raise
        return {}
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _sweep(root: str) -> None:
    """Remove what killed processes left and nobody will take over: folders whose lock nobody holds any more."""
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        with suppress(OSError):
            private = _PRIVATE.fullmatch(name) is not None
            if not private and not _is_unlike_any(folder):
                continue
            lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not private or time.time() - os.fstat(lock).st_mtime > NEW_FOR:  # a new one is not locked yet
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _is_unlike_any(folder: str) -> bool:
    """Whether a folder is of a Dask array, which no later plan is like; older outputs that it holds are recovered."""
    manifest = _manifest(folder)
    own = manifest.get("plan_id") == os.path.basename(folder) and "derived" in manifest
    return own and not os.path.isdir(os.path.join(folder, REPLACED))


def size_of(out: str, plan_id: str) -> int:
    """Bytes of the disk that the staging folder of a plan takes already."""
    total = 0
    folder = os.path.join(staging_root(out), plan_id)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def publish(staging: Staging, moves: Sequence[tuple[str, str]], *, own_names: Callable[[], Sequence[str]]) -> None:
    """Give the finished files their final names, the array last, or leave everything as it was.

    Parameters
    ----------
    staging : Staging
        The staging folder.
    moves : sequence of (staged path, final path)
        The array last: while it is not there, there is no output.
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
        if os.path.isdir(os.path.join(folder, REPLACED)) and _manifest_id(folder) == os.path.basename(folder):
            with (
                files.writing(out),
                files.uninterrupted(),
                suppress(BlockingIOError, FileNotFoundError),
            ):  # a live run's own
                lock = _locked(folder, 0)
                try:
                    _put_back(folder, out, target)
                finally:
                    os.close(lock)


def _put_back(folder: str, out: str, target: Target) -> None:
    aside = os.path.join(folder, REPLACED)
    record = target.read_record(out)
    if record is not None and record["plan_id"] == os.path.basename(folder):
        published = target.own_names(out)
        if out in published:  # it was done but for throwing the old files away
            shutil.rmtree(aside)
            return
        for name in published:  # the new ones have left the folder; what is still there has its older twin in place
            if not os.path.lexists(os.path.join(folder, os.path.basename(name))):
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


def remove(staging: Staging, *, published: bool) -> None:
    """Throw a staging folder away, and the folder around it where daskstack made it and it is empty then.

    What was set aside goes with it only once the new output is published.
    """
    aside = os.path.join(staging.folder, REPLACED)
    with files.uninterrupted():
        with suppress(OSError):
            os.rmdir(aside)
        if published or not os.path.isdir(aside):
            shutil.rmtree(staging.folder, ignore_errors=True)
        os.close(staging.lock)
        if staging.root_is_own:
            _remove_if_empty(os.path.dirname(staging.folder))


def _taken(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _remove_if_empty(root: str) -> None:
    with suppress(OSError):  # not empty: it holds the staging of another plan, or something of the user's
        os.rmdir(root)
