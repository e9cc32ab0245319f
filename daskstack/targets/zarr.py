"""The output as a Zarr group: ``data`` in files that are written whole, and the coordinates of its items.

In version 3 a file is a shard, assembled by :mod:`daskstack.targets.shard`; in version 2 it is a chunk.
The metadata and the small arrays (:mod:`daskstack.targets.zarr_group`) are written last, so that nothing
takes an unfinished group for an array.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from daskstack import blocks, files
from daskstack.errors import UsageError
from daskstack.targets.base import Index, Target, Tiling, crc32c, is_as_entered, sampled_items
from daskstack.targets.shard import Compression, chunk_regions, encode_chunk, encode_shard, parse_compression
from daskstack.targets.zarr_group import (
    DATA,
    check_array,
    group_files,
    group_names,
    has_other_attributes,
    read_array,
    read_files,
    read_record,
    record_path,
)
from daskstack.text import nbytes

GROUP = "data.zarr"
UNFINISHED = "unfinished"
FORMATS = (2, 3)
MOST_CHUNK_NBYTES = 2**31 - 1 - 16  # what Blosc takes, its own header included
MOST_PIECES = 512  # of one writev(2); the kernel takes 1,024


@dataclass(frozen=True)
class ZarrTarget(Target):
    """Writes blocks of items as whole files.

    Parameters
    ----------
    chunks, shards : tuple of int
        Shape of a chunk and of what one file holds, the same in version 2; a block is one such file deep.
    dims : tuple of str
        Names of the axes, those of the items first.
    compression : Compression
        How chunks are compressed.
    zarr_format : int
        2 or 3.
    """

    chunks: tuple[int, ...]
    shards: tuple[int, ...]
    dims: tuple[str, ...]
    compression: Compression
    zarr_format: int

    suffix: ClassVar[str] = ".zarr"

    @classmethod
    def make(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], dims: tuple[str, ...], grid_axes: int, tiling: Tiling
    ) -> Self:
        version = 3 if tiling.zarr_format is None else tiling.zarr_format
        if version not in FORMATS:
            raise UsageError(f"zarr_format={version!r}", "choose 2 or 3")
        compression = parse_compression(tiling.compression, "blosc" if version == 3 else "zstd")
        chunks, shards = _tiles(shape, dtype.itemsize, grid_axes, tiling, version)
        made = cls(shape, dtype, grid_axes, chunks, shards, dims, compression, version)
        made._check()
        return made

    def _check(self) -> None:
        """Refuse what no reader could read, before anything is written."""
        chunk_nbytes = math.prod(self.chunks) * self.dtype.itemsize
        if chunk_nbytes > MOST_CHUNK_NBYTES:
            message = f"one chunk of {self.chunks} takes {nbytes(chunk_nbytes)}; codecs take 2 GiB"
            raise UsageError(message, "smaller chunks")
        if self.dtype.names is not None and self.zarr_format == 3:
            raise UsageError("Zarr 3 has no specification for records", "let the output end in .npy, or zarr_format=2")
        try:
            check_array(self._described(), self.compression)
        except Exception as exc:
            raise UsageError(f"Zarr cannot hold {self.dtype}: {exc}", "let the output end in .npy") from exc

    def _described(self) -> dict[str, Any]:
        names = ("zarr_format", "shape", "dtype", "chunks", "shards", "dims")
        return {name: getattr(self, name) for name in names}

    @property
    def reserved(self) -> tuple[str, ...]:
        return self.dims[self.grid_axes :]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "format": "zarr",
            "zarr_format": self.zarr_format,
            "chunks": list(self.chunks),
            "shards": list(self.shards),
            "compression": str(self.compression),
        }

    @property
    def tile(self) -> tuple[int, ...]:
        rows = self.shards[: self.grid_axes]
        return blocks.as_run(self.grid, rows, rows)

    @property
    def scratch(self) -> int:
        return math.prod(self.shards) * self.dtype.itemsize  # a shard's encoded chunks

    @property
    def size(self) -> int:
        return self.nbytes

    def file_count(self, labels: Sequence[str], columns: int) -> int:
        metadata = 1 if self.zarr_format == 3 else 2  # of an array: zarr.json, or .zarray and .zattrs
        of_group = 1 if self.zarr_format == 3 else 3
        return (
            len(_file_names(self.shape, self.shards, self.zarr_format)) + metadata + of_group + columns * (metadata + 1)
        )

    @staticmethod
    def read_hint(out: str) -> str:
        return f'zarr.open_group("{out}", mode="r")["data"]'

    @staticmethod
    def final_names(out: str, labels: Sequence[str]) -> tuple[str, ...]:
        return (out,)

    def create(self, folder: str) -> None:
        with files.writing(folder):
            os.makedirs(os.path.join(folder, GROUP, DATA))
            os.mkdir(os.path.join(folder, UNFINISHED))
            files.sync_folder(os.path.join(folder, GROUP))
            files.sync_folder(folder)

    def is_there(self, folder: str) -> bool:
        return os.path.isdir(os.path.join(folder, GROUP, DATA))

    def lost(self, folder: str, bounds: NDArray[np.int64], blocks: Sequence[int]) -> set[int]:
        found = set(os.listdir(os.path.join(folder, GROUP, DATA)))
        return {k for k in blocks if not {n for n, _ in self._files_of(int(bounds[k]))} <= found}

    def write(self, folder: str, start: int, block: NDArray[Any]) -> None:
        place = os.path.join(folder, GROUP, DATA)
        part = block.reshape(*self._extent(start), *block.shape[1:])
        for name, region in self._files_of(start):
            _write_whole(folder, os.path.join(place, name), self._encode(part[region]))
        with files.writing(place):
            files.sync_folder(place)

    def read_back(self, folder: str, start: int, items: int) -> NDArray[Any]:
        place = os.path.join(folder, GROUP, DATA)
        found: dict[str, bytes] = {}
        for name, _ in self._files_of(start):
            path = os.path.join(place, name)
            data = bytearray(os.path.getsize(path))
            files.read_from_disk(path, memoryview(data), 0)
            found[name] = bytes(data)
        first = [int(n) for n in np.unravel_index(start, self.grid)]
        region = tuple(slice(f, f + n) for f, n in zip(first, self._extent(start), strict=True))
        block = read_files(self._described(), self.compression, found, region)
        return block.reshape(items, *self.shape[self.grid_axes :])

    def _extent(self, start: int) -> tuple[int, ...]:
        """Items along each axis of the grid in the block that begins at an item."""
        first = np.unravel_index(start, self.grid)
        return tuple(min(t, n - int(f)) for t, n, f in zip(self.tile, self.grid, first, strict=True))

    def _files_of(self, start: int) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """The files that hold the block which begins at an item: name, and which part of the block."""
        first = np.unravel_index(start, self.grid)
        offsets = [int(f) // s for f, s in zip(first, self.shards, strict=False)]
        offsets += [0] * (len(self.shape) - len(offsets))
        for region in chunk_regions((*self._extent(start), *self.shape[self.grid_axes :]), self.shards):
            at = [o + s.start // n for o, s, n in zip(offsets, region, self.shards, strict=True)]
            yield _file_name(at, self.zarr_format), region

    def _encode(self, part: NDArray[Any]) -> list[bytes]:
        """The bytes of one file, in pieces."""
        if self.zarr_format == 2:
            return [encode_chunk(part, self.chunks, self.compression)]
        return encode_shard(part, self.chunks, self.shards, self.compression)

    def finish(self, folder: str, out: str, index: Index) -> list[tuple[str, str]]:
        group = os.path.join(folder, GROUP)
        with files.writing(group):
            self._check_files(os.path.join(group, DATA))
            for name in set(os.listdir(group)) - {
                DATA
            }:  # of a run that was killed here, or that filled what is good now
                path = os.path.join(group, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            for key, data in group_files(self._described(), self.compression, index).items():
                path = os.path.join(group, key)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                files.write_new(path, data)
            for where, _, _ in os.walk(group):
                files.sync_folder(where)
        return [(group, out)]

    def _check_files(self, place: str) -> None:
        """All of the data is there, since what is missing reads as zeros; and nothing else."""
        due = set(_file_names(self.shape, self.shards, self.zarr_format))
        found = set(os.listdir(place))
        if due - found:
            raise OSError(errno.ENOENT, f"files of the data are missing: {', '.join(sorted(due - found)[:3])}", place)
        for name in found - due:
            os.unlink(os.path.join(place, name))

    @staticmethod
    def read_record(out: str) -> dict[str, Any] | None:
        return read_record(out)

    @staticmethod
    def record_path(out: str) -> str:
        return record_path(out)

    @staticmethod
    def read_labels(out: str, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        found = {name: read_array(out, name) for name in names}
        return {name: np.array(v.tolist()) if v.dtype.kind in "TO" else v for name, v in found.items()}

    @staticmethod
    def read_region(out: str, region: tuple[slice, ...]) -> NDArray[Any]:
        return read_array(out, DATA, region)

    @staticmethod
    def natural_chunks(record: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(record["shards"])

    @staticmethod
    def read_index(out: str, names: Sequence[str]) -> dict[str, list[str]]:
        there = [name for name in names if os.path.isdir(os.path.join(out, name))]
        columns = {name: read_array(out, name).ravel().tolist() for name in there}
        return {name: [f"{v:08x}" if name == "checksum" else str(v) for v in columns[name]] for name in columns}

    @classmethod
    def is_own(cls, out: str) -> bool:
        """Its files must be those that daskstack wrote and no others, and a sample of items agree with the index."""
        record = cls.read_record(out)
        if record is None or os.path.islink(out):
            return False
        try:
            names = _file_names(tuple(record["shape"]), tuple(record["shards"]), record["zarr_format"])
            due = {*group_names(record), *(os.path.join(DATA, name) for name in names)}
            return (
                _everything_in(out) == _with_folders(due)
                and all(is_as_entered(os.path.join(out, name), entry) for name, entry in record["files"].items())
                and not has_other_attributes(out)
                and _sample_agrees(out, record)
            )
        except Exception:  # noqa: BLE001  # whatever a damaged group makes zarr raise
            return False

    @classmethod
    def own_names(cls, out: str) -> tuple[str, ...]:
        return (out,) if cls.is_own(out) else ()


def _tiles(
    shape: tuple[int, ...], itemsize: int, grid_axes: int, tiling: Tiling, version: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Chunks and shards, as asked for or chosen; in version 2 a chunk is a file by itself."""
    grid, item = shape[:grid_axes], shape[grid_axes:]
    if version == 2 and tiling.shards is not None:
        raise UsageError("shards with Zarr 2, which has none", "leave shards out; each chunk is a file")
    chunks = blocks.choose_chunks(grid, item, itemsize)
    if tiling.chunks is not None:
        chunks = blocks.fit_chunks(shape, tiling.chunks)
    shards = blocks.choose_shards(grid, item, itemsize, chunks, tiling.rows)
    if tiling.shards is not None:
        shards = blocks.fit_shards(shape, tiling.shards, chunks)
    if version == 2:
        shards = chunks if tiling.chunks is not None else blocks.fit_chunks(shape, shards)
        chunks = shards
    return chunks, shards


def _file_name(at: Sequence[int], version: int) -> str:
    """The name of the file at a place of the grid of files."""
    return ".".join(map(str, at if version == 2 else ("c", *at)))


def _file_names(shape: tuple[int, ...], shards: tuple[int, ...], version: int) -> list[str]:
    """The names of all files that hold the data."""
    grid = [range(-(-n // s)) for n, s in zip(shape, shards, strict=True)]
    return [_file_name(at, version) for at in itertools.product(*grid)]


def _sample_agrees(out: str, record: Mapping[str, Any]) -> bool:
    checksums = ZarrTarget.read_index(out, ["checksum"])["checksum"]
    grid = record["shape"][: len(record["axes"])]
    places = {k: np.unravel_index(k, grid) for k in sampled_items(len(checksums))}
    items = {k: read_array(out, DATA, tuple(slice(int(n), int(n) + 1) for n in at)) for k, at in places.items()}
    return all(f"{crc32c(np.ascontiguousarray(item)):08x}" == checksums[k] for k, item in items.items())


def _everything_in(folder: str) -> set[str]:
    """All files, folders and links below a folder."""
    return {
        os.path.relpath(os.path.join(at, name), folder)
        for at, folders, names in os.walk(folder)
        for name in (*folders, *names)
    }


def _with_folders(paths: Iterable[str]) -> set[str]:
    """Paths, and the folders that they need."""
    found = set(paths)
    for path in list(found):
        while path := os.path.dirname(path):
            found.add(path)
    return found


def _write_whole(folder: str, path: str, pieces: list[bytes]) -> None:
    """Put a file in its place at once and durably: under a name of its own first, then renamed.

    That name is outside the group, so that no late writer leaves it in a finished one.
    """
    private = os.path.join(folder, UNFINISHED, uuid.uuid4().hex)
    with files.writing(path, sum(map(len, pieces))):
        descriptor = os.open(private, files.NEW_FILE, 0o666)
        try:
            for k in range(0, len(pieces), MOST_PIECES):
                files.append_all(descriptor, pieces[k : k + MOST_PIECES])
            files.sync(descriptor)
        except BaseException:
            os.unlink(private)
            raise
        finally:
            os.close(descriptor)
        os.rename(private, path)
