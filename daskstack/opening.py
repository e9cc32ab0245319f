"""From listed files to a stack: one reader for all, one header (or all of them), labels."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from daskstack import blocks
from daskstack.discover import Listing, collector_paused
from daskstack.errors import BadFileError, BadFilesError, UsageError
from daskstack.names import LabelArrays, Labels, read_labels
from daskstack.readers import Header, Join, Layout, Reader, check, choose
from daskstack.reads import ADVICE_FILES, in_threads
from daskstack.sorting import grid_order, sort_order
from daskstack.stack import FileStack, names_of
from daskstack.text import count, listed, plural, printable, shown

S = TypeVar("S", bound=FileStack)


@collector_paused()
def open_files(
    listing: Listing,
    *,
    cls: type[S],
    labels: Labels | None,
    sort_by: str | Sequence[str] | None,
    axes: str | Sequence[str] | None,
    join: Join,
    reader: Callable[[str], Any] | None,
    dtype: npt.DTypeLike | None,
    files_per_block: int | None,
    parts: Mapping[str, Any],
) -> S:
    """The stack of the listed files: one header is read, or all of them where files are joined.

    ``parts`` says what part of each file is read, as :func:`daskstack.readers.parts_of_files` gives it.

    Raises
    ------
    BadFilesError
        No file has a header that can be read; where files are joined: any has none, or another shape.
    LabelError
        A file's name does not give its labels, or a position of the grid has no file, or two.
    UsageError
        The files are of several formats, or an option makes no sense.
    """
    reads = _one_reader(listing, join, reader, dtype, parts)
    arrays = read_labels(listing.below, labels, () if labels is None else names_of(listing))
    along = _axes(axes, arrays, join, sort_by)
    order, grid = _order(listing, arrays, sort_by, along)
    if order is not None:
        listing = listing.take(order)
        arrays = {name: values[order] for name, values in arrays.items()}
    header, header_from = _first_header(reads, listing.paths)
    _check_names(along, header.dims)
    file_rows = _rows(reads, listing, header)
    file_of = np.repeat(np.arange(len(listing.paths)), file_rows)
    if not len(file_of):
        raise UsageError(f"the {plural(len(listing.paths), 'file')} hold no items", "name other files")
    if len(grid) > 1:
        _check_files_per_block(files_per_block, grid)
    return cls(
        listing=listing if join == "stack" else replace(listing, rows=file_rows),
        reader=reads,
        header=header,
        header_from=header_from,
        header_size=int(listing.sizes[listing.paths.index(header_from)]),
        file_rows=file_rows,
        file_of=file_of,
        row_of=np.arange(len(file_of)) - (np.cumsum(file_rows) - file_rows)[file_of],
        item_labels={name: values[file_of] for name, values in arrays.items()},
        axes=along or ("item",),
        grid=grid or (len(file_of),),
        files_per_block=files_per_block,
        layout=_layout(reads, header_from),
        options=_options(
            labels=labels,
            sort_by=sort_by,
            axes=along or None,
            reader=reader,
            dtype=reads.dtype,
            files_per_block=files_per_block,
            **parts,
        ),
    )


def _axes(axes: object, arrays: LabelArrays, join: Join, sort_by: object) -> tuple[str, ...]:
    """The labels that are axes, the slowest first; none where the items are along one axis."""
    if axes is None:
        return ()
    if not isinstance(axes, str | Iterable):
        raise UsageError(f"axes={axes!r}", 'give labels, as in ("t", "c")')
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_axes(names, arrays, join, sort_by)
    return names


def _order(
    listing: Listing, arrays: LabelArrays, sort_by: str | Sequence[str] | None, axes: Sequence[str]
) -> tuple[NDArray[np.int64] | None, tuple[int, ...]]:
    """The order that the labels give the files, and the shape of the grid; none where they are as they were listed."""
    if axes:
        return grid_order(arrays, axes, [printable(name) for name in listing.below])
    return (None if sort_by is None else sort_order(arrays, sort_by)), ()


def _rows(reader: Reader, listing: Listing, header: Header) -> NDArray[np.int64]:
    """How many items each file holds; where files are joined, all headers tell, unless they were read before."""
    if reader.join == "stack":
        return np.ones(len(listing.paths), dtype=np.int64)
    return _all_rows(reader, listing.paths, header) if listing.rows is None else listing.rows


def _check_axes(axes: tuple[str, ...], arrays: LabelArrays, join: Join, sort_by: object) -> None:
    """Refuse axes that are no labels, and what cannot go with a grid."""
    for name in axes:
        if name not in arrays:
            raise UsageError(
                f"axes={','.join(map(str, axes))}: there is no label {name!r}",
                f"choose from: {', '.join(arrays) or 'none (give labels)'}",
            )
    if not axes or len(set(axes)) < len(axes):
        raise UsageError(f"axes={','.join(axes)!r}", "name each axis once")
    if join == "concat":
        raise UsageError("axes with join='concat'", "leave join out: the pages of a file become an axis of its own")
    if sort_by is not None:
        raise UsageError("axes and sort_by are both given", "leave sort_by out: axes are sorted")


def _check_names(axes: Sequence[str], dims: Sequence[str]) -> None:
    for name in axes:
        if name in dims:
            raise UsageError(
                f"axis {name!r} has the name of an axis of each file ({', '.join(dims)})", "choose another name"
            )


def _check_files_per_block(files_per_block: int | None, grid: tuple[int, ...]) -> None:
    """A block of a grid is a rectangle of it that is one run of files."""
    if files_per_block is None:
        return
    near = math.prod(blocks.tile_of(grid, files_per_block))
    if near != min(files_per_block, math.prod(grid)):
        raise UsageError(
            f"files_per_block={files_per_block} gives no rectangles of the grid {grid}", f"the next below: {near}"
        )


def _options(**given: Any) -> dict[str, Any]:
    """The options that were given, as JSON can hold them."""
    return {name: as_json(value) for name, value in given.items() if value is not None}


def as_json(value: Any) -> Any:
    """What was given as JSON can hold it, the same in every process: functions by their names."""
    if isinstance(value, Mapping):
        return {str(name): as_json(v) for name, v in value.items()}
    if isinstance(value, str | int | os.PathLike):
        return os.fspath(value) if isinstance(value, os.PathLike) else value
    return [as_json(v) for v in value] if isinstance(value, Sequence) else getattr(value, "__qualname__", repr(value))


def _layout(reader: Reader, path: str) -> Layout | None:
    """How a file is laid out; None where that cannot be told, and every file is read by its library."""
    try:
        return reader.layout(path)
    except Exception:  # noqa: BLE001  # a header so odd that only the library copes
        return None


def _one_reader(
    listing: Listing,
    join: Join,
    function: Callable[[str], Any] | None,
    dtype: npt.DTypeLike | None,
    parts: Mapping[str, Any],
) -> Reader:
    """The reader of all files; files of several formats are hardly meant."""
    if function is not None and not callable(function):
        raise UsageError(f"reader is {type(function).__name__}", "give a function from path to array")
    first = choose(listing.paths[0], join, function, dtype, **parts)
    others = [p for p in listing.paths if not p.lower().endswith(first.suffixes)]
    if function is None and others:
        raise UsageError(
            f"{count(len(others))} of {plural(len(listing.paths), 'file')} have another suffix than "
            f"{shown(listing.paths[0])}: {listed([os.path.basename(p) for p in others])}",
            "choose one kind by a pattern, as in 'frames/*.tif'",
        )
    return first


def _first_header(reader: Reader, paths: Sequence[str]) -> tuple[Header, str]:
    """The header of the first file that has one; those before it are met again, and reported, when they are read."""
    bad: list[BadFileError] = []
    for path in paths:
        try:
            return reader.probe(path), path
        except BadFileError as exc:
            bad.append(exc)
    found = f"none of {count(len(paths))} files can be read" if len(paths) > 1 else "the file cannot be read"
    raise BadFilesError(found, ADVICE_FILES, bad)


def _all_rows(reader: Reader, paths: Sequence[str], due: Header) -> NDArray[np.int64]:
    """How many items each file holds, from all headers, read on several threads."""

    def rows(path: str) -> int | BadFileError:
        try:
            found = reader.probe(path)
            check(path, found, replace(due, rows=found.rows))
        except BadFileError as exc:
            return exc
        return found.rows

    results = in_threads(rows, paths)
    bad = [r for r in results if isinstance(r, BadFileError)]
    if bad:
        message = f"{count(len(bad))} of {plural(len(paths), 'file')} cannot be joined; nothing was written"
        raise BadFilesError(message, ADVICE_FILES, bad)
    return np.array(results, dtype=np.int64)
