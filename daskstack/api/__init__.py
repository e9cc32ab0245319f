"""What people call: open a stack, build, store, open what was made, verify it.  Thin over the rest.

It is long by what people read of each function: its options, its errors, an example.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from daskstack import discover
from daskstack.api.building import build_listed
from daskstack.api.stack import Stack
from daskstack.api.storing import OnError, carried_out, make_how, planned
from daskstack.cluster import check_place
from daskstack.discover import Listing, Source
from daskstack.errors import UsageError
from daskstack.names import Labels
from daskstack.opening import open_files
from daskstack.plan import at_least_one
from daskstack.readers import SUFFIXES, Join, number_dtype, parts_of_files
from daskstack.report import StoreReport

if TYPE_CHECKING:
    import dask.array

    from daskstack.output import Output
    from daskstack.verification import VerifyReport


def open_stack(
    sources: Source | Sequence[Source] | Listing,
    *,
    labels: Labels | None = None,
    sort_by: str | Sequence[str] | None = None,
    axes: str | Sequence[str] | None = None,
    join: Join = "stack",
    reader: Callable[[str], Any] | None = None,
    dtype: npt.DTypeLike | None = None,
    series: int | str | None = None,
    level: int | None = None,
    pages: int | slice | str | None = None,
    files_per_block: int | None = None,
) -> Stack:
    r"""List the files and read one header; no pixels yet.

    Parameters
    ----------
    sources : path or sequence of path
        A folder (with all below it), a pattern (``**`` is any number of folders) or a file: put in
        natural order, ``img_2`` before ``img_10``.  A sequence keeps its order, repeats included.
    labels : str, path, mapping or callable, optional
        One array of labels a named group of a regular expression, searched in each file's path below
        its source folder; a mapping of label to expression (or function); a function from that path
        to a mapping; or a CSV file whose first column is that path.
    sort_by : str or sequence of str, optional
        Labels to sort by, the first counting most; ties keep their order.
    axes : str or sequence of str, optional
        Labels that make a grid, the slowest first: ``("t", "c")`` gives an array (t, c, ...), each axis
        sorted, whose every position must have just one file.
    join : {"stack", "concat"}, optional
        "stack": each file is an item, along a new axis 0.  "concat": a TIFF's pages, or a .npy's
        entries along axis 0, are the items; files may differ in how many they hold, so that all
        headers are read.
    reader : callable, optional
        A function from path to NumPy array, for files that daskstack does not read itself.
    dtype : dtype, optional
        Cast all numbers to it; files may then differ in theirs.  A number that it does not hold exactly
        (300 in uint8, 0.5 in any integer) makes its file a bad one.  By default nothing is cast.
    series : int or str, optional
        Of TIFF files that hold several series of pages: which, by its number or its name.
    level : int, optional
        Of TIFF files with a pyramid: which resolution; 0, the full one, by default.
    pages : int, slice or str, optional
        Of TIFF files: which of their pages, counted from 0; a number, whose page has no axis of its own,
        or a slice, as text "0:10:2".
    files_per_block : int, optional
        Files that one delayed read takes; by default as many as make 16 MiB.

    Returns
    -------
    Stack

    Raises
    ------
    SourceError
        A name that is not there, a pattern that matches nothing, a broken link.
    LabelError
        A file's name does not give its labels, or a position of the grid has no file, or two.
    BadFilesError
        No header can be read; or, with ``join="concat"``, some cannot or differ.
    UsageError
        An option cannot be meant.

    Examples
    --------
    >>> daskstack.open_stack("frames/*.npy", labels={"t": r"t(\d+)", "late": "t10"}).labels
    {'t': array([ 1,  2, 10]), 'late': array([False, False,  True])}
    """
    at_least_one("files_per_block", files_per_block)
    return open_files(
        _listing(sources, reader),
        cls=Stack,
        labels=labels,
        sort_by=sort_by,
        axes=axes,
        join=join,
        reader=reader,
        dtype=dtype,
        files_per_block=files_per_block,
        parts=parts_of_files(series, level, pages),
    )


def build(
    sources: Source | Sequence[Source] | Listing,
    out: Source,
    *,
    labels: Labels | None = None,
    sort_by: str | Sequence[str] | None = None,
    axes: str | Sequence[str] | None = None,
    join: Join = "stack",
    reader: Callable[[str], Any] | None = None,
    dtype: npt.DTypeLike | None = None,
    series: int | str | None = None,
    level: int | None = None,
    pages: int | slice | str | None = None,
    files_per_block: int | None = None,
    limit: int | None = None,
    progress: bool | None = None,
    on_error: OnError = "raise",
    restart: bool = False,
    part: str | tuple[int, int] | None = None,
    **options: Any,
) -> StoreReport:
    """Make one array of many files: :func:`open_stack`, then :meth:`Stack.to_npy` or :meth:`Stack.to_zarr`.

    What an earlier run of the same call has kept is kept: only what is missing is read.

    Parameters
    ----------
    sources, labels, sort_by, axes, join, reader, dtype, series, level, pages, files_per_block
        As for :func:`open_stack`.
    out : path
        Where the array goes; its suffix (.npy or .zarr) chooses the format.
    limit : int, optional
        Take the first so many items only, for a trial.
    progress : bool, optional
        Whether to show progress on stderr; by default it is shown.
    on_error, restart
        As for :meth:`Stack.to_npy`.
    part : str or (int, int), optional
        As for :meth:`Stack.to_npy`; here one part lists the files, and the others adopt its list.
    **options
        As for :meth:`Stack.plan`: threads, scheduler, workers, memory_limit, overwrite, chunks, shards,
        compression, zarr_format, wait, cluster and the options of its jobs.

    Returns
    -------
    StoreReport
        Print it.

    Raises
    ------
    DaskstackError
        As for :func:`open_stack` and :meth:`Stack.to_npy`.

    Examples
    --------
    >>> report = daskstack.build("frames", "inputs.npy", labels={"late": "t10"}, progress=False)
    >>> np.load("inputs.late.npy")
    array([False, False,  True])
    """
    if isinstance(sources, Iterable) and not isinstance(sources, str | bytes):
        sources = list(sources)  # those of an array or an iterator as well, whose repr tells nothing
    chosen = {
        "labels": labels,
        "sort_by": sort_by,
        "axes": axes,
        "join": join,
        "reader": reader,
        "dtype": None if dtype is None else number_dtype(dtype),
        "series": series,
        "level": level,
        "pages": pages,
        "files_per_block": files_per_block,
    }
    return build_listed(
        lambda: _listing(sources, reader),
        lambda listing: limited(open_stack(listing, **chosen), limit),  # type: ignore[arg-type]
        out,
        asked=(sources, *chosen.values(), limit),
        how=make_how(progress=progress, on_error=on_error, part=part, restart=restart),
        **options,
    )


def store(
    array: dask.array.Array,
    out: Source,
    *,
    like: Stack | None = None,
    resume_key: str | None = None,
    progress: bool | None = None,
    restart: bool = False,
    **options: Any,
) -> StoreReport:
    """Store any Dask array, items along axis 0, each slab written as it is computed.

    Other chunkings are rechunked to slabs.  Nothing tells that two Dask arrays hold the same values, so
    that a stopped run begins anew, and an output of this name is refused unless ``overwrite`` is given;
    but for a ``resume_key``.

    Parameters
    ----------
    array : dask.array.Array
        Of plain NumPy blocks.
    out : path
        Where it goes; its suffix (.npy or .zarr) chooses the format.
    like : Stack, optional
        The stack that the array was made from, item for item; gives it labels and the names of files.
    resume_key : str, optional
        Stands for the array's values: what an earlier call with the same key and shape has stored is
        kept.  Give another whenever the values are others.
    restart : bool, optional
        Throw away what an earlier run has kept.
    progress : bool, optional
        Whether to show progress on stderr; by default it is shown.
    **options
        As for :meth:`Stack.plan`: threads, scheduler, workers, memory_limit (of daskstack's own share:
        what computing the array takes comes on top), overwrite, chunks, shards, compression, zarr_format.

    Returns
    -------
    StoreReport
        Print it.

    Raises
    ------
    UsageError
        It is no Dask array of plain NumPy blocks, its chunk sizes are unknown, it is not as long as
        ``like``, or it was persisted on a cluster and ``scheduler`` is none of its own.
    BadFilesError
        Reading for it met bad files; nothing is published.
    DaskstackError
        A block was not of the dtype or shape that the array promised.
    OutputExistsError, NoSpaceError, OutputError
        It cannot be written.

    Examples
    --------
    >>> stack = daskstack.open_stack("frames", labels={"late": "t10"})
    >>> report = daskstack.store(stack.array[:, 1:] / 2, "half.npy", like=stack, progress=False)
    >>> np.load("half.npy").dtype, np.load("half.late.npy")
    (dtype('float64'), array([False, False,  True]))
    """
    from daskstack.derived import checked

    work = checked(array, like, resume_key)
    made = planned(work, out, **options)
    check_place(array, made.scheduler)
    chosen = make_how(progress=progress, restart=restart)
    return carried_out(made, work, chosen, options.get("scheduler"))


def open(path: Source) -> Output:  # noqa: A001  # daskstack.open is what one looks for
    """Open a finished output: its array lazily, its labels, the file of each item.

    Parameters
    ----------
    path : path
        A ``.npy`` or ``.zarr`` that daskstack made.

    Returns
    -------
    Output
        With ``array`` (a lazy Dask array), ``labels``, ``files``, ``shape``, ``dtype``, ``dims`` and
        ``record``; print it to see how it was made.

    Raises
    ------
    SourceError
        It is not there, daskstack did not make it, or it was changed since.

    Examples
    --------
    >>> report = daskstack.build("frames", "all.npy", labels={"late": "t10"}, progress=False)
    >>> out = daskstack.open("all.npy")
    >>> out.array[1:, 0, 0].compute(), out.labels["late"]
    (array([2, 1], dtype=uint16), array([False, False,  True]))
    """
    from daskstack.output import open_output

    return open_output(os.fspath(path))


def verify(
    out: Source,
    *,
    data: bool = False,
    inputs: bool = False,
    sample: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> VerifyReport:
    """Compare a finished output with its record, by code that shares nothing with what wrote it.

    Its structure, sizes and metadata always; its items and its inputs where asked.

    Parameters
    ----------
    out : path
        A ``.npy`` or ``.zarr`` that daskstack made.
    data : bool, optional
        Compare each item's checksum (crc32c) with the index.
    inputs : bool, optional
        Read each item's file again with NumPy, tifffile or imagecodecs, and compare the pixels.
    sample : int, optional
        Look at so many items only, chosen at random.
    seed : int, optional
        Chooses other ones.
    progress : bool, optional
        Whether to show progress on stderr; by default it is shown.

    Returns
    -------
    VerifyReport
        Print it.  ``status`` is 0 where all is equal, 1 where something differs, 3 where something could
        not be compared; ``problems`` name items and files.

    Raises
    ------
    UsageError
        ``sample`` is no number of items.

    Examples
    --------
    >>> report = daskstack.build("frames", "v.npy", progress=False)
    >>> print(daskstack.verify("v.npy", data=True, progress=False))
    structure  (3, 4, 5) uint16, 2 files beside it
    data       3 items, all as recorded
    equal: v.npy
    """
    from daskstack.verification import verified

    return verified(os.fspath(out), data=data, inputs=inputs, sample=sample, seed=seed, progress=progress)


def _listing(sources: Source | Sequence[Source] | Listing, reader: Callable[[str], Any] | None) -> Listing:
    """The files that the sources stand for; of every kind where the user has a reader."""
    if isinstance(sources, Listing):
        return sources
    suffixes = None if reader is not None else SUFFIXES
    if isinstance(sources, str | os.PathLike):
        return discover.find([sources], suffixes=suffixes)
    if isinstance(sources, (bytes, int)) or not hasattr(sources, "__iter__"):
        raise UsageError(f"sources is {type(sources).__name__}", "give a path, or a list of paths")
    return discover.find([], in_order=list(sources), suffixes=suffixes)


def limited(opened: Stack, limit: int | None) -> Stack:
    """The first ``limit`` items of a stack (of a grid: at least one entry along its first axis), or all."""
    if limit is None:
        return opened
    at_least_one("limit", limit)
    return opened[: max(1, limit // math.prod(opened.grid[1:]))]  # type: ignore[no-any-return]
