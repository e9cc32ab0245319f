"""System calls that fail when a test says so; what a folder holds; what a finished output is, its date aside."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from forkserver import python

from daskstack import files

WRITES = ("pwrite", "writev")
CALLS = (*WRITES, "fsync", "rename", "renameat2", "link", "unlink", "mkdir", "open", "close")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR)
SHORT, TORN = -1, -2  # half is written; half is written, and then it fails


@dataclass
class Fault:
    """One kind of system call whose ``n``-th one fails, and with ``for_good`` every one from then on.

    Without a call none fails: they are counted, and written down.
    """

    call: str = ""
    n: int = 0
    error: int = errno.EIO
    for_good: bool = False
    renameat2: bool = True  # whether the file system knows it
    counts: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, str, int, int]] = field(default_factory=list)  # call, file, offset, bytes
    hits: int = 0

    def __str__(self) -> str:
        how = {SHORT: "short", TORN: "torn"}.get(self.error) or errno.errorcode[self.error]
        return f"{self.call} {self.n} {how}{' for good' if self.for_good else ''}"

    def strikes(self, call: str) -> bool:
        """Count a call; whether it is one that fails."""
        with _lock:
            self.counts[call] = number = self.counts.get(call, 0) + 1
            struck = call == self.call and (number == self.n or (self.for_good and number > self.n))
            self.hits += struck
        return struck

    def refusal(self) -> OSError:
        code = errno.EIO if self.error == TORN else self.error
        return OSError(code, os.strerror(code))


_lock = threading.Lock()


@contextmanager
def injected(fault: Fault, folder: Path) -> Iterator[Fault]:
    """Let calls on files below a folder fail as the fault says.

    What a sync does to the disk is not what is tested: those that do not fail return at once, so that each of
    hundreds of runs takes milliseconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        _patch_descriptors(fault, str(folder), patch)
        _patch_names(fault, patch)
        yield fault


def _patch_descriptors(fault: Fault, folder: str, patch: pytest.MonkeyPatch) -> None:
    opened: dict[int, str] = {}
    real_open, real_close = os.open, os.close

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        ours = dir_fd is not None or os.path.abspath(path).startswith(folder)
        if ours and fault.strikes("open"):
            raise fault.refusal()
        descriptor = real_open(path, flags & ~os.O_DSYNC, mode, dir_fd=dir_fd)
        if ours:
            opened[descriptor] = str(path)
            fault.log.append(("open", str(path), 0, 0))
        return descriptor

    def close(descriptor: int) -> None:
        ours = opened.pop(descriptor, None)
        real_close(descriptor)  # Linux frees it, whatever the call says
        if ours is not None and fault.strikes("close"):
            raise fault.refusal()

    def fsync(descriptor: int) -> None:
        if fault.strikes("fsync"):
            raise fault.refusal()
        fault.log.append(("fsync", opened.get(descriptor, ""), 0, 0))

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        struck = fault.strikes("pwrite")
        if struck and fault.error > 0:
            raise fault.refusal()
        done = real_pwrite(descriptor, data[: (len(data) + 1) // 2] if struck else data, offset)
        if struck and fault.error == TORN:
            raise fault.refusal()
        fault.log.append(("pwrite", opened.get(descriptor, ""), offset, done))
        return done

    def writev(descriptor: int, pieces: list[memoryview]) -> int:
        struck = fault.strikes("writev")
        if struck and fault.error > 0:
            raise fault.refusal()
        first = pieces[0]
        done = real_writev(descriptor, [first[: (len(first) + 1) // 2]] if struck else pieces)
        if struck and fault.error == TORN:
            raise fault.refusal()
        fault.log.append(("writev", opened.get(descriptor, ""), 0, done))
        return done

    real_pwrite, real_writev = os.pwrite, os.writev
    for name, shim in {"open": open_, "close": close, "fsync": fsync, "pwrite": pwrite, "writev": writev}.items():
        patch.setattr(os, name, shim)


def _patch_names(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    def shim(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if fault.strikes(name):
                raise fault.refusal()
            return real(*args, **options)

        return call

    for name in ("rename", "link", "unlink", "mkdir"):
        patch.setattr(os, name, shim(name))
    real = files._rename_exclusive

    def rename_exclusive(source: str, target: str) -> int:
        if not fault.renameat2:
            return errno.ENOSYS
        return fault.error if fault.strikes("renameat2") else real(source, target)

    patch.setattr(files, "_rename_exclusive", rename_exclusive)


# The command line, which sends itself a signal before the n-th of its calls that touch files; at its end it tells how
# many there were.
STRUCK = """
import itertools, os, signal, sys
from daskstack import files
from daskstack.cli import main
number, n, count = signal.Signals[sys.argv.pop(1)], int(sys.argv.pop(1)), itertools.count(1)
def struck(real):
    def call(*args, **options):
        if next(count) == n:
            os.kill(os.getpid(), number)
        return real(*args, **options)
    return call
os.fsync, os.O_DSYNC = lambda descriptor: None, 0
for name in ("open", "pwrite", "writev", "fsync", "rename", "link", "unlink", "mkdir"):
    setattr(os, name, struck(getattr(os, name)))
files._rename_exclusive = struck(files._rename_exclusive)
try:
    main()
finally:
    print(next(count) - 1, file=sys.stderr)
"""


def struck(number: str, n: int, *command: str) -> tuple[int, str]:
    """Exit status and stderr of a command of the program that sends itself a signal before its n-th call."""
    done = python("-c", STRUCK, number, n, *command)
    return done.returncode, done.stderr


def calls_of(*command: str) -> int:
    """How many calls that touch files a command makes, which succeeds."""
    status, stderr = struck("SIGKILL", 0, *command)
    assert status == 0, stderr
    return int(stderr)


Files: TypeAlias = dict[str, tuple[bytes, int]]


def tree(folder: Path, *, besides: tuple[str, ...] = ()) -> Files:
    """Every file in a folder: its bytes and when it was changed; but for names that begin as some do."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not str(path.relative_to(folder)).startswith(besides)
    }


_DATES = re.compile(rb'"created": *"[^"]*"|"crc32c": *"[0-9a-f]{8}"')


def finished(out: Path) -> dict[str, bytes]:
    """All files of an output, side files too, as they are whenever they are made; none where it is not there."""
    if not os.path.lexists(out):
        return {}
    if out.is_dir():
        paths = [p for p in out.rglob("*") if p.is_file()]
    else:
        paths = [p for p in out.parent.iterdir() if p.is_file() and p.name.startswith(f"{out.stem}.")]
    return {str(path.relative_to(out.parent)): _DATES.sub(b"", path.read_bytes()) for path in paths}
