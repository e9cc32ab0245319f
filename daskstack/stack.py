"""The ordered files as one array: which items they give, the block a task reads, the lazy Dask array.

It is one class, and long by what there is to know of a stack; what people call is in the Stack of the API.
"""

from __future__ import annotations

import functools
import hashlib
import os
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from daskstack import blocks
from daskstack.discover import Listing
from daskstack.errors import BadFileError
from daskstack.names import LabelArrays
from daskstack.readers import FunctionReader, Header, Layout, Reader, check
from daskstack.reads import BlockRead, in_threads, load_block, packed_stamps
from daskstack.targets import along_axes
from daskstack.tasks import Place, store_block
from daskstack.text import count, listed, nbytes, printable

if TYPE_CHECKING:
    import dask.array


MOST_SOURCES = 20


@dataclass(frozen=True, eq=False, repr=False)
class FileStack:
    """Ordered files whose items make one array; see :class:`daskstack.Stack` for what people use.

    Attributes
    ----------
    listing : Listing
        The files, in order.
    reader : Reader
        What reads them.
    header : Header
        Shape and dtype of one item.
    header_from : str
        The file that gave the header.
    header_size : int
        Its length in bytes.
    file_rows : array of int64, shape (files,)
        How many items each file holds.
    file_of, row_of : array of int64, shape (items,)
        The file of each item, and which of its items it is.
    item_labels : dict of str to array, each of shape (items,)
        Labels, in item order.
    axes : tuple of str
        Names of the axes that hold the items: ``item``, or labels that make a grid.
    grid : tuple of int
        Items along each of them.
    files_per_block : int, optional
        Files a block, where the user chose.
    layout : Layout, optional
        How the file that gave the header is laid out, where others like it can be read without a library.
    options : dict
        How it was opened, for the record.
    """

    listing: Listing
    reader: Reader
    header: Header
    header_from: str
    header_size: int
    file_rows: NDArray[np.int64]
    file_of: NDArray[np.int64]
    row_of: NDArray[np.int64]
    item_labels: LabelArrays
    axes: tuple[str, ...]
    grid: tuple[int, ...]
    files_per_block: int | None
    layout: Layout | None
    options: dict[str, Any]

    def __len__(self) -> int:
        return self.grid[0]

    @property
    def items(self) -> int:
        """How many items there are."""
        return len(self.file_of)

    @property
    def files(self) -> tuple[str, ...]:
        """The files' paths, in order."""
        return tuple(self.listing.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array, items first."""
        return (*self.grid, *self.header.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of every item, in native byte order."""
        return self.header.dtype

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return self.items * self.header.item_nbytes

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes, those of the items first."""
        return (*self.axes, *self.header.dims)

    @property
    def labels(self) -> LabelArrays:
        """One array a label in the shape of the items; the label of a grid's axis along that axis alone."""
        return {name: along_axes(name, v, self.axes, self.grid)[1] for name, v in self.item_labels.items()}

    @property
    def unit(self) -> str:
        """What an item is, for messages."""
        return "file" if self.items == len(self.files) else "item"

    @cached_property
    def columns(self) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """What the index says of each item's file."""
        names, file_of = self.names, self.file_of
        columns: dict[str, Sequence[Any] | NDArray[Any]] = {"file": [names[k] for k in file_of.tolist()]}
        if self.reader.join == "concat":
            columns["page"] = self.row_of
        return {**columns, "size": self.listing.sizes[file_of], "mtime": self.listing.mtimes[file_of]}

    @property
    def origin(self) -> dict[str, Any]:
        """Where the items come from, for the record."""
        sources = list(self.listing.sources[:MOST_SOURCES])  # there may be a name for each file; the index has those
        if len(self.listing.sources) > MOST_SOURCES:
            sources.append(f"{count(len(self.listing.sources) - MOST_SOURCES)} more")
        return {"sources": sources, "root": self.root, "join": self.reader.join, "options": self.options}

    @cached_property
    def root(self) -> str:
        """The folder below which all files lie."""
        return _root(self.listing)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The files' paths below :attr:`root`, in order; what the index holds."""
        return names_of(self.listing)

    def __getitem__(self, key: Any) -> Any:
        """One item as a NumPy array (one file is read), or for a slice or an array of indices a stack.

        Of a grid, a number alone is one entry along its first axis, all its items.
        """
        places = np.arange(self.items).reshape(self.grid)
        place = key if isinstance(key, tuple) else (key,)
        if all(isinstance(k, int | np.integer) and not isinstance(k, bool) for k in place):
            if len(place) > len(self.grid):
                raise IndexError(f"a stack is indexed along {', '.join(self.axes)} alone; slice .array for the rest")
            for k, n in zip(place, self.grid, strict=False):
                if not -n <= k < n:
                    raise IndexError(f"item {k} of a stack of {n}")
            items = places[place]
            return load_block(self._subset(items.ravel(), (items.size,)).block(0, items.size), items.shape)
        if isinstance(key, tuple):
            raise IndexError(f"a stack is sliced along {self.axes[0]} alone; slice .array for the rest")
        entries = np.arange(len(self))[key]
        if entries.ndim != 1:
            raise IndexError(f"{key!r} is no index of a stack: give a number, a slice, or a list of numbers or a mask")
        if not len(entries):
            raise IndexError(f"no item is left of {len(self)}")
        return self._subset(places[entries].ravel(), (len(entries), *self.grid[1:]))

    def _subset(self, items: NDArray[np.int64], grid: tuple[int, ...]) -> Self:
        """The stack of these items: only their files, in the order in which they are first met."""
        used, file_of = _renumbered(self.file_of[items])
        return replace(
            self,
            listing=self.listing.take(used),
            file_rows=self.file_rows[used],
            file_of=file_of,
            row_of=self.row_of[items],
            item_labels={name: values[items] for name, values in self.item_labels.items()},
            axes=self.axes[: len(grid)],
            grid=grid,
            options={**self.options, "items": f"{len(items)} of {self.items}"},
        )

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Where blocks begin and end: items ``bounds[k]`` to ``bounds[k + 1]`` are block ``k``."""
        return self.cut(None)

    def cut(self, most_items: int | None) -> NDArray[np.int64]:
        """Bounds for blocks of the usual size (or as ``files_per_block`` says), of ``most_items`` at most."""
        if len(self.grid) > 1:
            usual = blocks.items_per_block(self.items, self.header.item_nbytes)
            items = self.files_per_block or min(usual, most_items or usual)
            return blocks.run_bounds(self.grid, blocks.tile_of(self.grid, items))
        runs = np.flatnonzero(np.diff(self.file_of, prepend=-1))  # where another file begins
        rows = np.diff(np.append(runs, self.items))
        if self.files_per_block:
            ends = np.append(runs[self.files_per_block :: self.files_per_block], self.items)
            return np.insert(ends, 0, 0).astype(np.int64)
        limit = max(1, most_items or self.items)
        items = min(limit, blocks.items_per_block(self.items, self.header.item_nbytes))
        if self.layout is not None:  # a part of a file costs no more than its bytes
            return blocks.cut(rows, items, items)
        whole_files = max(items, blocks.BLOCK_NBYTES // max(1, self.header.item_nbytes))
        return blocks.cut(rows, items, min(limit, whole_files))

    def scratch(self, bounds: NDArray[np.int64]) -> int:
        """Bytes that reading a file may take beside its place in the block."""
        rows = int(self.file_rows.max())
        if not isinstance(self.reader, FunctionReader):
            rows = min(rows, int(np.diff(bounds).max()))  # a function gives the whole file always
        return self.reader.scratch(rows, self.header, int(self.listing.sizes.max()))

    def block(self, start: int, stop: int) -> BlockRead:
        """What reads the items from ``start`` to ``stop``."""
        file_of, row_of = self.file_of[start:stop], self.row_of[start:stop]
        begins = np.flatnonzero((np.diff(file_of, prepend=-1) != 0) | (np.diff(row_of, prepend=-1) != 1))
        used = file_of[begins]
        pieces = None
        if self.reader.join == "concat":
            lengths = np.diff(np.append(begins, stop - start))
            pieces = np.stack([self.file_rows[used], row_of[begins], row_of[begins] + lengths], axis=1)
        else:
            used = file_of
        packed = zlib.compress(b"\0".join(os.fsencode(self.listing.paths[k]) for k in used), 1)
        stamps = packed_stamps(self.listing.sizes[used], self.listing.mtimes[used])
        due = replace(self.header, rows=1)
        return BlockRead(self.reader, packed, pieces, due, stop - start, stamps, self.layout)

    def misfits(self) -> list[BadFileError]:
        """The files whose headers, all of them read, show them to be bad."""
        return [e for e in in_threads(self._header_error, self.listing.paths, self.file_rows.tolist()) if e is not None]

    def condemned(self) -> list[BadFileError]:
        """The files that their size alone shows to be bad; where it makes one suspect, its header is read."""
        if self.reader.join == "concat":  # all headers were read when it was opened
            return []
        sizes = self.listing.sizes
        suspects = sizes == 0
        if self.reader.alike_in_size:
            suspects |= sizes != self.header_size
        paths = [self.listing.paths[k] for k in np.flatnonzero(suspects)]
        rows = self.file_rows[suspects]
        return [e for e in in_threads(self._header_error, paths, rows.tolist()) if e is not None]

    def _header_error(self, path: str, rows: int) -> BadFileError | None:
        try:
            check(path, self.reader.probe(path), replace(self.header, rows=rows))
        except BadFileError as exc:
            return exc
        return None

    @cached_property
    def content_id(self) -> str:
        """A hash of what decides the pixels: files in order, their items, shape, dtype and reader."""
        h = hashlib.sha256()
        h.update(b"\0".join(map(os.fsencode, self.listing.paths)))
        for part in (self.file_of, self.row_of, self.file_rows):
            h.update(b"\0" + part.tobytes())
        h.update(repr((self.header.shape, np.lib.format.dtype_to_descr(self.dtype))).encode())
        h.update(self.reader.identity() or uuid.uuid4().bytes)
        return h.hexdigest()

    @property
    def repeatable(self) -> bool:
        """Whether the same files, opened again with the same reader, are known to be the same."""
        return self.reader.identity() is not None

    @cached_property
    def token(self) -> str:
        """A hash that changes, too, when a file's size or time does: the name of the Dask array."""
        h = hashlib.sha256(self.content_id.encode())
        h.update(self.listing.sizes.tobytes() + self.listing.mtimes.tobytes() + self.bounds.tobytes())
        h.update(repr(self.grid).encode())
        return h.hexdigest()[:32]

    @cached_property
    def array(self) -> dask.array.Array:
        """The stack as a lazy Dask array: one delayed read a block, wrapped with ``da.from_delayed``.

        Returns
        -------
        dask.array.Array, shape (*grid, *item shape)
            In one layer, since a layer for each read makes the graph's optimisation quadratic.
        """
        import dask.array as da
        from dask.delayed import delayed
        from dask.highlevelgraph import HighLevelGraph

        name = f"daskstack-{self.token}"
        chunks = blocks.chunks_along(self.grid, self.bounds)
        graph: dict[Any, Any] = {}
        for k, at in enumerate(np.ndindex(*map(len, chunks))):
            extent = tuple(c[n] for c, n in zip(chunks, at, strict=True))
            read = functools.partial(load_block, self.block(*self.bounds[k : k + 2].tolist()), extent)
            piece = da.from_delayed(
                delayed(read)(dask_key_name=f"read-{name}-{k}"),
                shape=(*extent, *self.header.shape),
                dtype=self.dtype,
                name=f"{name}-{k}",
            )
            key = (name, *at, *((0,) * len(self.header.shape)))
            graph[key] = _only_task(piece, key)
        along_item = tuple((n,) for n in self.header.shape)
        flat = HighLevelGraph.from_collections(name, graph)
        array: dask.array.Array = da.Array(flat, name, (*chunks, *along_item), dtype=self.dtype)
        return array

    def tasks(self, bounds: NDArray[np.int64], todo: Sequence[int], place: Place) -> tuple[dict[Any, Any], list[Any]]:
        """A graph of one task a block to do, and their keys."""
        from dask.task_spec import Task

        run = uuid.uuid4().hex  # a cluster takes one key for one computation, whatever became of a file meanwhile
        most = len(bounds)
        # Dask runs tasks that depend on none from the last key to the first: the first block gets the last one.
        keys = {k: f"store-{run}-{most - k:0{len(str(most))}}" for k in todo}
        edges = bounds.tolist()
        graph = {
            key: Task(key, store_block, k, self.block(edges[k], edges[k + 1]), place, edges[k])
            for k, key in keys.items()
        }
        return graph, list(keys.values())

    def report(self) -> list[tuple[str, str]]:
        """What the stack is, as rows of a word and a text."""
        where = listed([printable(s) for s in self.listing.sources], 1)
        files = f"{count(len(self.files))} in {where} ({nbytes(int(self.listing.sizes.sum()))})"
        if self.listing.left_out:
            files += f"; left out: {_some(self.listing.left_out)}"
        order = "natural" if self.listing.natural else "as given"
        sorted_by = self.axes if self.axes != ("item",) else self.options.get("sort_by")
        if sorted_by:
            order = f"by {sorted_by if isinstance(sorted_by, str) else ', '.join(sorted_by)}"
        sizes = [f"{dim} {count(n)}" for dim, n in zip(self.dims, self.shape, strict=True)]
        origin = printable(os.path.basename(self.header_from))
        rows = [
            ("files", files),
            ("order", f"{order}: {listed(self.names)}"),
            ("array", f"({', '.join(sizes)}) {self.dtype}, {nbytes(self.nbytes)}; item from {origin}"),
        ]
        if self.item_labels:
            rows.append(("labels", "; ".join(f"{n} ({_span(v)})" for n, v in self.item_labels.items())))
        return rows


def _root(listing: Listing) -> str:
    """The folder below which all source folders lie."""
    return os.path.commonpath({p[: len(p) - len(b)] for p, b in zip(listing.paths, listing.below, strict=True)})


def names_of(listing: Listing) -> tuple[str, ...]:
    """The files' paths below the folder that all source folders share."""
    start = len(_root(listing).rstrip("/")) + 1
    pairs = zip(listing.paths, listing.below, strict=True)
    return tuple(below if len(path) - len(below) == start else path[start:] for path, below in pairs)


def _renumbered(file_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The files that occur, in the order in which they first do, and each item's place among them."""
    unique, first, inverse = np.unique(file_of, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return unique[order], rank[inverse]


def _only_task(piece: dask.array.Array, key: tuple[Any, ...]) -> Any:
    """The delayed read behind a piece, under another key."""
    from dask.task_spec import Task

    task = next(t for t in piece.__dask_graph__().values() if isinstance(t, Task))
    return Task(key, task.func, *task.args)


def _some(names: Sequence[str]) -> str:
    """A few names; how many they are and the first two, where they are many."""
    if len(names) <= 2:
        return ", ".join(map(printable, names))
    return f"{count(len(names))} ({', '.join(map(printable, names[:2]))} ...)"


def _span(values: NDArray[Any]) -> str:
    """What a label holds, in a few characters."""
    if values.dtype.kind == "b":
        return f"{count(int(values.sum()))} true"
    if values.dtype.kind in "iuf":
        return f"{values.min()} to {values.max()}"
    unique = list(dict.fromkeys(str(v) for v in values))
    return listed(unique, 2)
