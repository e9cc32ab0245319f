"""The output as a Zarr v3 group: ``data`` in shards that are written whole, and the coordinates of its items.

Shards are assembled by :mod:`daskstack.targets.shard`; zarr-python makes the metadata and the small
arrays, which are written last, so that nothing takes an unfinished group for an array.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from daskstack import blocks, files
from daskstack.errors import UsageError
from daskstack.targets.base import (
    Grid,
    Index,
    Target,
    crc32c,
    file_entry,
    is_as_entered,
    record_checksum,
    sampled_items,
)
from daskstack.targets.shard import Compression, chunk_regions, encode_shard, parse_compression
from daskstack.text import nbytes

GROUP = "data.zarr"
DATA = "data"
ROOT = "zarr.json"
MOST_RECORD_BYTES = 64 << 20
MOST_CHUNK_NBYTES = 2**31 - 1 - 16  # what Blosc takes, its own header included
MOST_PIECES = 512  # of one writev(2); the kernel takes 1,024


@dataclass(frozen=True)
class ZarrTarget(Target):
    """Writes blocks of items as whole shards.

    Parameters
    ----------
    chunks, shards : tuple of int
        Shape of an inner chunk and of a shard; a block is one shard deep.
    dims : tuple of str
        Names of the axes, that of the items first.
    compression : Compression
        How chunks are compressed.
    """

    chunks: tuple[int, ...]
    shards: tuple[int, ...]
    dims: tuple[str, ...]
    compression: Compression

    suffix: ClassVar[str] = ".zarr"

    @classmethod
    def make(cls, shape: tuple[int, ...], dtype: np.dtype[Any], dims: tuple[str, ...], grid: Grid) -> Self:
        compression = parse_compression(grid.compression)
        chunks = blocks.choose_chunks(shape, dtype.itemsize)
        if grid.chunks is not None:
            chunks = blocks.fit_chunks(shape, grid.chunks)
        chunk_nbytes = math.prod(chunks) * dtype.itemsize
        if chunk_nbytes > MOST_CHUNK_NBYTES:
            raise UsageError(f"one chunk of {chunks} takes {nbytes(chunk_nbytes)}; codecs take 2 GiB", "smaller chunks")
        shards = blocks.choose_shards(shape, dtype.itemsize, chunks, grid.rows)
        if grid.shards is not None:
            shards = blocks.fit_shards(shape, grid.shards, chunks)
        made = cls(shape, dtype, chunks, shards, dims, compression)
        made.check_dtype()
        return made

    def check_dtype(self) -> None:
        """Refuse what zarr-python has no metadata for, before anything is read.

        Raises
        ------
        UsageError
            It has none.
        """
        import zarr
        from zarr.storage import MemoryStore

        if self.dtype.names is not None:
            raise UsageError("Zarr 3 has no specification for records", "let the output end in .npy")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._create_data(zarr.create_group(store=MemoryStore()), [])
        except Exception as exc:
            raise UsageError(f"Zarr cannot hold {self.dtype}: {exc}", "let the output end in .npy") from exc

    @property
    def reserved(self) -> tuple[str, ...]:
        return self.dims

    @property
    def options(self) -> dict[str, Any]:
        return {
            "format": "zarr",
            "zarr_format": 3,
            "chunks": list(self.chunks),
            "shards": list(self.shards),
            "compression": str(self.compression),
        }

    @property
    def step(self) -> int | None:
        return self.shards[0]

    @property
    def scratch(self) -> int:
        return math.prod(self.shards) * self.dtype.itemsize  # a shard's encoded chunks

    @property
    def size(self) -> int:
        return self.nbytes

    def file_count(self, labels: Sequence[str]) -> int:
        return len(self.shard_names()) + 2 + 2 * (4 + len(labels))

    def shard_names(self) -> list[str]:
        """The names of all files that hold the data."""
        grid = [range(-(-n // s)) for n, s in zip(self.shape, self.shards, strict=True)]
        return [".".join(map(str, ("c", *at))) for at in itertools.product(*grid)]

    @staticmethod
    def read_hint(out: str) -> str:
        return f'zarr.open_group("{out}", mode="r")["data"]'

    @staticmethod
    def final_names(out: str, labels: Sequence[str]) -> tuple[str, ...]:
        return (out,)

    def create(self, folder: str) -> None:
        with files.writing(folder):
            os.makedirs(os.path.join(folder, GROUP, DATA))
            files.sync_folder(os.path.join(folder, GROUP))
            files.sync_folder(folder)

    def renew(self, folder: str) -> None:
        os.makedirs(os.path.join(folder, GROUP, DATA), exist_ok=True)

    def write(self, folder: str, start: int, block: NDArray[Any]) -> None:
        place = os.path.join(folder, GROUP, DATA)
        for region in chunk_regions(block.shape, self.shards):
            pieces = encode_shard(block[region], self.chunks, self.shards, self.compression)
            first = start // self.shards[0]
            at = [s.start // n for s, n in zip(region, self.shards, strict=True)]
            _write_whole(os.path.join(place, ".".join(map(str, ("c", first + at[0], *at[1:])))), pieces)
        with files.writing(place):
            files.sync_folder(place)

    def finish(self, folder: str, out: str, index: Index) -> list[tuple[str, str]]:
        group = os.path.join(folder, GROUP)
        with files.writing(group):
            self._check_shards(os.path.join(group, DATA))
            for key, data in self._small_files(index).items():
                path = os.path.join(group, key)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if os.path.lexists(path):  # of a run that was killed here
                    os.unlink(path)
                files.write_new(path, data)
            for where, _, _ in os.walk(group):
                files.sync_folder(where)
        return [(group, out)]

    def _check_shards(self, place: str) -> None:
        """Every shard is there, since one that is missing reads as zeros; what else is there was never finished."""
        due = set(self.shard_names())
        found = set(os.listdir(place))
        if due - found:
            raise OSError(errno.ENOENT, f"shards are missing: {', '.join(sorted(due - found)[:3])}", place)
        for name in found - due:
            os.unlink(os.path.join(place, name))

    def _small_files(self, index: Index) -> dict[str, bytes]:
        """Every file of the group but for the data's shards; the group's own zarr.json last."""
        import zarr
        from zarr.storage import MemoryStore

        store = MemoryStore()
        with warnings.catch_warnings():
            # Of texts and times in Zarr 3, and of consolidated metadata: that the specification is young.
            warnings.simplefilter("ignore")
            group = zarr.create_group(store=store)
            columns = {"file": np.array(index.files), **index.labels}
            columns |= {"size": index.sizes, "mtime": index.mtimes, "checksum": index.checksums}
            if index.pages is not None:
                columns["page"] = index.pages
            for name, values in columns.items():
                column = values.astype(np.dtypes.StringDType()) if values.dtype.kind == "U" else values
                group.create_array(name, data=column, dimension_names=self.dims[:1], chunks=(len(column),))
            self._create_data(group, list(columns))
            record = {**index.record, "files": _listed(_contents(store))}
            group.attrs.update({"daskstack": record, "crc32c": record_checksum(record)})
            zarr.consolidate_metadata(store)
        contents = _contents(store)
        return {key: contents[key] for key in sorted(contents, key=lambda key: key == ROOT)}

    def _create_data(self, group: Any, coordinates: list[str]) -> None:
        from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

        made = {"blosc": BloscCodec, "gzip": GzipCodec, "zstd": ZstdCodec}
        codec = self.compression.codec(self.dtype.itemsize)
        codecs: list[Any] = [made[codec["name"]](**codec["configuration"])] if codec else []
        group.create_array(
            DATA,
            shape=self.shape,
            dtype=self.dtype.newbyteorder("<") if self.dtype.itemsize > 1 else self.dtype,
            chunks=self.chunks,
            shards=self.shards,
            compressors=[*codecs, Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=self.dims,
            attributes={"coordinates": " ".join(coordinates)},
        )

    @staticmethod
    def read_record(out: str) -> dict[str, Any] | None:
        try:
            text = json.loads(files.read_regular(ZarrTarget.record_path(out), MOST_RECORD_BYTES))["attributes"]
            record: dict[str, Any] = text["daskstack"]
            return record if text["crc32c"] == record_checksum(record) else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    @staticmethod
    def record_path(out: str) -> str:
        return os.path.join(out, ROOT)

    @staticmethod
    def read_labels(out: str, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        found = {name: _read(out, name) for name in names}
        return {name: np.array(v.tolist()) if v.dtype.kind == "T" else v for name, v in found.items()}

    @staticmethod
    def read_region(out: str, region: tuple[slice, ...]) -> NDArray[Any]:
        return _read(out, DATA, region)

    @staticmethod
    def natural_chunks(record: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(record["shards"])

    @staticmethod
    def read_index(out: str) -> dict[str, list[str]]:
        columns = {name: _read(out, name).tolist() for name in sorted(os.listdir(out)) if name not in (DATA, ROOT)}
        columns["checksum"] = [f"{c:08x}" for c in columns["checksum"]]
        return {name: [str(v) for v in values] for name, values in columns.items()}

    @classmethod
    def is_own(cls, out: str) -> bool:
        """Its files must be those that daskstack wrote and no others, and a sample of items agree with the index."""
        record = cls.read_record(out)
        if record is None or os.path.islink(out):
            return False
        try:
            grid = tuple(record["shape"]), np.dtype("u1"), tuple(record["chunks"]), tuple(record["shards"])
            shards = {os.path.join(DATA, name) for name in cls(*grid, (), Compression()).shard_names()}
            return (
                _everything_in(out) == _with_folders({ROOT, *record["files"], *shards})
                and all(is_as_entered(os.path.join(out, name), entry) for name, entry in record["files"].items())
                and cls._sample_agrees(out)
            )
        except Exception:  # noqa: BLE001  # whatever a damaged group makes zarr raise
            return False

    @classmethod
    def _sample_agrees(cls, out: str) -> bool:
        checksums = cls.read_index(out)["checksum"]
        return all(
            f"{crc32c(np.ascontiguousarray(_read(out, DATA, (slice(k, k + 1),)))):08x}" == checksums[k]
            for k in sampled_items(len(checksums))
        )

    @classmethod
    def own_names(cls, out: str) -> tuple[str, ...]:
        return (out,) if cls.is_own(out) else ()


def _read(out: str, name: str, region: tuple[slice, ...] = ()) -> NDArray[Any]:
    """A part of an array of the group; an array is opened by itself, without what zarr warns of groups."""
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that dates and texts are new to the specification
        array: Any = zarr.open_array(os.path.join(out, name), mode="r")
        return np.asarray(array[region or ...])


def _contents(store: Any) -> dict[str, bytes]:
    return {key: value.to_bytes() for key, value in store._store_dict.items()}  # noqa: SLF001


def _listed(contents: Mapping[str, bytes]) -> dict[str, dict[str, int]]:
    return {key: file_entry(data) for key, data in contents.items() if key != ROOT}


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


def _write_whole(path: str, pieces: list[bytes]) -> None:
    """Put a file in its place at once and durably: under a name of its own first, then renamed."""
    private = f"{path}.{uuid.uuid4().hex}"
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
