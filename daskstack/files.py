"""Durable files: what POSIX offers for it and the standard library does not.

Nothing here knows of arrays.  Every function either does all it says or raises.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from daskstack.errors import DaskstackError, NoSpaceError, OutputError
from daskstack.text import nbytes, shown

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NO_SPACE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the limit on file sizes (ulimit -f, or the file system's own) is reached",
}
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU)  # the last two as batch systems send them
AT_ONCE = 1 << 30  # bytes; macOS refuses 2 GiB in one call
NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}  # Lustre without -o flock, FUSE
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1  # linux/fs.h
_RENAME_EXCL = 4  # sys/stdio.h of macOS
_F_FULLFSYNC = 51  # fcntl.h of macOS: fsync alone leaves the data in the drive's cache there

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def writing(path: str, need: int = 0) -> Iterator[None]:
    """Turn what the system refuses while writing ``path`` into an error that says what to do.

    Parameters
    ----------
    path : str
        What is being written.
    need : int, optional
        Bytes needed, where known.

    Raises
    ------
    NoSpaceError
        The disk, a quota or a limit on file sizes is reached.
    OutputError
        Anything else: a read-only folder, a missing one, an I/O error.
    """
    try:
        yield
    except DaskstackError:
        raise
    except OSError as exc:
        if exc.errno in NO_SPACE:
            amount = f"; {nbytes(need)} needed" if need else ""
            free = free_space(path)
            amount += "" if free is None else f", {nbytes(free)} free"
            reason = f"{NO_SPACE[exc.errno]}{amount}"
            if exc.errno == errno.ENOSPC and exc.filename is not None and (free or 0) > need:  # of open, mkdir
                reason = f"the disk takes no more files, though it has {nbytes(free or 0)} free"
            raise NoSpaceError(
                f"cannot write {shown(path)}: {reason}",
                "make room (or raise the quota), then the same command",
            ) from exc
        raise OutputError(
            f"cannot write {shown(path)}: {exc.strerror or exc}", "choose a place that can be written"
        ) from exc


def host_name() -> str:
    """What this host is called, for messages and receipts: in a job of SLURM's, the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def is_url(path: str) -> bool:
    """Whether it names something on a server, such as s3://..., and no file.

    Examples
    --------
    >>> is_url("s3://bucket/a.zarr"), is_url("a:b/c.npy")
    (True, False)
    """
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", path) is not None


def absolute(path: str) -> str:
    """The path from the root, tidied; ``..`` stays, since behind a link it does not mean the folder before it."""
    parts = os.path.join(os.getcwd(), path).split("/")
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def read_regular(path: str, most: int) -> bytes:
    """A small regular file's bytes; a pipe would hang, and a link may lead anywhere.

    Raises
    ------
    OSError
        It is not there, no regular file, or larger than ``most`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(errno.EINVAL, "no regular file of a sensible size", path)
        return file.read()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put signals that stop a run off until the block is left, so that it is done wholly or not at all."""
    if threading.current_thread() is not threading.main_thread():  # others are not interrupted
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be set again from it
                signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def free_space(path: str) -> int | None:
    """Bytes that an ordinary user can still write where ``path`` is or would be; None where nobody knows."""
    folder = path
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        found = os.statvfs(folder or ".")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def sync(descriptor: int) -> None:
    """Return when all that was written to the file is on the disk itself."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, _F_FULLFSYNC)
        except OSError:  # a file system that knows fsync only
            os.fsync(descriptor)
    else:
        os.fsync(descriptor)


def sync_folder(folder: str) -> None:
    """Return when the names in the folder are on the disk itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int) -> bool:
    """Whether the file system has locks (flock(2)); where it has, this one is held then.

    Raises
    ------
    BlockingIOError
        Another process holds it, and ``kind`` says not to wait.
    """
    try:
        fcntl.flock(descriptor, kind)
    except OSError as exc:
        if exc.errno not in NO_LOCKS:
            raise
        return False
    return True


def let_go(descriptor: int) -> None:
    """Close a file that was not written, or a lock's: what NFS may say only now costs nothing."""
    with suppress(OSError):
        os.close(descriptor)


def is_same(descriptor: int, path: str) -> bool:
    """Whether a path leads to the open file still."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def stamp(path: str) -> tuple[int, int]:
    """Size and mtime of a file; -1 where it is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1
    return found.st_size, clipped_mtime(found)


def clipped_mtime(found: os.stat_result) -> int:
    """A file's time in nanoseconds since 1970, which 64 bits hold for the years 1678 to 2262 only."""
    return max(-(2**63), min(2**63 - 1, found.st_mtime_ns))


def write_new(path: str, data: bytes) -> None:
    """Make a file that was not there, whole and synced, or none.

    Raises
    ------
    FileExistsError
        Something (a link counts) has that name.
    """
    descriptor = os.open(path, NEW_FILE, 0o666)
    try:
        write_at(descriptor, memoryview(data), 0)
        sync(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview[Any], offset: int) -> None:
    """Write all of ``data`` at ``offset``, however many system calls that takes."""
    while data:
        written = os.pwrite(descriptor, data[:AT_ONCE], offset)
        data, offset = data[written:], offset + written


def append_all(descriptor: int, pieces: Sequence[bytes]) -> None:
    """Write all pieces one after another, however many system calls that takes."""
    left = [memoryview(piece) for piece in pieces if piece]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def read_at(descriptor: int, out: memoryview[Any], offset: int) -> None:
    """Fill ``out`` with the bytes at ``offset``, however many system calls that takes.

    Raises
    ------
    ValueError
        The file ends before.
    """
    while out:
        done = os.preadv(descriptor, [out[:AT_ONCE]], offset)
        if not done:
            raise ValueError(f"the file ends {len(out)} bytes too early")
        out, offset = out[done:], offset + done


def read_from_disk(path: str, out: memoryview[Any], offset: int) -> None:
    """Fill ``out`` with a file's bytes at ``offset``, those that this host has in its cache let go of before.

    Raises
    ------
    ValueError
        The file ends before.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, len(out), os.POSIX_FADV_DONTNEED)
        read_at(descriptor, out, offset)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Give a new file its size, and take the room for it now where the file system can.

    fallocate(2) itself is called: glibc's emulation in ``posix_fallocate`` writes into every block
    instead, which on a network file system is slow and races with other writers.  Where it fails,
    ext4 keeps what it took so far, so that the file is cut back at once.
    """
    try:
        if sys.platform == "linux" and size and _fallocate(descriptor, size):
            return
        os.ftruncate(descriptor, size)
    except OSError:
        os.ftruncate(descriptor, 0)
        raise


def _fallocate(descriptor: int, size: int) -> bool:
    """Whether the room was taken; False where the file system does not offer it."""
    length = ctypes.c_int64
    while _libc.fallocate(descriptor, 0, length(0), length(size)) != 0:
        code = ctypes.get_errno()
        if code in NOT_SUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def move_new(source: str, target: str) -> None:
    """Rename a file or folder to a name that nothing has, without a moment in which it could replace.

    Plain rename(2) replaces a file, and an empty folder too.

    Raises
    ------
    FileExistsError
        Something has that name.
    """
    code = _rename_exclusive(source, target)
    if code in NOT_SUPPORTED:  # NFS, for one: a hard link cannot replace either
        _link_new(source, target)
    elif code:
        raise OSError(code, os.strerror(code), target)


def _rename_exclusive(source: str, target: str) -> int:
    """The error number of an exclusive rename; 0 where it was done."""
    old, new = os.fsencode(source), os.fsencode(target)
    if sys.platform == "darwin":
        done = _libc.renamex_np(old, new, _RENAME_EXCL) == 0
    elif hasattr(_libc, "renameat2"):
        done = _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0
    else:
        return errno.ENOSYS
    return 0 if done else ctypes.get_errno()


def _link_new(source: str, target: str) -> None:
    """The fallback: a hard link for a file; for a folder, which has none, a look before the rename."""
    if not os.path.isdir(source):
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in {*NOT_SUPPORTED, errno.EPERM, errno.EMLINK}:
                raise
        else:
            try:
                os.unlink(source)
            except OSError:  # as it was before
                with suppress(OSError):
                    os.unlink(target)
                raise
            return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)
