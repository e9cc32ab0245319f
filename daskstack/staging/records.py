"""What a staging folder says of its build: the manifest, and the list of the files."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from daskstack import files, receipts
from daskstack.discover import Listing
from daskstack.targets import crc32c
from daskstack.targets.base import record_checksum
from daskstack.text import listed, plural, shown

MANIFEST = "manifest.json"
LISTING = "listing.npz"
MOST_MANIFEST_BYTES = 16 << 20
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


def write(folder: str, manifest: Mapping[str, Any], listing: Listing) -> None:
    """Write both into a new folder, each with its checksum in the manifest."""
    names = listing_bytes(listing)
    described = {**manifest, "listing_crc32c": crc32c(names)}
    checked = {"manifest": described, "crc32c": record_checksum(described)}
    files.write_new(os.path.join(folder, LISTING), names)
    files.write_new(os.path.join(folder, MANIFEST), json.dumps(checked).encode())


def listing_bytes(listing: Listing) -> bytes:
    """A listing as it is kept."""
    stream = io.BytesIO()
    texts = {"paths": listing.paths, "below": listing.below, "sources": listing.sources, "left_out": listing.left_out}
    packed = {name: np.frombuffer(b"\0".join(map(os.fsencode, t)), np.uint8) for name, t in texts.items()}
    numbers = {"sizes": listing.sizes, "mtimes": listing.mtimes, "natural": np.array(listing.natural)}
    if listing.rows is not None:
        numbers["rows"] = listing.rows
    np.savez(stream, allow_pickle=False, **numbers, **packed)
    return stream.getvalue()


def difference(now: Mapping[str, Any], listing: Listing, then: Mapping[str, Any], before: Listing | None) -> str:
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
