"""The staging folder: where an output grows until it is whole, and what is kept of a run that was stopped.

``<OUT>.part/<plan id>/`` holds the manifest, a lock and a folder of a random name for the growing target and
the receipts.  It is prepared under a random name and renamed into place, so that it is never there without its
manifest; whoever loses that race adopts the winner's.  Everything in it is written by tasks that put the same
bytes in the same place however often they run.  The lock only tells people of a second run; but who has it for
itself gives the inner folder a new name, so that what is left of an earlier run, a worker whose parent was killed,
finds neither the target nor the receipts any more: its files may have changed since it read them.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import io
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from daskstack import files, receipts
from daskstack.discover import Listing
from daskstack.errors import OutputError
from daskstack.jobs import PREFIX
from daskstack.targets import Target, crc32c
from daskstack.targets.base import record_checksum
from daskstack.text import listed, plural, shown

MANIFEST = "manifest.json"
LISTING = "listing.npz"
LOCK = "lock"
TURN = "turn"
PUBLISHING = "publishing"
REPLACED = "replaced"
BAD_FILES = "bad.csv"
MOST_MANIFEST_BYTES = 16 << 20
TRIES = 10
NEW_FOR = 60.0  # seconds
OWN_MODE = 0o1777  # the sticky bit marks what daskstack made, from the first moment to the last, empty or not
NO_DIFFERENCE = {  # what other builds may differ in without being others, and what follows from the rest
    "plan_id",
    "request",
    "repeatable",
    "content",
    "listing_crc32c",
    "version",
    "numpy",
    "python",
    "sources",
    "bytes",
    "nbytes",
}
WHO_BYTES = 200  # all of it is written at once, over who was there before
_PRIVATE = re.compile(r"\.[0-9a-f]{32}")
_GONE = re.compile(r"\.[0-9a-f]{32}\.gone")  # being thrown away
_PLAN = re.compile(r"[0-9a-f]{16}")
_PLACE = re.compile(r"[0-9a-f]{32}")

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


def staging_root(out: str) -> str:
    """The folder beside an output that holds its staging folders."""
    return f"{out}.part"


def place_in(folder: str) -> str:
    """Where in a staging folder the target grows, and the receipts are; the folder itself where somebody removed it."""
    return os.path.join(folder, *[name for name in os.listdir(folder) if _PLACE.fullmatch(name)][:1])


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
            own = _make_root(root) or own
            try:
                with suppress(FileNotFoundError):  # a run that is done by now removed it
                    _sweep(root)
                    _clear_others(root, manifest, listing, restart=restart)
                    with suppress(FileExistsError):  # another run was faster
                        return _make(root, folder, manifest, listing, target, shared=shared, root_is_own=own)
                    return _take_over(folder, manifest["plan_id"], target, shared=shared)
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
                os.mkdir(root, OWN_MODE)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(root).st_mode):
                    raise OutputError(
                        f"{shown(root)} is in the way: it is no folder", "move it away, or choose another OUT"
                    ) from None
                return _is_own(root)
            else:
                return True
    return False


def _is_own(root: str) -> bool:
    """Whether daskstack made the folder: it has the mark, or, where the system has no such, names of ours in it."""
    return bool(os.stat(root).st_mode & stat.S_ISVTX) or any(map(_is_own_name, os.listdir(root)))


def _is_own_name(name: str) -> bool:
    return name == TURN or any(kind.fullmatch(name) for kind in (_PRIVATE, _GONE, _PLAN))


@contextmanager
def turn(out: str) -> Iterator[None]:
    """Let parts of one build begin one after another, so that one of them lists the files and the others adopt that."""
    root = staging_root(out)
    with files.writing(root):
        own = _make_root(root)
        descriptor = _taken_turn(root)
    try:
        yield
    finally:
        files.let_go(descriptor)
        if own:
            _remove_if_empty(root)
        else:
            _remove_turn(root)


def _taken_turn(root: str) -> int:
    """The lock of the turn, once it is this process's; whoever is last removes its file."""
    path = os.path.join(root, TURN)
    while True:
        with suppress(FileNotFoundError):
            if not os.path.isdir(os.path.dirname(root)):
                raise OutputError(f"there is no folder {shown(os.path.dirname(root))}", "make it first")
            _make_root(root)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            files.lock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                _check_same(descriptor, path)
                return descriptor
            files.let_go(descriptor)


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
    with _making(root, fcntl.LOCK_SH):
        private = os.path.join(root, f".{uuid.uuid4().hex}")
        os.mkdir(private)
        lock = -1
        try:
            for name in (LOCK, PUBLISHING):
                files.write_new(os.path.join(private, name), b"")
            lock = locked(private, shared=shared)
            name = uuid.uuid4().hex
            os.mkdir(os.path.join(private, name))
            target.create(os.path.join(private, name))
            os.mkdir(os.path.join(private, name, receipts.FOLDER))
            names = _listing_bytes(listing)
            described = {**manifest, "listing_crc32c": crc32c(names)}
            checked = {"manifest": described, "crc32c": record_checksum(described)}
            files.write_new(os.path.join(private, LISTING), names)
            files.write_new(os.path.join(private, MANIFEST), json.dumps(checked).encode())
            files.sync_folder(private)
            files.move_new(private, folder)
            files.sync_folder(root)
        except BaseException:
            with suppress(OSError):
                _throw_away(private)
            if lock >= 0:
                files.let_go(lock)
            raise
    return Staging(folder, os.path.join(folder, name), lock, root_is_own=root_is_own)


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
        who = f"{socket.gethostname()}, pid {os.getpid()}, since {datetime.now(UTC).isoformat(timespec='seconds')}"
        os.pwrite(descriptor, who.encode().ljust(WHO_BYTES), 0)
    except BaseException:
        files.let_go(descriptor)
        raise
    return descriptor


def _take_over(folder: str, plan_id: str, target: Target, *, shared: bool) -> Staging:
    """The folder of a run that is over, or of other parts at work in it."""
    if manifest_id(folder) != plan_id:
        raise OutputError(
            f"{shown(folder)} is no staging folder of this build, or its manifest was damaged", "move it away"
        )
    _refuse_links(folder)
    alone = False
    try:
        lock = locked(folder, shared=shared)
        alone = not shared
    except BlockingIOError:
        lock = _beside_another_host(folder)
    try:
        _check_same(lock, os.path.join(folder, LOCK))
        place = place_in(folder)
        whole = target.is_there(place) and os.path.isdir(os.path.join(place, receipts.FOLDER))
        if not whole:  # it was published, and then moved away; or is being published now
            files.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.isdir(os.path.join(folder, REPLACED)):
                _throw_away(folder)
            raise _gone(folder)  # noqa: TRY301  # as if it had never been met
        if alone and files.lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _sweep_jobs(folder)
            place = _moved(place)
            if target.is_written(place):
                log.warning("a worker of an earlier run is still writing; what it kept is thrown away")
                _throw_away(folder)
                raise _gone(folder)  # noqa: TRY301
    except BlockingIOError:
        files.let_go(lock)
        time.sleep(0.1)
        raise _gone(folder) from None
    except BaseException:
        files.let_go(lock)
        raise
    return Staging(folder, place, lock, root_is_own=True)


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


def _beside_another_host(folder: str) -> int:
    """The lock's file, not locked, where a run on another host holds it: both write the same bytes."""
    who = _who(folder)
    if who.split(",")[0] == socket.gethostname():
        raise OutputError(f"{shown(folder)} is held by another run of this build ({who})", "wait for it, or stop it")
    log.warning("another run of this build is at work (%s); both do all of it", who)
    return os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def _who(folder: str) -> str:
    return files.read_regular(os.path.join(folder, LOCK), MOST_MANIFEST_BYTES).decode(errors="replace").strip()


def _check_same(descriptor: int, path: str) -> None:
    """A folder that its owner removed and another run made anew has another lock by the same name."""
    if not files.is_same(descriptor, path):
        raise _gone(path)


def _gone(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def read_manifest(folder: str) -> dict[str, Any] | None:
    """A folder's manifest; None where it has none, or one that was changed.

    Raises
    ------
    FileNotFoundError
        The folder is gone.
    """
    if os.path.islink(folder):
        return None
    try:
        text = json.loads(files.read_regular(os.path.join(folder, MANIFEST), MOST_MANIFEST_BYTES))
        manifest: dict[str, Any] = text["manifest"]
        return manifest if text["crc32c"] == record_checksum(manifest) else None
    except FileNotFoundError:
        if not os.path.lexists(folder):
            raise
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def manifest_id(folder: str) -> str | None:
    """The plan id in a folder's manifest; None where it has none that can be read."""
    manifest = read_manifest(folder)
    found = manifest.get("plan_id") if manifest is not None else None
    return found if isinstance(found, str) else None


def _listing_bytes(listing: Listing) -> bytes:
    stream = io.BytesIO()
    texts = {"paths": listing.paths, "below": listing.below, "sources": listing.sources, "left_out": listing.left_out}
    packed = {name: np.frombuffer(b"\0".join(map(os.fsencode, t)), np.uint8) for name, t in texts.items()}
    numbers = {"sizes": listing.sizes, "mtimes": listing.mtimes, "natural": np.array(listing.natural)}
    if listing.rows is not None:
        numbers["rows"] = listing.rows
    np.savez(stream, allow_pickle=False, **numbers, **packed)
    return stream.getvalue()


def read_listing(folder: str, manifest: Mapping[str, Any]) -> Listing | None:
    """The files that a staging folder is built of; None where their list is gone or was changed."""
    try:
        data = files.read_regular(os.path.join(folder, LISTING), receipts.MOST_BYTES)
    except OSError:
        return None
    if crc32c(data) != manifest["listing_crc32c"]:
        return None
    with np.load(io.BytesIO(data), allow_pickle=False) as found:

        def texts(name: str) -> list[str]:
            packed = found[name].tobytes()
            return [os.fsdecode(text) for text in packed.split(b"\0")] if packed else []

        return Listing(
            texts("paths"),
            texts("below"),
            found["sizes"],
            found["mtimes"],
            tuple(texts("sources")),
            tuple(texts("left_out")),
            bool(found["natural"]),
            found["rows"] if "rows" in found.files else None,
        )


def adopted(out: str, request: str) -> Listing | None:
    """The files that another part of the same request has listed; None where none has."""
    root = staging_root(out)
    for name in os.listdir(root) if os.path.isdir(root) else ():
        folder = os.path.join(root, name)
        with files.writing(folder), suppress(FileNotFoundError):
            manifest = read_manifest(folder) if _PLAN.fullmatch(name) else None
            if manifest is not None and manifest["request"] == request:
                return read_listing(folder, manifest)
    return None


def _clear_others(root: str, manifest: Mapping[str, Any], listing: Listing, *, restart: bool) -> None:
    """Throw away what runs of other plans have left without a receipt, or all of it where asked.

    Raises
    ------
    OutputError
        One of them is alive, or has kept blocks: what differs is named.
    """
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        if not _PLAN.fullmatch(name) or (name == manifest["plan_id"] and not restart):
            continue
        with suppress(FileNotFoundError):
            other = read_manifest(folder)
            if other is None or other["plan_id"] != name:  # damaged, or nobody knows whose
                continue
            try:
                lock = locked(folder)
            except BlockingIOError:
                raise OutputError(
                    f"{shown(folder)} is held by another run into the same output ({_who(folder)})",
                    "wait for it, or stop it",
                ) from None
            try:
                kept = len(receipts.read(place_in(folder), name)) if other["repeatable"] else 0
                if kept and not restart:
                    raise OutputError(
                        f"{shown(root)} holds {plural(kept, 'block')} of another build: "
                        f"{_difference(manifest, listing, other, read_listing(folder, other))}",
                        "give the command as it was, or --restart to throw them away",
                    )
                if not os.path.lexists(os.path.join(folder, REPLACED)):
                    _throw_away(folder)
            finally:
                files.let_go(lock)


def _difference(now: Mapping[str, Any], listing: Listing, then: Mapping[str, Any], before: Listing | None) -> str:
    """What differs between two builds, in words."""
    if before is not None and before.paths != listing.paths:
        more, fewer = (
            sorted(set(a) - set(b)) for a, b in ((listing.paths, before.paths), (before.paths, listing.paths))
        )
        parts = [f"{plural(len(more), 'file')} more ({listed([shown(p) for p in more])})"] if more else []
        parts += [f"{plural(len(fewer), 'file')} fewer ({listed([shown(p) for p in fewer])})"] if fewer else []
        return f"the list has {' and '.join(parts)}" if parts else "the files are in another order"
    names = [name for name in {**then, **now} if name not in NO_DIFFERENCE]
    changes = [f"{name} {then.get(name)}, now {now.get(name)}" for name in names if now.get(name) != then.get(name)]
    if changes:
        return "; ".join(changes)
    if now["content"] == then["content"]:
        return "the bounds of its blocks or the values of its labels differ"
    return "the resume_key differs" if now.get("derived") else "the reader differs, or how many items the files hold"


def _sweep(root: str) -> None:
    """Remove what killed processes left under random names."""
    names = os.listdir(root)
    for name in filter(_GONE.fullmatch, names):
        shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    private = list(filter(_PRIVATE.fullmatch, names))
    if not private:
        return
    with suppress(BlockingIOError), _making(root, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        for path in (os.path.join(root, name) for name in private):
            with suppress(FileNotFoundError, NotADirectoryError):
                if _holds_own_only(path) and (alone or time.time() - os.lstat(path).st_mtime > NEW_FOR):
                    _throw_away(path)


def _holds_own_only(private: str) -> bool:
    """Whether daskstack may have made all that lies in a private folder."""
    known = (LOCK, PUBLISHING, LISTING, MANIFEST)
    return all(name in known or _PLACE.fullmatch(name) for name in os.listdir(private))


@contextmanager
def _making(root: str, kind: int) -> Iterator[bool]:
    """The lock on the folder itself that who makes a private one shares, so that others see which are of the living.

    Where a file system has no such lock, or another host does not see it, a private folder may go while it is
    made: then it is made again.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield files.lock(descriptor, kind)
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


def clear_published(out: str, plan_id: str) -> None:
    """Throw away what a run that was killed after it had published, or could not delete, has left."""
    root = staging_root(out)
    folder = os.path.join(root, plan_id)
    if os.path.islink(root):
        return
    with suppress(OSError):  # there is none
        own = _is_own(root)
        _sweep(root)
        with suppress(OSError):  # another run is in it, which will do it
            if manifest_id(folder) == plan_id:
                files.let_go(locked(folder))
                _throw_away(folder)
        if own:
            _remove_if_empty(root)


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
                    _throw_away(staging.folder)
            else:
                kept = _kept(staging, aside, repeatable=repeatable)
        finally:
            files.let_go(staging.lock)
        if staging.root_is_own and not kept:
            _remove_if_empty(os.path.dirname(staging.folder))
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
            _throw_away(staging.folder)
    return 0


def _throw_away(folder: str) -> None:
    """Take a folder out of everybody's way at once, then delete it."""
    private = os.path.join(os.path.dirname(folder), f".{uuid.uuid4().hex}.gone")
    with suppress(FileNotFoundError):
        os.rename(folder, private)
    shutil.rmtree(private, ignore_errors=True)


def _remove_if_empty(root: str) -> None:
    """Remove the folder around staging folders, unless it holds another one, or something of the user's."""
    for _ in range(TRIES):
        _remove_turn(root)
        with suppress(OSError):
            os.rmdir(root)
        try:
            left = os.listdir(root)
        except OSError:
            return
        if not all(name == TURN or _GONE.fullmatch(name) for name in left):
            return
        time.sleep(0.01)  # others are about to take away what is left


def _remove_turn(root: str) -> None:
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
