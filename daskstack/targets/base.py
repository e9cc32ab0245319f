"""What every target is: created poisoned, written block by block by tasks that know only its folder, finished once."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from daskstack import files
from daskstack.blocks import as_bytes

SAMPLED_ITEMS = 16


@dataclass(frozen=True)
class Index:
    """What is known of each item, in item order.

    Attributes
    ----------
    axes : tuple of str
        Names of the axes that hold the items: ``("item",)``, or those of a grid.
    grid : tuple of int
        Items along each of them.
    columns : mapping of str to sequence, each of (items,)
        ``file`` (below the root folder that ``record`` gives), ``page`` of that file where files are
        joined, its ``size`` in bytes and ``mtime`` in nanoseconds since 1970, as far as they are known;
        ``checksum``: crc32c of the item's bytes in C order and native byte order; and where some items
        hold the fill value, ``filled``: what was wrong with their files, else nothing.
    labels : mapping of str to array, each of shape (items,)
        The labels.
    record : mapping
        How the output was made; becomes JSON.
    """

    axes: tuple[str, ...]
    grid: tuple[int, ...]
    columns: Mapping[str, Sequence[Any] | NDArray[Any]]
    labels: Mapping[str, NDArray[Any]]
    record: Mapping[str, Any]

    def label(self, name: str) -> tuple[tuple[str, ...], NDArray[Any]]:
        """The axes of a label and its array: the label of a grid's axis has that axis alone."""
        return along_axes(name, self.labels[name], self.axes, self.grid)


def along_axes(
    name: str, values: NDArray[Any], axes: tuple[str, ...], grid: tuple[int, ...]
) -> tuple[tuple[str, ...], NDArray[Any]]:
    """A label's values, one an item, in the shape of the grid; the label of an axis along that axis alone.

    Examples
    --------
    >>> along_axes("c", np.array([5, 6, 5, 6]), ("t", "c"), (2, 2))
    (('c',), array([5, 6]))
    >>> along_axes("kind", np.array([1, 2, 3, 4]), ("t", "c"), (2, 2))[1].tolist()
    [[1, 2], [3, 4]]
    """
    shaped = values.reshape(grid)
    if name not in axes:
        return axes, shaped
    axis = axes.index(name)
    return (name,), shaped[tuple(slice(None) if k == axis else 0 for k in range(len(grid)))]


@dataclass(frozen=True)
class Tiling:
    """How people want an array cut up on disk; None where they leave it to the target.

    Attributes
    ----------
    rows : int
        Items that a block usually takes.
    chunks, shards : tuple of int, optional
        Shape of what is read at once, and of one file; -1 is the whole axis.
    compression : str, optional
        As :func:`daskstack.targets.shard.parse_compression` reads it.
    zarr_format : int, optional
        Version of the format, where there are several.
    """

    rows: int
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compression: str | None = None
    zarr_format: int | None = None


@dataclass(frozen=True)
class Target(ABC):
    """One output array; frozen and picklable, so that tasks can carry it.

    Parameters
    ----------
    shape : tuple of int
        Of the whole array, items first.
    dtype : numpy.dtype
        In native byte order.
    grid_axes : int
        How many of its axes hold the items.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    grid_axes: int

    suffix: ClassVar[str]

    @classmethod
    @abstractmethod
    def make(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], dims: tuple[str, ...], grid_axes: int, tiling: Tiling
    ) -> Self:
        """The target for an array, its tiling decided or refused.

        Raises
        ------
        UsageError
            The format cannot hold the array, or not in the tiling that is asked for.
        """

    @property
    def grid(self) -> tuple[int, ...]:
        """Items along each of the axes that hold them."""
        return self.shape[: self.grid_axes]

    @property
    def items(self) -> int:
        """How many items there are."""
        return math.prod(self.grid)

    @property
    def item_nbytes(self) -> int:
        """Size of one item in bytes."""
        return math.prod(self.shape[self.grid_axes :]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def reserved(self) -> tuple[str, ...]:
        """Names that no label may have, since the format has another use for them."""
        return ()

    @property
    def tile(self) -> tuple[int, ...] | None:
        """The part of the grid that each block must hold (at the far edge less); None where any run of items does."""
        return None

    @property
    def scratch(self) -> int:
        """Bytes that writing a block takes beside it."""
        return 0

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of the finished output on disk before compression, its side files apart."""

    @abstractmethod
    def file_count(self, labels: Sequence[str], columns: int) -> int:
        """How many files the finished output has, its index having so many columns, labels included."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What decides the bytes on disk, for the plan id and the record."""

    @staticmethod
    @abstractmethod
    def read_hint(out: str) -> str:
        """How the finished output is opened with nothing of daskstack installed."""

    @staticmethod
    @abstractmethod
    def final_names(out: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Every path that the finished output takes, the array last."""

    @abstractmethod
    def create(self, folder: str) -> None:
        """Make the target in a new folder, its room taken, unreadable until it is finished."""

    @abstractmethod
    def is_there(self, folder: str) -> bool:
        """Whether the target that was made in a folder is in it still."""

    def is_written(self, folder: str) -> bool:
        """Whether a task of an earlier run, stopped on its way, holds the target open still and may write yet."""
        del folder  # a format whose files are renamed into place leaves nothing open
        return False

    def lost(self, folder: str, bounds: NDArray[np.int64], blocks: Sequence[int]) -> set[int]:
        """Those of the blocks, all of them written, that are not in the folder any more."""
        del folder, bounds, blocks  # a format in one file loses none
        return set()

    @abstractmethod
    def write(self, folder: str, start: int, block: NDArray[Any]) -> None:
        """Put a block, shape (items, *item shape), at item ``start``, durable on return; any number of times, by any
        process.
        """

    @abstractmethod
    def read_back(self, folder: str, start: int, items: int) -> NDArray[Any]:
        """The block that was written at item ``start``, of the type of the array, from the disk and not from what this
        host remembers of it.
        """

    @staticmethod
    @abstractmethod
    def read_record(out: str) -> dict[str, Any] | None:
        """How an output that is there was made; None where daskstack did not make it."""

    @staticmethod
    @abstractmethod
    def read_index(out: str, names: Sequence[str]) -> dict[str, list[str]]:
        """Columns of the index of a finished output, as text, in item order; those that it has."""

    @staticmethod
    @abstractmethod
    def record_path(out: str) -> str:
        """The file that holds the record of an output."""

    @staticmethod
    @abstractmethod
    def read_labels(out: str, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The labels of a finished output, in the shape of its grid."""

    @staticmethod
    @abstractmethod
    def read_region(out: str, region: tuple[slice, ...]) -> NDArray[Any]:
        """A part of the finished array."""

    @staticmethod
    @abstractmethod
    def natural_chunks(record: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape of the parts in which a finished array is best read."""

    @classmethod
    @abstractmethod
    def is_own(cls, out: str) -> bool:
        """Whether ``out`` is one that daskstack finished and nobody changed, by a quick look."""

    @classmethod
    @abstractmethod
    def own_names(cls, out: str) -> tuple[str, ...]:
        """Every path beside ``out`` that daskstack made and nobody changed since, the array first if it is there."""

    @abstractmethod
    def finish(self, folder: str, out: str, index: Index) -> list[tuple[str, str]]:
        """Complete the target in its folder; what to rename to what, the array last."""


def crc32c(data: bytes | NDArray[Any]) -> int:
    """The checksum (RFC 3720, as Zarr uses it) of bytes, or of a C-contiguous array's bytes."""
    return int(google_crc32c.value(data if isinstance(data, bytes) else as_bytes(data)))


def record_checksum(record: Mapping[str, Any]) -> str:
    """A record's checksum, kept beside it: who edits a record makes it one of their own."""
    return f"{crc32c(json.dumps(record, sort_keys=True).encode()):08x}"


def sampled_items(items: int) -> list[int]:
    """Which items a quick look compares: the first, the last, and some evenly between."""
    return sorted({k * (items - 1) // (SAMPLED_ITEMS - 1) for k in range(SAMPLED_ITEMS)}) if items else []


def file_entry(data: bytes) -> dict[str, int]:
    """A file's entry in a record."""
    return {"bytes": len(data), "crc32c": crc32c(data)}


def is_as_entered(path: str, entry: Mapping[str, int]) -> bool:
    """Whether a file is the one that a record's entry describes."""
    try:
        return file_entry(files.read_regular(path, entry["bytes"])) == entry
    except OSError:
        return False
