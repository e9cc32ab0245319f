"""The one task of a build: a block read or computed, checked, written durably; and what gives such tasks."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from daskstack import receipts
from daskstack.blocks import as_bytes
from daskstack.discover import Listing
from daskstack.errors import BadFileError, DaskstackError
from daskstack.files import host_name
from daskstack.reads import BlockRead
from daskstack.receipts import Receipt
from daskstack.targets import Target, crc32c
from daskstack.text import shape_text


class Storable(Protocol):
    """What can be stored block by block: the files of a stack, or any Dask array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array, items first."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype, in native byte order."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of its axes."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of those that hold the items."""

    @property
    def item_labels(self) -> dict[str, NDArray[Any]]:
        """Labels, one value an item."""

    @property
    def listing(self) -> Listing:
        """The files that the items come from, as far as they are known."""

    @property
    def columns(self) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """What the index says of each item's file, as far as known: ``file``, ``page``, ``size``, ``mtime``."""

    @property
    def origin(self) -> dict[str, Any]:
        """Where the items come from, for the record."""

    @property
    def content_id(self) -> str:
        """A hash of what decides the values."""

    @property
    def repeatable(self) -> bool:
        """Whether it has that hash again when the same is asked for in another run."""

    @property
    def unit(self) -> str:
        """What an item is, for messages: a file, or an item of several in a file."""

    def cut(self, most_items: int | None) -> NDArray[np.int64]:
        """Bounds of blocks of the usual size, and of ``most_items`` at most."""

    def scratch(self, bounds: NDArray[np.int64]) -> int:
        """Bytes that reading a block takes beside it."""

    def condemned(self) -> list[BadFileError]:
        """Bad files that can be told before anything is read."""

    def report(self) -> list[tuple[str, str]]:
        """What it is, as rows of a word and a text."""

    def tasks(self, bounds: NDArray[np.int64], todo: Sequence[int], place: Place) -> tuple[dict[Any, Any], list[Any]]:
        """A Dask graph and, for each of the blocks to do, the key of the task that stores it."""


@dataclass(frozen=True)
class Place:
    """Where blocks go, and how; small, so that it can travel.

    Attributes
    ----------
    target : Target
        Puts them there.
    folder : str
        The folder in the staging folder where the target and the receipts are.
    plan_id : str
        The plan's, for receipts.
    fill : bool
        Whether items of bad files are filled; else their block is not written.
    readers : int
        How many of a process's threads read at once; the others write.
    """

    target: Target
    folder: str
    plan_id: str
    fill: bool = False
    readers: int = 1

    def __dask_tokenize__(self) -> tuple[str, str, bool]:
        """What Dask tells places apart by; it would pickle all fields for each task, and the plan decides the rest."""
        return self.folder, self.plan_id, self.fill


@dataclass(frozen=True)
class BlockResult:
    """What a task gives back: the receipt of its block, its bad files, or why it failed; how many of its files a
    library had to parse.
    """

    block: int
    receipt: Receipt | None = None
    bad: tuple[BadFileError, ...] = ()
    error: Exception | None = None
    parsed: int = 0


def store_block(k: int, read: BlockRead, place: Place, start: int) -> BlockResult:
    """Read a block, check it, write it durably, leave its receipt.

    Local schedulers stop at the first exception, so that every failure is a value.
    """
    try:
        with _readers(place.readers):
            array, bad, parsed = read.read()
            if bad and not place.fill:
                return BlockResult(k, bad=tuple(bad), parsed=parsed)
            filled = read.fill(array, bad)
            sizes, mtimes = read.item_stamps()
            receipt = Receipt(k, checksums_of(array), sizes, mtimes, filled)
        return replace(_stored(array, receipt, place, start), parsed=parsed)
    except Exception as exc:  # noqa: BLE001  # raised again where the results are gathered
        return BlockResult(k, error=exc)


def store_part(part: Any, shape: tuple[int, ...], place: Place, *, k: int, start: int) -> BlockResult:
    """The same for a block that Dask has computed; it must be what its array promised.

    Dask believes what it is told of a block's type, dtype and shape, and stores what comes.
    """
    try:
        target = place.target
        block = np.ascontiguousarray(as_due(part, target.dtype, shape), dtype=target.dtype)
        axes = target.grid_axes
        block = block.reshape(math.prod(shape[:axes]), *shape[axes:])
        return _stored(block, Receipt(k, checksums_of(block)), place, start)
    except Exception as exc:  # noqa: BLE001  # raised again where the results are gathered
        return BlockResult(k, error=exc)


def as_due(part: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A computed block as a plain array; refused if it is not what is due."""
    if not isinstance(part, np.ndarray) or isinstance(part, np.ma.MaskedArray):
        raise DaskstackError(f"a block of the array is a {type(part).__name__}, due an ndarray", "mend the array")
    if part.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        raise DaskstackError(f"a block of the array is {part.dtype}, due {dtype}", "mend its dtype, or astype")
    if part.shape != shape:
        raise DaskstackError(
            f"a block of the array has shape {shape_text(part.shape)}, due {shape_text(shape)}",
            "mend the shape that it states",
        )
    return np.asarray(part)


@cache
def _readers(number: int) -> threading.BoundedSemaphore:
    """So many threads of this process read at once: more of them than cores only wait for the interpreter's lock."""
    return threading.BoundedSemaphore(number)


def _stored(block: NDArray[Any], receipt: Receipt, place: Place, start: int) -> BlockResult:
    place.target.write(place.folder, start, block)
    receipts.add(place.folder, place.plan_id, receipt)
    return BlockResult(receipt.block, receipt)


def differs(place: Place, receipt: Receipt, start: int) -> str:
    """What is wrong with a block as it is read back, by whichever host; nothing where it is as its receipt says."""
    try:
        found = checksums_of(place.target.read_back(place.folder, start, len(receipt.checksums)))
    except Exception as exc:  # noqa: BLE001  # what decoders raise is many
        return f"block {receipt.block}, written by {receipt.host}, cannot be read by {host_name()}: {exc}"
    if found != receipt.checksums:
        return f"block {receipt.block}, written by {receipt.host}, has other bytes when {host_name()} reads it"
    return ""


def checksums_of(block: NDArray[Any]) -> array[int]:
    """The checksum of each item of a block."""
    return array("I", [crc32c(item) for item in as_bytes(block).reshape(len(block), -1)])
