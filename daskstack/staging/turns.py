"""How the parts of one build begin: one of them lists the files, and the others adopt its list."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from daskstack import files
from daskstack.discover import Listing
from daskstack.errors import OutputError
from daskstack.staging.locks import check_same
from daskstack.staging.records import read_listing, read_manifest
from daskstack.staging.root import PLAN, TURN, make_root, remove_if_empty, remove_turn, staging_root
from daskstack.text import shown


@contextmanager
def turn(out: str) -> Iterator[None]:
    """Let parts of one build begin one after another, so that one of them lists the files and the others adopt that."""
    root = staging_root(out)
    with files.writing(root):
        own = make_root(root)
        descriptor = _taken_turn(root)
    try:
        yield
    finally:
        files.let_go(descriptor)
        if own:
            remove_if_empty(root)
        else:
            remove_turn(root)


def _taken_turn(root: str) -> int:
    """The lock of the turn, once it is this process's; whoever is last removes its file."""
    path = os.path.join(root, TURN)
    while True:
        with suppress(FileNotFoundError):
            if not os.path.isdir(os.path.dirname(root)):
                raise OutputError(f"there is no folder {shown(os.path.dirname(root))}", "make it first")
            make_root(root)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            files.lock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                check_same(descriptor, path)
                return descriptor
            files.let_go(descriptor)


def adopted(out: str, request: str) -> Listing | None:
    """The files that another part of the same request has listed; None where none has."""
    root = staging_root(out)
    for name in os.listdir(root) if os.path.isdir(root) else ():
        folder = os.path.join(root, name)
        with files.writing(folder), suppress(FileNotFoundError):
            manifest = read_manifest(folder) if PLAN.fullmatch(name) else None
            if manifest is not None and manifest["request"] == request:
                return read_listing(folder, manifest)
    return None
