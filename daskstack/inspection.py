"""A finished output as it lies on disk: its record, index and structure, each compared with the others.

Written for :mod:`daskstack.verification` alone, and apart from what writes outputs, so that one fault does
not hide in both.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from daskstack.text import count, listed, plural, printable, shape_text

NEVER_WRITTEN = 2**64 - 1  # in the index of a shard


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it should be.

    Attributes
    ----------
    what : str
        What is wrong.
    item : int, optional
        The item it concerns.
    file : str
        The file that the item came from, or the file of the output that is wrong.
    """

    what: str
    item: int | None = None
    file: str = ""

    def __str__(self) -> str:
        where = printable(self.file) if self.item is None else f"item {self.item} ({printable(self.file)})"
        return f"{where}  {self.what}"


@dataclass
class Finished:
    """An output that can be read.

    Attributes
    ----------
    out : str
        Where it lies.
    record : dict
        How it was made.
    shape, dtype
        As recorded.
    index : dict of str to list of str
        Columns of its index.
    broken : bool
        Whether the array itself cannot be read as recorded.
    summary : str
        What its structure is.
    """

    out: str
    record: dict[str, Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    index: dict[str, list[str]]
    broken: bool = False
    summary: str = ""

    @property
    def grid(self) -> tuple[int, ...]:
        """Items along each of the axes that hold them."""
        return self.shape[: len(self.record["axes"])]

    @property
    def items(self) -> int:
        """How many items there are."""
        return math.prod(self.grid)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Shape of one item."""
        return self.shape[len(self.record["axes"]) :]

    @property
    def item_nbytes(self) -> int:
        """Size of one item in bytes."""
        return math.prod(self.item_shape) * self.dtype.itemsize

    @property
    def tile_items(self) -> int:
        """How many items are best read at once."""
        return self.items if self.out.endswith(".npy") else int(self.record["shards"][len(self.grid) - 1])

    @property
    def checksums(self) -> list[str] | None:
        """The checksum of each item, where the index has them."""
        found = self.index.get("checksum")
        return found if found is not None and len(found) == self.items else None

    def column(self, name: str) -> list[str]:
        """A column of the index."""
        return self.index[name]

    def file_of(self, item: int) -> str:
        """The file that an item came from, as far as it is known."""
        names = self.index.get("file", [])
        return names[item] if item < len(names) else "no file"

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Items from ``start`` to ``stop`` as they are stored, shape (items, *item shape), native byte order."""
        if self.out.endswith(".npy"):
            size = stop - start
            with open(self.out, "rb") as f:
                f.seek(os.path.getsize(self.out) - (self.items - start) * self.item_nbytes)
                data = f.read(size * self.item_nbytes)
            return np.frombuffer(data, self.dtype).reshape(size, *self.item_shape)
        last = self.grid[-1]
        parts = []
        while start < stop:  # along the last axis of the grid at once
            *before, first = (int(n) for n in np.unravel_index(start, self.grid))
            end = min(last, first + stop - start)
            parts.append(np.asarray(self.group_array[(*before, slice(first, end))]))
            start += end - first
        return np.concatenate(parts).astype(self.dtype, copy=False)

    @cached_property
    def group_array(self) -> Any:
        """The data of a group, opened once."""
        import zarr

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that dates and texts are new to the specification
            return zarr.open_array(os.path.join(self.out, "data"), mode="r")


def inspected(out: str, problems: list[Problem], unchecked: list[str]) -> Finished | None:
    """The output, its structure compared with its record; None where that cannot be told.

    What is wrong is added to ``problems``, what cannot be compared to ``unchecked``.
    """
    if not os.path.lexists(out):
        unchecked.append(f"there is no {printable(os.path.basename(out))}")
        return None
    inspect = _inspected_npy if out.endswith(".npy") else _inspected_zarr
    try:
        return inspect(out, problems, unchecked)
    except Exception as exc:  # noqa: BLE001  # whatever damaged metadata leads to
        problems.append(
            Problem(f"its metadata cannot be read: {type(exc).__name__}: {exc}", None, os.path.basename(out))
        )
        return None


# -- records ----------------------------------------------------------------------------------------------------


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as f:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        return f.read()


def _record(text: Mapping[str, Any], name: str, problems: list[Problem]) -> dict[str, Any] | None:
    """The record in some JSON; None where its own checksum tells that it was changed."""
    record: dict[str, Any] = text["daskstack"]
    checksum = f"{google_crc32c.value(json.dumps(record, sort_keys=True).encode()):08x}"
    if checksum != text["crc32c"]:
        problems.append(Problem("the record was changed: its checksum differs", None, name))
        return None
    return record


def _compare_entries(folder: str, entries: Mapping[str, Mapping[str, int]], problems: list[Problem]) -> None:
    """The small files of an output beside the sizes and checksums in its record."""
    for name, entry in entries.items():
        try:
            data = _read(os.path.join(folder, name))
        except (OSError, ValueError) as exc:
            problems.append(Problem(f"cannot be read: {exc}", None, name))
            continue
        if (len(data), google_crc32c.value(data)) != (entry["bytes"], entry["crc32c"]):
            problems.append(Problem("is not as recorded: its size or checksum differs", None, name))


def _dtype(record: Mapping[str, Any]) -> np.dtype[Any]:
    def described(descr: Any) -> Any:
        if not isinstance(descr, list):
            return descr
        return [tuple(tuple(p) if k == 2 else described(p) for k, p in enumerate(f)) for f in descr]

    return np.lib.format.descr_to_dtype(described(record["dtype"]))


# -- .npy -------------------------------------------------------------------------------------------------------


def _inspected_npy(out: str, problems: list[Problem], unchecked: list[str]) -> Finished | None:
    name = os.path.basename(out)
    if not os.path.lexists(f"{out}.json"):
        unchecked.append(f"there is no {printable(name)}.json, the record of how it was made")
        return None
    try:
        text = json.loads(_read(f"{out}.json"))
    except ValueError as exc:
        problems.append(Problem(f"is no JSON: {exc}", None, f"{name}.json"))
        return None
    record = _record(text, f"{name}.json", problems)
    if record is None:
        return None
    _compare_entries(os.path.dirname(out), record["files"], problems)
    finished = Finished(out, record, tuple(record["shape"]), _dtype(record), {})
    finished.broken = _npy_is_broken(finished, name, problems)
    try:
        head, *rows = csv.reader(io.StringIO(_read(f"{out}.index.csv").decode("utf-8", "surrogateescape")), strict=True)
        finished.index = {column: [row[k] for row in rows] for k, column in enumerate(head)}
    except (OSError, ValueError, IndexError, csv.Error) as exc:
        problems.append(Problem(f"cannot be read: {exc}", None, f"{name}.index.csv"))
    beside = len(record["files"]) + 1
    finished.summary = f"{shape_text(finished.shape)} {finished.dtype}, {plural(beside, 'file')} beside it"
    return finished


def _npy_is_broken(finished: Finished, name: str, problems: list[Problem]) -> bool:
    """Whether header or size are not those of the recorded array."""
    try:
        mapped: Any = np.load(finished.out, mmap_mode="r", allow_pickle=False, max_header_size=1 << 20)
    except (OSError, ValueError) as exc:
        problems.append(Problem(f"cannot be read: {exc}", None, name))
        return True
    before = len(problems)
    if (mapped.shape, mapped.dtype) != (finished.shape, finished.dtype) or not mapped.flags.c_contiguous:
        order = "" if mapped.flags.c_contiguous else ", Fortran order"
        due = f"{shape_text(finished.shape)} {finished.dtype}"
        problems.append(
            Problem(f"its header says {shape_text(mapped.shape)} {mapped.dtype}{order}, due {due}", None, name)
        )
    size, due_size = os.path.getsize(finished.out), mapped.offset + finished.items * finished.item_nbytes
    if size != due_size:
        problems.append(Problem(f"has {count(size)} bytes, due {count(due_size)}", None, name))
    return len(problems) > before


# -- Zarr -------------------------------------------------------------------------------------------------------


def _inspected_zarr(out: str, problems: list[Problem], unchecked: list[str]) -> Finished | None:
    version = 3 if os.path.lexists(os.path.join(out, "zarr.json")) else 2
    root = "zarr.json" if version == 3 else ".zattrs"
    if not os.path.lexists(os.path.join(out, root)):
        unchecked.append(f"{printable(os.path.basename(out))} has no record of how it was made")
        return None
    try:
        text = json.loads(_read(os.path.join(out, root)))
    except ValueError as exc:
        problems.append(Problem(f"is no JSON: {exc}", None, root))
        return None
    attributes = text["attributes"] if version == 3 else text
    if "daskstack" not in attributes:
        unchecked.append(f"{printable(os.path.basename(out))} has no record of how it was made")
        return None
    record = _record(attributes, root, problems)
    if record is None:
        return None
    _compare_entries(out, record["files"], problems)
    _compare_consolidated(out, version, text, problems)
    finished = Finished(out, record, tuple(record["shape"]), _dtype(record), {})
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
        envelope = json.loads(_read(os.path.join(out, ".zmetadata")))
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
        return json.loads(_read(path))
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
