"""The structure of a Zarr group compared with its record: metadata, index, every file of the data."""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

from daskstack.text import count, listed, plural, printable, shape_text
from daskstack.verification.finished import Finished, Problem, compare_entries, described_dtype, read_file, read_record

NEVER_WRITTEN = 2**64 - 1  # in the index of a shard


def inspected_zarr(out: str, problems: list[Problem], unchecked: list[str]) -> Finished | None:
    """A group, what is wrong with it added to ``problems``; None where it cannot be told what it should be."""
    version = 3 if os.path.lexists(os.path.join(out, "zarr.json")) else 2
    root = "zarr.json" if version == 3 else ".zattrs"
    if not os.path.lexists(os.path.join(out, root)):
        unchecked.append(f"{printable(os.path.basename(out))} has no record of how it was made")
        return None
    try:
        text = json.loads(read_file(os.path.join(out, root)))
    except ValueError as exc:
        problems.append(Problem(f"is no JSON: {exc}", None, root))
        return None
    attributes = text["attributes"] if version == 3 else text
    if "daskstack" not in attributes:
        unchecked.append(f"{printable(os.path.basename(out))} has no record of how it was made")
        return None
    record = read_record(attributes, root, problems)
    if record is None:
        return None
    compare_entries(out, record["files"], problems)
    _compare_consolidated(out, version, text, problems)
    finished = Finished(out, record, tuple(record["shape"]), described_dtype(record), {})
    finished.broken = _zarr_is_broken(finished, problems)
    for name in ("file", "page", "size", "mtime", "checksum"):
        if os.path.isdir(os.path.join(out, name)):
            finished.index[name] = _column(out, name, problems)
    _compare_shards(finished, problems)
    held = plural(math.prod(-(-n // s) for n, s in zip(finished.shape, record["shards"], strict=True)), "file")
    finished.summary = f"{shape_text(finished.shape)} {finished.dtype}, Zarr {version}, {held} of data"
    return finished


def _column(out: str, name: str, problems: list[Problem]) -> list[str]:
    import zarr

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array: Any = zarr.open_array(os.path.join(out, name), mode="r")
            values = np.asarray(array[...]).ravel().tolist()
    except Exception as exc:  # noqa: BLE001  # whatever damaged metadata makes zarr raise
        problems.append(Problem(f"cannot be read: {type(exc).__name__}: {exc}", None, name))
        return []
    return [f"{v:08x}" if name == "checksum" else str(v) for v in values]


def _compare_consolidated(out: str, version: int, root: Mapping[str, Any], problems: list[Problem]) -> None:
    """What the group says of its arrays in one place beside what each says itself."""
    if version == 3:
        envelope = root["consolidated_metadata"]
        found = {f"{name}/zarr.json": entry for name, entry in envelope["metadata"].items()}
        place, about = "zarr.json", {"kind": "inline", "must_understand": False}
        if (root["zarr_format"], root["node_type"]) != (3, "group"):
            problems.append(Problem("does not say that it is a group of Zarr 3", None, place))
    else:
        envelope = json.loads(read_file(os.path.join(out, ".zmetadata")))
        found = envelope["metadata"]
        place, about = ".zmetadata", {"zarr_consolidated_format": 1}
    if {key: value for key, value in envelope.items() if key != "metadata"} != about:
        problems.append(Problem("its consolidated metadata are of an unknown kind", None, place))
    own = {}
    for where, _, names in os.walk(out):
        for name in set(names) & {"zarr.json", ".zarray", ".zattrs", ".zgroup"}:
            key = os.path.relpath(os.path.join(where, name), out)
            if key != "zarr.json":
                own[key] = _parsed(os.path.join(out, key))
    unlike = (key for key in sorted(found.keys() | own.keys()) if found.get(key) != own.get(key))
    problems.extend(Problem(f"what it says of {key} is not what that says", None, place) for key in unlike)


def _parsed(path: str) -> Any:
    """What a file of JSON holds; None where it is none."""
    try:
        return json.loads(read_file(path))
    except ValueError:
        return None


def _zarr_is_broken(finished: Finished, problems: list[Problem]) -> bool:
    """Whether the data's metadata are not those of the recorded array."""
    import zarr

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array: Any = zarr.open_array(os.path.join(finished.out, "data"), mode="r")
    except Exception as exc:  # noqa: BLE001  # whatever damaged metadata makes zarr raise
        problems.append(Problem(f"cannot be read: {type(exc).__name__}: {exc}", None, "data"))
        return True
    record = finished.record
    shards = array.shards if record["zarr_format"] == 3 else array.chunks
    found = (tuple(array.shape), array.dtype.newbyteorder("="), tuple(array.chunks), tuple(shards or ()))
    due = (finished.shape, finished.dtype, tuple(record["chunks"]), tuple(record["shards"]))
    if found != due:
        problems.append(Problem(f"is {found[0]} {found[1]}, due {due[0]} {due[1]}, or cut up otherwise", None, "data"))
    return found != due


def _compare_shards(finished: Finished, problems: list[Problem]) -> None:
    """Every file of the data is there and whole: one that is missing, and a chunk left out of it, read as zeros."""
    record, folder = finished.record, os.path.join(finished.out, "data")
    version, shards = record["zarr_format"], tuple(record["shards"])
    due = {}
    for at in itertools.product(*(range(-(-n // s)) for n, s in zip(finished.shape, shards, strict=True))):
        due[".".join(map(str, at if version == 2 else ("c", *at)))] = at
    found = {name for name in os.listdir(folder) if name not in {"zarr.json", ".zarray", ".zattrs"}}
    others = sorted(found - due.keys())
    problems.extend(Problem("is none of the data's files", None, f"data/{name}") for name in others)
    for name, at in due.items():
        problem = "was never written" if name not in found else ""
        if not problem and version == 3:
            problem = _shard_problem(os.path.join(folder, name), at, finished)
        if problem:
            problems.append(Problem(f"{problem}; it holds {_held(at, finished)}", None, f"data/{name}"))


def _held(at: Sequence[int], finished: Finished) -> str:
    """The items that a file of the data holds, and their files."""
    grid = finished.grid
    low = [k * s for k, s in zip(at, finished.record["shards"][: len(grid)], strict=False)]
    high = [min(n, a + s) - 1 for n, a, s in zip(grid, low, finished.record["shards"], strict=False)]
    first, last = int(np.ravel_multi_index(low, grid)), int(np.ravel_multi_index(high, grid))
    items = f"item {first}" if first == last else f"items {first} to {last}"
    came = listed([finished.file_of(k) for k in range(first, last + 1)]) if "file" in finished.index else ""
    return f"{items} ({came})" if came else items


def _shard_problem(path: str, at: Sequence[int], finished: Finished) -> str:
    """What is wrong with a shard's index: it is cut short, damaged, or has chunks that were never written."""
    record = finished.record
    counts = [s // c for s, c in zip(record["shards"], record["chunks"], strict=True)]
    length = 16 * math.prod(counts) + 4
    size = os.path.getsize(path)
    if size < length:
        return f"has {count(size)} bytes, fewer than its index alone"
    with open(path, "rb") as f:
        f.seek(size - length)
        data = f.read()
    if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return "has an index whose checksum differs"
    index = np.frombuffer(data[:-4], "<u8").reshape(*counts, 2)
    within = _chunks_within(at, finished, counts)
    places = index[within].reshape(-1, 2)
    if (places == NEVER_WRITTEN).any():
        return "holds chunks that were never written"
    if int((places[:, 0] + places[:, 1]).max()) > size - length:
        return "is cut short"
    return ""


def _chunks_within(at: Sequence[int], finished: Finished, counts: Sequence[int]) -> tuple[slice, ...]:
    """The chunks of a shard that lie in the array; those beyond its edges are never written."""
    record = finished.record
    left = [n - k * s for n, k, s in zip(finished.shape, at, record["shards"], strict=True)]
    return tuple(slice(min(total, -(-n // c))) for n, c, total in zip(left, record["chunks"], counts, strict=True))
