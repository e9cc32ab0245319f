"""The output as one .npy in C order and native byte order, its index and record beside it.

Bytes are written with pwrite(2) on write-only O_DSYNC descriptors opened by path in the task, never
through a memory map: a map dies by SIGBUS on a full disk, and on NFS a client writes whole pages
back over the bytes of its neighbours, except on such descriptors.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from daskstack import files
from daskstack.blocks import as_bytes, items_per_block, tile_of
from daskstack.errors import UsageError
from daskstack.targets.base import (
    Index,
    Target,
    Tiling,
    crc32c,
    file_entry,
    is_as_entered,
    record_checksum,
    sampled_items,
)

POISON = b"\x93NUMPY\xff\xff"  # every reader says that it does not know this version; none speaks of pickles
DATA = "data.npy"
WRITERS = "writers"  # locked by each task while it holds the array open
MOST_RECORD_BYTES = 16 << 20
CSV_ROWS = 1 << 12  # made at a time, so that millions of items take no lists of as many values


@dataclass(frozen=True)
class NpyTarget(Target):
    """Writes blocks of items into one .npy file."""

    suffix: ClassVar[str] = ".npy"

    @classmethod
    def make(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], dims: tuple[str, ...], grid_axes: int, tiling: Tiling
    ) -> Self:
        for option in ("chunks", "shards", "compression", "zarr_format"):
            if getattr(tiling, option) is not None:
                raise UsageError(f"{option} with a .npy output", f"leave {option} out, or let the output end in .zarr")
        return cls(shape, dtype, grid_axes)

    @property
    def size(self) -> int:
        return len(self.header) + self.nbytes

    @property
    def options(self) -> dict[str, Any]:
        return {"format": "npy"}

    def file_count(self, labels: Sequence[str], columns: int) -> int:
        return 3 + len(labels)

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes, as numpy.save writes them."""
        return npy_header(self.shape, self.dtype)

    @staticmethod
    def read_hint(out: str) -> str:
        return f'np.load("{out}", mmap_mode="r")'

    @staticmethod
    def final_names(out: str, labels: Sequence[str]) -> tuple[str, ...]:
        return (record_path(out), index_path(out), *(label_path(out, name) for name in labels), out)

    def create(self, folder: str) -> None:
        path = os.path.join(folder, DATA)
        with files.writing(path, self.size):
            descriptor = os.open(path, files.NEW_FILE, 0o666)
            try:
                files.reserve(descriptor, self.size)
                files.write_at(descriptor, memoryview(POISON), 0)
                files.sync(descriptor)
            finally:
                os.close(descriptor)
            files.write_new(os.path.join(folder, WRITERS), b"")

    def is_there(self, folder: str) -> bool:
        path = os.path.join(folder, DATA)
        return os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) == self.size

    def is_written(self, folder: str) -> bool:
        descriptor = os.open(os.path.join(folder, WRITERS), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            files.lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            files.let_go(descriptor)
        return False

    def write(self, folder: str, start: int, block: NDArray[Any]) -> None:
        if not block.nbytes:
            return
        offset = len(self.header) + start * self.item_nbytes
        path = os.path.join(folder, DATA)
        with files.writing(path, block.nbytes), _as_writer(folder):
            descriptor = os.open(path, os.O_WRONLY | os.O_DSYNC | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                files.write_at(descriptor, as_bytes(block).data, offset)
            finally:
                os.close(descriptor)

    def read_back(self, folder: str, start: int, items: int) -> NDArray[Any]:
        block = np.empty((items, *self.shape[self.grid_axes :]), self.dtype)
        if block.nbytes:
            offset = len(self.header) + start * self.item_nbytes
            files.read_from_disk(os.path.join(folder, DATA), as_bytes(block).data, offset)
        return block

    def finish(self, folder: str, out: str, index: Index) -> list[tuple[str, str]]:
        staged = _write_side_files(folder, out, index)
        data = os.path.join(folder, DATA)
        with files.writing(data):
            descriptor = os.open(data, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                files.write_at(descriptor, memoryview(self.header), 0)
                files.sync(descriptor)
            finally:
                os.close(descriptor)
            files.sync_folder(folder)
        return [*staged, (data, out)]

    @staticmethod
    def read_record(out: str) -> dict[str, Any] | None:
        try:
            text = json.loads(files.read_regular(record_path(out), MOST_RECORD_BYTES))
            record: dict[str, Any] = text["daskstack"]
            return record if text["crc32c"] == record_checksum(record) else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    @staticmethod
    def read_index(out: str, names: Sequence[str]) -> dict[str, list[str]]:
        with open(index_path(out), newline="", encoding="utf-8", errors="surrogateescape") as f:
            head, *rows = csv.reader(f, strict=True)
        return {name: [row[k] for row in rows] for k, name in enumerate(head) if name in names}

    @staticmethod
    def record_path(out: str) -> str:
        return record_path(out)

    @staticmethod
    def read_labels(out: str, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        return {name: np.load(label_path(out, name)) for name in names}

    @staticmethod
    def read_region(out: str, region: tuple[slice, ...]) -> NDArray[Any]:
        mapped = np.load(out, mmap_mode="r")  # held for this one copy only
        return np.array(mapped[region])

    @staticmethod
    def natural_chunks(record: Mapping[str, Any]) -> tuple[int, ...]:
        axes = len(record["axes"])
        grid, item = record["shape"][:axes], record["shape"][axes:]
        items = math.prod(grid)
        return (*tile_of(grid, items_per_block(items, record["nbytes"] // items)), *(max(1, n) for n in item))

    @classmethod
    def is_own(cls, out: str) -> bool:
        """Header and size must agree with the record, and a sample of items with the index."""
        record = cls.read_record(out)
        if record is None or os.path.islink(out) or not os.path.isfile(out):
            return False
        try:
            checksums = cls.read_index(out, ["checksum"])["checksum"]
            dtype = np.lib.format.descr_to_dtype(_as_descr(record["dtype"]))
            made = cls(tuple(record["shape"]), dtype, len(record["axes"]))
            with open(out, "rb") as f:
                return (
                    os.path.getsize(out) == made.size
                    and f.read(len(made.header)) == made.header
                    and len(checksums) == made.items
                    and all(_item_agrees(f.fileno(), made, k, checksums[k]) for k in sampled_items(len(checksums)))
                )
        except (OSError, ValueError, LookupError, TypeError):
            return False

    @classmethod
    def own_names(cls, out: str) -> tuple[str, ...]:
        record = cls.read_record(out)
        if record is None:
            return ()
        *beside, array = cls.final_names(out, record["labels"])
        own = [path for path in beside if path == record_path(out) or _is_listed(path, record)]
        return (array, *own) if cls.is_own(out) else tuple(own)


@contextmanager
def _as_writer(folder: str) -> Iterator[None]:
    """Be known as one that may hold the array open; refused once another run has taken the folder over."""
    path = os.path.join(folder, WRITERS)
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        files.lock(descriptor, fcntl.LOCK_SH)
        if not files.is_same(descriptor, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield
    finally:
        files.let_go(descriptor)


def record_path(out: str) -> str:
    """Where the record of how an output was made lies."""
    return f"{out}.json"


def index_path(out: str) -> str:
    """Where the table of its items lies."""
    return f"{out}.index.csv"


def label_path(out: str, name: str) -> str:
    """Where the array of one label lies: ``train.npy`` has ``train.<label>.npy``."""
    return f"{out.removesuffix('.npy')}.{name}.npy"


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The header that numpy.save writes for an array in C order.

    Examples
    --------
    >>> npy_header((2, 3), np.dtype("uint16"))[10:70]
    b"{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), } "
    """
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(int(n) for n in shape),  # NumPy's own integers would be written as np.int64(3)
    }
    stream = io.BytesIO()
    try:
        np.lib.format.write_array_header_1_0(stream, header)
    except UnicodeEncodeError:  # names of fields beyond latin-1; NumPy has no public function for version 3
        text = (repr(header) + "\n").encode()
        padded = text[:-1] + b" " * (-(12 + len(text)) % 64) + b"\n"
        return b"\x93NUMPY\x03\x00" + len(padded).to_bytes(4, "little") + padded
    except ValueError:  # over 64 KiB: many fields
        stream = io.BytesIO()
        np.lib.format.write_array_header_2_0(stream, header)
    return stream.getvalue()


def _write_side_files(folder: str, out: str, index: Index) -> list[tuple[str, str]]:
    """Write record, index and labels into the folder; what is renamed to what, the record first.

    The record lists the others with their checksums, so that whatever an interrupted publication
    leaves behind can be told from a user's file.
    """
    contents = {index_path(out): _index_csv(index)}
    for name in index.labels:
        stream = io.BytesIO()
        np.save(stream, index.label(name)[1], allow_pickle=False)
        contents[label_path(out, name)] = stream.getvalue()
    listed = {os.path.basename(path): file_entry(data) for path, data in contents.items()}
    described = {**index.record, "files": listed}
    record = json.dumps({"daskstack": described, "crc32c": record_checksum(described)}, indent=1).encode() + b"\n"
    staged = []
    for path, data in {record_path(out): record, **contents}.items():
        source = os.path.join(folder, os.path.basename(path))
        with files.writing(source, len(data)):
            if os.path.lexists(source):  # of a run that was killed here
                os.unlink(source)
            files.write_new(source, data)
        staged.append((source, path))
    return staged


def _index_csv(index: Index) -> bytes:
    """A row an item: its number, file and page, its labels, size and time of its file, checksum, what was filled in."""
    own = index.columns
    columns: dict[str, Sequence[Any] | NDArray[Any]] = {"item": range(math.prod(index.grid))}
    columns |= {name: own[name] for name in ("file", "page") if name in own}
    columns |= index.labels
    columns |= {name: own[name] for name in ("size", "mtime", "checksum", "filled") if name in own}
    returns = any("\r" in name for name in own.get("file", ()))  # csv leaves them unquoted before Python 3.13
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL if returns else csv.QUOTE_MINIMAL)
    writer.writerow(columns)
    pieces = []
    for start in range(0, max(1, len(columns["item"])), CSV_ROWS):
        part = {name: _as_list(values[start : start + CSV_ROWS]) for name, values in columns.items()}
        part["checksum"] = [f"{c:08x}" for c in part["checksum"]]
        writer.writerows(zip(*part.values(), strict=True))
        pieces.append(stream.getvalue().encode("utf-8", "surrogateescape"))  # names that are no UTF-8 keep their bytes
        stream.seek(0)
        stream.truncate()
    return b"".join(pieces)


def _as_list(values: Sequence[Any] | NDArray[Any]) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _is_listed(path: str, record: Mapping[str, Any]) -> bool:
    entry = record["files"].get(os.path.basename(path))
    return entry is not None and is_as_entered(path, entry)


def _as_descr(descr: Any) -> Any:
    """A dtype's description as NumPy wants it, where JSON made lists of its tuples."""
    if not isinstance(descr, list):
        return descr
    return [tuple(tuple(p) if k == 2 else _as_descr(p) for k, p in enumerate(field)) for field in descr]


def _item_agrees(descriptor: int, target: NpyTarget, item: int, checksum: str) -> bool:
    data = np.empty(target.item_nbytes, np.uint8)
    files.read_at(descriptor, data.data, len(target.header) + item * target.item_nbytes)
    return f"{crc32c(data):08x}" == checksum
