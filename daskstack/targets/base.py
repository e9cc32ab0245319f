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
    files : sequence of str
        The file each item came from, below the root folder that ``record`` gives.
    pages : array of int64, shape (items,), optional
        The page (or entry along axis 0) of that file, where files are joined.
    labels : mapping of str to array, each of shape (items,)
        The labels.
    sizes, mtimes : array of int64, shape (items,)
        The file's bytes and its time, in nanoseconds since 1970.
    checksums : array of uint32, shape (items,)
        crc32c of the item's bytes in C order and native byte order.
    record : mapping
        How the output was made; becomes JSON.
    """

    files: Sequence[str]
    pages: NDArray[np.int64] | None
    labels: Mapping[str, NDArray[Any]]
    sizes: NDArray[np.int64]
    mtimes: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """How people want an array cut up on disk; None where they leave it to the target.

    Attributes
    ----------
    rows : int
        Items that a block usually takes.
    chunks, shards : tuple of int, optional
        Shape of what is read at once, and of one file; -1 is the whole axis.
    compression : str, optional
        As :func:`daskstack.targets.shard.parse_compression` reads it.
    """

    rows: int
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compression: str | None = None


@dataclass(frozen=True)
class Target(ABC):
    """One output array; frozen and picklable, so that tasks can carry it.

    Parameters
    ----------
    shape : tuple of int
        Of the whole array, items along axis 0.
    dtype : numpy.dtype
        In native byte order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    suffix: ClassVar[str]

    @classmethod
    @abstractmethod
    def make(cls, shape: tuple[int, ...], dtype: np.dtype[Any], dims: tuple[str, ...], grid: Grid) -> Self:
        """The target for an array, its grid decided or refused.

        Raises
        ------
        UsageError
            The format cannot hold the array, or not in the grid that is asked for.
        """

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def reserved(self) -> tuple[str, ...]:
        """Names that no label may have, since the format has another use for them."""
        return ()

    @property
    def step(self) -> int | None:
        """How many items each block must hold (the last may hold fewer); None where blocks may begin anywhere."""
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
    def file_count(self, labels: Sequence[str]) -> int:
        """How many files the finished output has."""

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
    def renew(self, folder: str) -> None:
        """Make the target of a run that was killed as it was when it was new; what blocks it has does not matter."""

    @abstractmethod
    def write(self, folder: str, start: int, block: NDArray[Any]) -> None:
        """Put a block of items at ``start``, durable on return; any number of times, by any process."""

    @staticmethod
    @abstractmethod
    def read_record(out: str) -> dict[str, Any] | None:
        """How an output that is there was made; None where daskstack did not make it."""

    @staticmethod
    @abstractmethod
    def read_index(out: str) -> dict[str, list[str]]:
        """The index of a finished output, column by column, as text."""

    @staticmethod
    @abstractmethod
    def record_path(out: str) -> str:
        """The file that holds the record of an output."""

    @staticmethod
    @abstractmethod
    def read_labels(out: str, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """The labels of a finished output."""

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
