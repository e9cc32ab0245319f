"""A finished output read back: its array lazily, its labels, the file of each item."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskstack import display, pictures
from daskstack.display import Preview
from daskstack.errors import SourceError
from daskstack.files import absolute
from daskstack.pictures import Look
from daskstack.targets import SUFFIXES, Target, format_of
from daskstack.text import count, listed, nbytes, printable, shape_text, shown, table

if TYPE_CHECKING:
    import dask.array

MOST_NAMES = 1_000_000


@dataclass(frozen=True, eq=False, repr=False)
class Output:
    """An output of daskstack's.  Made by :func:`daskstack.open`.

    Attributes
    ----------
    path : str
        Where it lies.
    record : dict
        How it was made.
    """

    path: str
    record: dict[str, Any]

    @property
    def _format(self) -> type[Target]:
        return format_of(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, items along axis 0."""
        return tuple(self.record["shape"])

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return self._format.read_region(self.path, tuple(slice(0, 0) for _ in self.shape)).dtype

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of its axes."""
        return tuple(self.record["dims"])

    @cached_property
    def labels(self) -> dict[str, NDArray[Any]]:
        """One NumPy array a label, in the shape of the items; the label of a grid's axis along that axis alone."""
        return self._format.read_labels(self.path, self.record["labels"])

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The path of the file that each item came from, in item order; none where that is not known."""
        names = self._format.read_index(self.path, ["file"]).get("file", [])
        return tuple(os.path.join(self.record["root"], name) for name in names)

    @cached_property
    def array(self) -> dask.array.Array:
        """The array, lazily; each task opens the file by its path, so that any worker can."""
        import dask.array as da
        from dask.highlevelgraph import HighLevelGraph
        from dask.task_spec import Task

        chunks = self._format.natural_chunks(self.record)
        found = os.stat(self._format.record_path(self.path))
        name = f"daskstack-open-{self.record['plan_id']}-{found.st_ino}-{found.st_mtime_ns}"
        edges = [list(range(0, n, c)) or [0] for n, c in zip(self.shape, chunks, strict=True)]
        graph: dict[Any, Any] = {}
        for at in itertools.product(*(range(len(e)) for e in edges)):
            starts = [e[k] for e, k in zip(edges, at, strict=True)]
            region = tuple(slice(s, min(s + c, n)) for s, c, n in zip(starts, chunks, self.shape, strict=True))
            graph[(name, *at)] = Task((name, *at), self._format.read_region, self.path, region)
        sizes = tuple(tuple(min(s + c, n) - s for s in e) for e, c, n in zip(edges, chunks, self.shape, strict=True))
        array: dask.array.Array = da.Array(HighLevelGraph.from_collections(name, graph), name, sizes, dtype=self.dtype)
        return array

    def _origin(self) -> str:
        sources, root = self.record["sources"], self.record["root"]
        text = f"{listed(sources)}, below {shown(root)}" if sources else ""
        return f"a Dask array{', items like ' if text else ''}{text}" if "derived" in self.record else text

    def __len__(self) -> int:
        return self.shape[0]

    def looks(self, most: int, side: int, most_nbytes: float = math.inf) -> Iterator[Look]:
        """Pictures of evenly spaced items, as of a stack; of each the middle plane alone is read."""
        axes = len(self.record["axes"])
        grid, item, dims = self.shape[:axes], self.shape[axes:], self.dims[axes:]
        kept = pictures.plane_ndim(item, dims)
        inside = [slice(n // 2, n // 2 + 1) for n in item[: len(item) - kept]] + [slice(None)] * kept
        names = self._names()
        for k in pictures.spaced(math.prod(grid), most):
            at = tuple(int(n) for n in np.unravel_index(k, grid))
            region = (*(slice(n, n + 1) for n in at), *inside)
            about = {name: values[self._place(name, at)] for name, values in self.labels.items()}
            read = functools.partial(self._plane, region, item[len(item) - kept :], most_nbytes)
            yield pictures.look(names[k] if names else f"item {k}", pictures.labelled(about), dims, side, read)

    def _names(self) -> list[str]:
        """The files' names, item for item, where there are few enough to be read for a picture."""
        items = math.prod(self.shape[: len(self.record["axes"])])
        return self._format.read_index(self.path, ["file"]).get("file", []) if items <= MOST_NAMES else []

    def _place(self, label: str, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where a label holds the value of an item."""
        axes = self.record["axes"]
        return (at[axes.index(label)],) if label in axes else at

    def _plane(self, region: tuple[slice, ...], shape: tuple[int, ...], most_nbytes: float) -> NDArray[Any] | None:
        """A region as the plane it is; None where what must be read for it, in whole chunks, is too much."""
        chunks = self.record.get("chunks", [1] * len(self.shape))
        bounds = zip((r.indices(n) for r, n in zip(region, self.shape, strict=True)), chunks, strict=True)
        touched = math.prod((-(-stop // c) - start // c) * c for (start, stop, _), c in bounds)
        if touched * self.dtype.itemsize > most_nbytes:
            return None
        return self._format.read_region(self.path, region).reshape(shape)

    def preview(self, n: int = 16) -> Preview:
        """A contact sheet of evenly spaced items; see :meth:`daskstack.Stack.preview`.

        Parameters
        ----------
        n : int, optional
            How many items.

        Raises
        ------
        UsageError
            matplotlib is not installed, or ``n`` is no number of items.

        Examples
        --------
        >>> report = daskstack.build("frames", "seen.npy", progress=False)
        >>> daskstack.open("seen.npy").preview(2).caption
        '2 of 3 items, black 0, white 1 (percentiles 0.5 and 99.5 of what is shown)'
        """
        return display.sheet(self.looks, n, self.shape[: len(self.record["axes"])], shown(self.path))

    def as_dict(self) -> dict[str, Any]:
        """What it is and how it was made, for JSON."""
        return {"out": self.path, **self.record}

    def _repr_html_(self) -> str:
        return display.html(self._card, f"daskstack.Output {shown(self.path)}")

    def _card(self) -> str:
        looks = list(self.looks(display.THUMBNAILS, display.SIDE, display.MOST_NBYTES))
        chunks = ("chunks", f"{shape_text(self._format.natural_chunks(self.record))} in Dask")
        title = f"daskstack.Output {shape_text(self.shape)} {self.dtype}"
        items = math.prod(self.shape[: len(self.record["axes"])])
        return display.card(title, [*self.rows(), chunks], looks, items)

    def rows(self) -> list[tuple[str, str]]:
        """What it is and how it was made, as a word and a text."""
        sizes = [f"{dim} {count(n)}" for dim, n in zip(self.dims, self.shape, strict=True)]
        options = self.record["options"]
        return [
            ("array", f"({', '.join(sizes)}) {self.dtype}, {nbytes(self.record['nbytes'])} in {shown(self.path)}"),
            ("from", self._origin()),
            ("labels", ", ".join(self.record["labels"]) or "none"),
            ("options", ", ".join(f"{name} {printable(str(value))}" for name, value in options.items()) or "none"),
            ("made", f"{self.record['created']} by daskstack {self.record['version']}; plan {self.record['plan_id']}"),
        ]

    def __repr__(self) -> str:
        return f"<daskstack.Output {shape_text(self.shape)} {self.dtype}>\n{table(self.rows())}"


def is_output(path: str) -> bool:
    """Whether something is an output that daskstack made and nobody changed since, by a quick look."""
    return path.endswith(SUFFIXES) and format_of(path).is_own(absolute(path))


def open_output(path: str) -> Output:
    """Open a finished output.

    Raises
    ------
    SourceError
        It is not there, daskstack did not make it, or it was changed since.
    """
    full = absolute(path)
    if not os.path.lexists(full):
        raise SourceError(f"no such file or folder: {path!r}", "check the name")
    record = format_of(full).read_record(full) if full.endswith(SUFFIXES) else None
    if record is None or not is_output(full):
        raise SourceError(
            f"{shown(full)} was not made by daskstack, or was changed since",
            "open it with np.load or zarr, or as a source with open_stack",
        )
    return Output(full, record)
