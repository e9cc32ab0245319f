"""A finished output as it lies on disk: what is wrong with it, its items, its record and the files beside it."""

from __future__ import annotations

import json
import math
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from daskstack.text import printable


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


def read_file(path: str) -> bytes:
    """All of a regular file; a pipe would hang, and a link may lead anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as f:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        return f.read()


def read_record(text: Mapping[str, Any], name: str, problems: list[Problem]) -> dict[str, Any] | None:
    """The record in some JSON; None where its own checksum tells that it was changed."""
    record: dict[str, Any] = text["daskstack"]
    checksum = f"{google_crc32c.value(json.dumps(record, sort_keys=True).encode()):08x}"
    if checksum != text["crc32c"]:
        problems.append(Problem("the record was changed: its checksum differs", None, name))
        return None
    return record


def compare_entries(folder: str, entries: Mapping[str, Mapping[str, int]], problems: list[Problem]) -> None:
    """The small files of an output beside the sizes and checksums in its record."""
    for name, entry in entries.items():
        try:
            data = read_file(os.path.join(folder, name))
        except (OSError, ValueError) as exc:
            problems.append(Problem(f"cannot be read: {exc}", None, name))
            continue
        if (len(data), google_crc32c.value(data)) != (entry["bytes"], entry["crc32c"]):
            problems.append(Problem("is not as recorded: its size or checksum differs", None, name))


def described_dtype(record: Mapping[str, Any]) -> np.dtype[Any]:
    """The dtype that a record describes, as NumPy does in the header of a .npy."""

    def described(descr: Any) -> Any:
        if not isinstance(descr, list):
            return descr
        return [tuple(tuple(p) if k == 2 else described(p) for k, p in enumerate(f)) for f in descr]

    return np.lib.format.descr_to_dtype(described(record["dtype"]))
