"""Any Dask array as something to store: cut into slabs along its items, each written as it is computed."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskstack import blocks
from daskstack.discover import Listing
from daskstack.errors import BadFileError, UsageError
from daskstack.readers import dims
from daskstack.stack import FileStack
from daskstack.tasks import BlockResult, Place, as_due, store_part
from daskstack.text import count, nbytes, shape_text

if TYPE_CHECKING:
    import dask.array

NO_FILES = Listing([], [], np.empty(0, np.int64), np.empty(0, np.int64), ())


@dataclass(frozen=True, eq=False)
class DerivedArray:
    """A Dask array, its names and labels taken from a stack where one is given.

    Attributes
    ----------
    source : dask.array.Array
        The array, items first.
    like : FileStack, optional
        The stack whose items these are, one for one.
    resume_key : str, optional
        Stands for what the array holds: what was stored under it is taken as it is.
    """

    source: dask.array.Array
    like: FileStack | None
    resume_key: str | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(int(n) for n in self.source.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype, in native byte order."""
        dtype: np.dtype[Any] = self.source.dtype.newbyteorder("=")
        return dtype

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that hold the items."""
        return self.like.axes if self.like is not None else ("item",)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of all axes: those of ``like`` where there are as many."""
        if self.like is not None and len(self.like.dims) == len(self.shape):
            return self.like.dims
        own = dims(self.shape[len(self.axes) :])
        return (*self.axes, *(f"item_{name}" if name in self.axes else name for name in own))

    @property
    def item_labels(self) -> dict[str, NDArray[Any]]:
        """The labels of ``like``."""
        return self.like.item_labels if self.like is not None else {}

    @property
    def listing(self) -> Listing:
        """The files of ``like``."""
        return self.like.listing if self.like is not None else NO_FILES

    @property
    def columns(self) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """The files of the items of ``like``."""
        return self.like.columns if self.like is not None else {}

    @property
    def origin(self) -> dict[str, Any]:
        """That the array was derived, and from what."""
        origin = self.like.origin if self.like is not None else {"sources": [], "root": "", "options": {}}
        return {**origin, "derived": True, "resume_key": self.resume_key}

    @cached_property
    def content_id(self) -> str:
        """Nothing tells that two Dask arrays are one, whose names do not change when a function's code does: a key that
        the user gives, or none ever again.
        """
        items = self.like.content_id if self.like is not None else ""
        return f"derived {uuid.uuid4().hex if self.resume_key is None else self.resume_key} {items}"

    @property
    def repeatable(self) -> bool:
        """Whether a key says that another array is the same."""
        return self.resume_key is not None

    @property
    def unit(self) -> str:
        """What an item is."""
        return "item"

    @property
    def grid(self) -> tuple[int, ...]:
        """Items along each of the axes that hold them."""
        return self.shape[: len(self.axes)]

    def cut(self, most_items: int | None) -> NDArray[np.int64]:
        """Where the blocks of the array begin along its items, or of the usual size where those are too large."""
        total = math.prod(self.grid)
        item_nbytes = math.prod(self.shape[len(self.axes) :]) * self.dtype.itemsize
        usual = blocks.items_per_block(total, item_nbytes)
        most = max(1, min(most_items or total, max(usual, blocks.BLOCK_NBYTES // max(1, item_nbytes))))
        own = self._own_bounds()
        if own is not None and int(np.diff(own).max()) <= most:
            return own
        return blocks.run_bounds(self.grid, blocks.tile_of(self.grid, min(usual, most)))

    def _own_bounds(self) -> NDArray[np.int64] | None:
        """Where the array's own chunks begin along its items; None where they are not runs of a grid."""
        chunks = tuple(tuple(filter(None, c)) for c in self.source.chunks[: len(self.axes)])  # filters leave empty ones
        if len(chunks) == 1:
            return np.cumsum([0, *chunks[0]], dtype=np.int64)
        tile = tuple(c[0] for c in chunks)
        bounds = blocks.run_bounds(self.grid, tile)
        is_run = blocks.as_run(self.grid, tile, (1,) * len(tile)) == tile
        return bounds if is_run and blocks.chunks_along(self.grid, bounds) == chunks else None

    def scratch(self, bounds: NDArray[np.int64]) -> int:
        """What computing a block takes is the array's own business."""
        del bounds
        return 0

    def condemned(self) -> list[BadFileError]:
        """None: nothing is known before it is computed."""
        return []

    def report(self) -> list[tuple[str, str]]:
        """What it is, as rows of a word and a text."""
        sizes = [f"{dim} {count(n)}" for dim, n in zip(self.dims, self.shape, strict=True)]
        rows = [
            ("array", f"({', '.join(sizes)}) {self.dtype}, {nbytes(math.prod(self.shape) * self.dtype.itemsize)}"),
            ("from", "a Dask array; what computing it takes comes on top of the memory below"),
        ]
        if self.item_labels:
            rows.append(("labels", ", ".join(self.item_labels)))
        return rows

    def tasks(self, bounds: NDArray[np.int64], todo: Sequence[int], place: Place) -> tuple[dict[Any, Any], list[Any]]:
        """The array's graph, as far as it is needed, with a task behind each slab to do that stores it."""
        import dask.array as da

        axes = len(self.axes)
        chunks = (*blocks.chunks_along(self.grid, bounds), *((n,) for n in self.shape[axes:]))
        slabs = self.source
        if slabs.chunks != chunks:  # where blocks are joined, Dask casts and broadcasts without a word
            slabs = da.map_blocks(_checked_block, slabs, dtype=slabs.dtype, meta=slabs._meta)  # noqa: SLF001
            slabs = slabs.rechunk(chunks)
        starts = [np.cumsum([0, *c[:-1]]) for c in slabs.chunks[:axes]]

        def store(part: Any, block_id: tuple[int, ...]) -> BlockResult:
            at = [int(s[k]) for s, k in zip(starts, block_id, strict=False)]
            start = int(np.ravel_multi_index(at, place.target.grid))
            shape = tuple(c[k] for c, k in zip(chunks, block_id, strict=True))
            return store_part(part, shape, place, k=int(np.searchsorted(bounds, start)), start=start)

        results = da.map_blocks(
            store, slabs, dtype=object, meta=np.empty((0,) * slabs.ndim, object), chunks=(1,) * slabs.ndim
        )
        places = list(np.ndindex(*slabs.numblocks[:axes]))
        keys = [(results.name, *places[k], *((0,) * (slabs.ndim - axes))) for k in todo]
        return dict(results.__dask_optimize__(results.__dask_graph__(), keys)), keys


def _checked_block(part: Any, block_info: Any) -> NDArray[Any]:
    """A block of an array, if it is what the array states."""
    return as_due(part, block_info[None]["dtype"], tuple(block_info[None]["chunk-shape"]))


def checked(array: Any, like: FileStack | None, resume_key: str | None) -> DerivedArray:
    """The array, if it can be stored.

    Raises
    ------
    UsageError
        It is no Dask array of plain NumPy blocks, its chunk sizes are unknown, or it is not as long as ``like``.
    """
    import dask.array as da

    if not isinstance(array, da.Array):
        raise UsageError(f"{type(array).__name__} is no Dask array", "make it one: dask.array.asarray(...)")
    if not array.ndim:
        raise UsageError("an array without axes has no items", "give it an axis: array[None]")
    if any(math.isnan(n) for chunks in array.chunks for n in chunks):
        raise UsageError("the array has chunks of unknown size", "compute_chunk_sizes() finds them")
    if array.dtype.hasobject:
        raise UsageError("the array holds Python objects", "convert it to plain values: astype(...)")
    meta = array._meta  # noqa: SLF001  # Dask's word for the kind of its blocks
    if type(meta) is not np.ndarray:
        kind = f"{type(meta).__module__}.{type(meta).__qualname__}"
        raise UsageError(f"the array's blocks are of {kind}", "convert them to NumPy: map_blocks(...)")
    if not array.shape[0]:
        raise UsageError("the array holds no items", "give one with at least one")
    if like is not None and not isinstance(like, FileStack):
        raise UsageError(f"like is {type(like).__name__}", "give the stack that open_stack() made, or a part of it")
    if like is not None and array.shape[: len(like.axes)] != like.grid:
        raise UsageError(
            f"the array has shape {shape_text(array.shape)}, like has {shape_text(like.grid)} items",
            "give as like= the stack of just these items, as in like=stack[::2]",
        )
    return DerivedArray(array, like, resume_key)
