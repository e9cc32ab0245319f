"""The staging folder: where an output grows until it is whole, and what is kept of a run that was stopped.

``<OUT>.part/<plan id>/`` holds the manifest, a lock and a folder of a random name for the growing target and
the receipts.  It is prepared under a random name and renamed into place, so that it is never there without its
manifest; whoever loses that race adopts the winner's.  Everything in it is written by tasks that put the same
bytes in the same place however often they run.  The lock only tells people of a second run; but who has it for
itself gives the inner folder a new name, so that what is left of an earlier run, a worker whose parent was killed,
finds neither the target nor the receipts any more: its files may have changed since it read them.

How a folder is prepared, taken over and left is one protocol, and stands here in one piece.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from daskstack import files, receipts
from daskstack.discover import Listing
from daskstack.errors import OutputError
from daskstack.jobs import PREFIX
from daskstack.staging import locks, records
from daskstack.staging.root import (
    PLACE,
    PLAN,
    TRIES,
    is_own,
    make_root,
    making,
    remove_if_empty,
    staging_root,
    sweep,
    throw_away,
)
from daskstack.targets import Target
from daskstack.text import plural, shown

REPLACED = "replaced"
BAD_FILES = "bad.csv"
WRITE_ENDS = 20.0  # seconds that what a task is writing may take, once nobody wants it any more

log = logging.getLogger("daskstack")


@dataclass(frozen=True)
class Staging:
    """A staging folder that this process works in.

    Attributes
    ----------
    folder : str
        Its path.
    place : str
        The folder in it where the target grows, and the receipts are.
    lock : int
        The descriptor whose lock says that the run is alive.
    root_is_own : bool
        Whether daskstack made the folder around it.
    """

    folder: str
    place: str
    lock: int
    root_is_own: bool


def place_in(folder: str) -> str:
    """Where in a staging folder the target grows, and the receipts are; the folder itself where somebody removed it."""
    return os.path.join(folder, *[name for name in os.listdir(folder) if PLACE.fullmatch(name)][:1])


def prepare(
    out: str,
    manifest: Mapping[str, Any],
    listing: Listing,
    target: Target,
    *,
    shared: bool = False,
    restart: bool = False,
) -> Staging:
    """Make the staging folder of a plan, or go on in the one that is there.

    Parameters
    ----------
    out : str
        The output.
    manifest : mapping
        What is built, ``plan_id`` among it.
    listing : Listing
        The files that it is built of.
    target : Target
        Makes itself in a new folder.
    shared : bool, optional
        Whether others (parts of one build) may work in it at the same time.
    restart : bool, optional
        Throw away what runs that are over have kept, whatever plan it was of.

    Raises
    ------
    OutputError
        A live run holds it (its host, pid and start are named), an earlier run kept blocks of another
        plan, something else is in its place, or it cannot be made.
    NoSpaceError
        There is no room; nothing is left behind.
    """
    root = staging_root(out)
    folder = os.path.join(root, manifest["plan_id"])
    with files.writing(root, target.nbytes):
        own = False
        for _ in range(TRIES):
            own = make_root(root) or own
            try:
                with suppress(FileNotFoundError):  # a run that is done by now removed it
                    sweep(root)
                    _clear_others(root, manifest, listing, restart=restart)
                    with suppress(FileExistsError):  # another run was faster
                        return _make(root, folder, manifest, listing, target, shared=shared, root_is_own=own)
                    return _take_over(folder, manifest["plan_id"], target, shared=shared)
            except BaseException:
                if own:
                    remove_if_empty(root)
                raise
    raise OutputError(f"{shown(folder)} comes and goes: other runs of this build are at work", "wait for them")


def _make(
    root: str,
    folder: str,
    manifest: Mapping[str, Any],
    listing: Listing,
    target: Target,
    *,
    shared: bool,
    root_is_own: bool,
) -> Staging:
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), folder)
    with making(root, fcntl.LOCK_SH):
        private = os.path.join(root, f".{uuid.uuid4().hex}")
        os.mkdir(private)
        lock = -1
        try:
            for name in (locks.LOCK, locks.PUBLISHING):
                files.write_new(os.path.join(private, name), b"")
            lock = locks.locked(private, shared=shared)
            name = uuid.uuid4().hex
            os.mkdir(os.path.join(private, name))
            target.create(os.path.join(private, name))
            os.mkdir(os.path.join(private, name, receipts.FOLDER))
            records.write(private, manifest, listing)
            files.sync_folder(private)
            files.move_new(private, folder)
            files.sync_folder(root)
        except BaseException:
            with suppress(OSError):
                throw_away(private)
            if lock >= 0:
                files.let_go(lock)
            raise
    return Staging(folder, os.path.join(folder, name), lock, root_is_own=root_is_own)


def _take_over(folder: str, plan_id: str, target: Target, *, shared: bool) -> Staging:
    """The folder of a run that is over, or of other parts at work in it."""
    if records.manifest_id(folder) != plan_id:
        raise OutputError(
            f"{shown(folder)} is no staging folder of this build, or its manifest was damaged", "move it away"
        )
    _refuse_links(folder)
    alone = False
    try:
        lock = locks.locked(folder, shared=shared)
        alone = not shared
    except BlockingIOError:
        lock = locks.beside_another_host(folder)
    try:
        locks.check_same(lock, os.path.join(folder, locks.LOCK))
        place = place_in(folder)
        whole = target.is_there(place) and os.path.isdir(os.path.join(place, receipts.FOLDER))
        if not whole:  # it was published, and then moved away; or is being published now
            files.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.isdir(os.path.join(folder, REPLACED)):
                throw_away(folder)
            raise locks.gone(folder)  # noqa: TRY301  # as if it had never been met
        if alone and files.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _sweep_jobs(folder)
            place = _moved(place)
            if _is_written(target, place):
                log.warning("a worker of an earlier run is still writing; what it kept is thrown away")
                throw_away(folder)
                raise locks.gone(folder)  # noqa: TRY301
    except BlockingIOError:
        files.let_go(lock)
        time.sleep(0.1)
        raise locks.gone(folder) from None
    except BaseException:
        files.let_go(lock)
        raise
    return Staging(folder, place, lock, root_is_own=True)


def _is_written(target: Target, place: str) -> bool:
    """Whether a task of an earlier run does not end; one that a cluster's dead client left does, with its block."""
    end = time.monotonic() + WRITE_ENDS
    while target.is_written(place):
        if time.monotonic() > end:
            return True
        time.sleep(0.1)
    return False


def _sweep_jobs(folder: str) -> None:
    """Remove the keys and logs of a cluster whose client was killed."""
    for path in glob.glob(os.path.join(glob.escape(folder), f"{PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)


def _moved(place: str) -> str:
    """The place under a name that no task of an earlier run knows."""
    new = os.path.join(os.path.dirname(place), uuid.uuid4().hex)
    os.rename(place, new)
    return new


def _refuse_links(folder: str) -> None:
    """Daskstack makes no links; through one that was planted a run would write where it leads."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_symlink():
                raise OutputError(f"{shown(entry.path)} is a link, which daskstack did not make", "move it away")
            if entry.is_dir():
                _refuse_links(entry.path)


def _clear_others(root: str, manifest: Mapping[str, Any], listing: Listing, *, restart: bool) -> None:
    """Throw away what runs of other plans have left without a receipt, or all of it where asked.

    Raises
    ------
    OutputError
        One of them is alive, or has kept blocks: what differs is named.
    """
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        if not PLAN.fullmatch(name) or (name == manifest["plan_id"] and not restart):
            continue
        with suppress(FileNotFoundError):
            other = records.read_manifest(folder)
            if other is None or other["plan_id"] != name:  # damaged, or nobody knows whose
                continue
            try:
                lock = locks.locked(folder)
            except BlockingIOError:
                raise OutputError(
                    f"{shown(folder)} is held by another run into the same output ({locks.who(folder)})",
                    "wait for it, or stop it",
                ) from None
            try:
                kept = len(receipts.read(place_in(folder), name)) if other["repeatable"] else 0
                if kept and not restart:
                    raise OutputError(
                        f"{shown(root)} holds {plural(kept, 'block')} of another build: "
                        f"{records.difference(manifest, listing, other, records.read_listing(folder, other))}",
                        "give the command as it was, or --restart to throw them away",
                    )
                if not os.path.lexists(os.path.join(folder, REPLACED)):
                    throw_away(folder)
            finally:
                files.let_go(lock)


def clear_published(out: str, plan_id: str) -> None:
    """Throw away what a run that was killed after it had published, or could not delete, has left."""
    root = staging_root(out)
    folder = os.path.join(root, plan_id)
    if os.path.islink(root):
        return
    with suppress(OSError):  # there is none
        own = is_own(root)
        sweep(root)
        with suppress(OSError):  # another run is in it, which will do it
            if records.manifest_id(folder) == plan_id:
                files.let_go(locks.locked(folder))
                throw_away(folder)
        if own:
            remove_if_empty(root)


def remove(staging: Staging, *, published: bool, repeatable: bool = True) -> int:
    """Leave a staging folder: throw it away once its output is published, or if there is nothing to keep in it.

    Nothing is kept for a plan that is not ``repeatable``: no other run will ever have it.

    Returns
    -------
    int
        How many blocks are kept in it.
    """
    with files.uninterrupted():
        aside = os.path.join(staging.folder, REPLACED)
        with suppress(OSError):
            os.rmdir(aside)
        kept = 0
        try:
            if published:
                with suppress(OSError):  # the output is there; what stays is thrown away by the next run
                    throw_away(staging.folder)
            else:
                kept = _kept(staging, aside, repeatable=repeatable)
        finally:
            files.let_go(staging.lock)
        if staging.root_is_own and not kept:
            remove_if_empty(os.path.dirname(staging.folder))
    return kept


def _kept(staging: Staging, aside: str, *, repeatable: bool) -> int:
    """How many blocks are kept; where there are none and nobody else is at work, the folder is thrown away."""
    kept = 0
    with suppress(OSError):  # the place was removed
        kept = len(receipts.read(staging.place, os.path.basename(staging.folder))) if repeatable else 0
    if kept:
        return kept
    with suppress(OSError):
        files.lock(staging.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.isdir(aside) and not (repeatable and os.path.lexists(os.path.join(staging.folder, BAD_FILES))):
            throw_away(staging.folder)
    return 0
