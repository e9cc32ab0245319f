"""A finished output read back: its array lazily, its labels, the file of each item."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import SourceError
from daskstack.files import absolute
from daskstack.targets import SUFFIXES, Target, format_of
from daskstack.text import count, listed, nbytes, printable, shape_text, shown, table

if TYPE_CHECKING:
    import dask.array


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
        text = f"{listed(sources)}, below {printable(root)}" if sources else ""
        return f"a Dask array{', items like ' if text else ''}{text}" if "derived" in self.record else text

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        sizes = [f"{dim} {count(n)}" for dim, n in zip(self.dims, self.shape, strict=True)]
        options = self.record["options"]
        rows = [
            ("array", f"({', '.join(sizes)}) {self.dtype}, {nbytes(self.record['nbytes'])} in {shown(self.path)}"),
            ("from", self._origin()),
            ("labels", ", ".join(self.record["labels"]) or "none"),
            ("options", ", ".join(f"{name} {printable(str(value))}" for name, value in options.items()) or "none"),
            ("made", f"{self.record['created']} by daskstack {self.record['version']}; plan {self.record['plan_id']}"),
        ]
        return f"<daskstack.Output {shape_text(self.shape)} {self.dtype}>\n{table(rows)}"


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
