"""The staging folder: where an output grows until it is whole, and how it gets its final name.

``<OUT>.part/<plan id>/`` holds the manifest and the growing target.  It is prepared under a random
name and renamed into place, so that it is never there without its manifest; whoever loses that race
adopts the winner's.  Everything in it is written by tasks that put the same bytes in the same place
however often they run.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from daskstack import files
from daskstack.errors import OutputError, OutputExistsError
from daskstack.targets import Target
from daskstack.text import shown

MANIFEST = "manifest.json"
REPLACED = "replaced"


def staging_root(out: str) -> str:
    """The folder beside an output that holds its staging folders."""
    return f"{out}.part"


def prepare(out: str, plan_id: str, manifest: Mapping[str, Any], target: Target) -> str:
    """Make the staging folder of a plan, or adopt the one that is there.

    Returns
    -------
    str
        The folder; it holds the manifest and the target at its full size.

    Raises
    ------
    NoSpaceError, OutputError
        It cannot be made; nothing is left behind.
    """
    root = staging_root(out)
    folder = os.path.join(root, plan_id)
    with files.writing(root, target.nbytes):
        _make_root(root)
        private = os.path.join(root, f".{uuid.uuid4().hex}")
        os.mkdir(private)
        try:
            target.create(private)
            files.write_new(os.path.join(private, MANIFEST), json.dumps(manifest).encode())
            files.sync_folder(private)
            files.move_new(private, folder)
            files.sync_folder(root)
        except FileExistsError:
            shutil.rmtree(private)
            _adopt(folder, plan_id)
        except BaseException:
            shutil.rmtree(private, ignore_errors=True)
            _remove_if_empty(root)
            raise
    return folder


def _make_root(root: str) -> None:
    try:
        os.mkdir(root)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(root).st_mode):
            raise OutputError(
                f"{shown(root)} is in the way: it is no folder", "move it away, or choose another OUT"
            ) from None


def _adopt(folder: str, plan_id: str) -> None:
    """Refuse a folder under the plan's name that daskstack did not make."""
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as f:
            found = json.load(f)["plan_id"]
    except (OSError, ValueError, LookupError, TypeError):
        found = None
    if found != plan_id or os.path.islink(folder):
        raise OutputError(f"{shown(folder)} is no staging folder of this build", "move it away")


def publish(folder: str, moves: Sequence[tuple[str, str]], *, old_names: Sequence[str] = ()) -> None:
    """Give the finished files their final names, the array last.

    Parameters
    ----------
    folder : str
        The staging folder.
    moves : sequence of (staged path, final path)
        The array last: while it is not there, there is no output.
    old_names : sequence of str, optional
        Files of daskstack's own that hold final names (of the output that is replaced, or left by a
        publication that was interrupted), the array first: they are moved into the staging folder
        before, so that at no moment an array stands beside another's index.

    Raises
    ------
    OutputExistsError
        Somebody else's file took a name meanwhile; it is not touched.
    """
    final = moves[-1][1]
    with files.writing(final):
        if old_names:
            aside = os.path.join(folder, f"{REPLACED}-{uuid.uuid4().hex}")
            os.mkdir(aside)
            for name in old_names:
                os.rename(name, os.path.join(aside, os.path.basename(name)))
            files.sync_folder(os.path.dirname(final))
        for source, name in moves:
            try:
                files.move_new(source, name)
            except FileExistsError:
                raise OutputExistsError(
                    f"{shown(name)} appeared during the build and was not touched",
                    "move it away, or choose another OUT",
                ) from None
        files.sync_folder(os.path.dirname(final))


def remove(folder: str) -> None:
    """Throw a staging folder away, and the folder around it where it is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    _remove_if_empty(os.path.dirname(folder))


def _remove_if_empty(root: str) -> None:
    with suppress(OSError):  # not empty: it holds the staging of another plan, or something of the user's
        os.rmdir(root)
