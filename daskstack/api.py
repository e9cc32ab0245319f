"""What people call: open a stack, plan, build.  Thin over the rest."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from daskstack import discover, display, files, targets
from daskstack.cluster import WAIT, check_main, check_place, check_scheduler, connected
from daskstack.derived import checked
from daskstack.discover import Listing, Source
from daskstack.display import Preview
from daskstack.errors import BadFileError, BadFilesError, UsageError
from daskstack.jobs import SRUN, in_allocation, make_jobs
from daskstack.names import Labels
from daskstack.opening import as_json, open_files
from daskstack.output import Output, open_output
from daskstack.plan import StorePlan, at_least_one, make_plan
from daskstack.readers import SUFFIXES, Join, number_dtype, parts_of_files
from daskstack.reads import ADVICE_FILES
from daskstack.report import StoreReport
from daskstack.run import How, run
from daskstack.stack import FileStack
from daskstack.staging import turns
from daskstack.tasks import Storable
from daskstack.text import count, plural, printable
from daskstack.xarrays import as_dataset

if TYPE_CHECKING:
    import dask.array
    import xarray
    from distributed import Client

    from daskstack.verification import VerifyReport

OnError: TypeAlias = Literal["raise", "fill"]

QUEUE_WAIT = 600.0  # seconds for a job to come through the queue
SAMPLE_ITEMS = 200
SAMPLE_SECONDS = 2.0


@dataclass(frozen=True, repr=False, eq=False)
class Stack(FileStack):
    r"""Many files as one array, not read yet.  Made by :func:`open_stack`.

    ``shape``, ``dtype``, ``nbytes`` and ``dims`` are those of the whole array, items first; ``files`` are
    the paths in order, ``labels`` one array a label in item order.  ``stack[5]`` reads one item (of a
    grid: ``stack[2, 0]``), ``stack[::2]`` (or an array of indices, or a mask) is a stack again,
    ``stack.array`` is the lazy Dask array.

    Examples
    --------
    >>> stack = open_stack("frames", labels=r"t(?P<t>\d+)")
    >>> stack.shape, stack.labels["t"]
    ((3, 4, 5), array([ 1,  2, 10]))
    >>> stack[2].sum(), stack[::2].shape
    (np.uint64(20), (2, 4, 5))
    >>> stack.array[:, 1:3].mean().compute()
    np.float64(1.0)
    """

    def preview(self, n: int = display.SHEET_ITEMS) -> Preview:
        """A contact sheet of evenly spaced items: of each its middle plane, all in one contrast.

        Complex values show as magnitude, colours as colours, NaN in red; a bad file as a crossed box
        that says what is wrong.  Needs matplotlib (``pip install 'daskstack[notebook]'``).

        Parameters
        ----------
        n : int, optional
            How many items.

        Returns
        -------
        Preview
            A notebook shows it; ``save("sheet.png")`` writes it, ``caption`` says what it shows.

        Raises
        ------
        UsageError
            matplotlib is not installed, or ``n`` is no number of items.

        Examples
        --------
        >>> open_stack("frames").preview().caption
        '3 of 3 items, black 0, white 2 (percentiles 0.5 and 99.5 of what is shown)'
        """
        return display.sheet(self.looks, n, self.grid, self.listing.sources[0])

    def to_xarray(self) -> xarray.Dataset:
        r"""The stack as a lazy Dataset, just as xarray opens the group that :meth:`to_zarr` makes.

        Returns
        -------
        xarray.Dataset
            ``data``, lazy, along :attr:`dims`; as coordinates the labels, ``file``, ``size`` and
            ``mtime``.  What is known of a finished output alone (``checksum``, the record) is missing.

        Raises
        ------
        UsageError
            xarray is not installed (``pip install 'daskstack[xarray]'``).

        Examples
        --------
        >>> found = open_stack("frames", labels=r"t(?P<t>\d+)").to_xarray()
        >>> found.data.dims, found.t.values
        (('item', 'y', 'x'), array([ 1,  2, 10]))
        """
        return as_dataset(self)

    def plan(
        self,
        out: Source,
        *,
        threads: int | None = None,
        scheduler: str | Client | None = None,
        workers: int | None = None,
        memory_limit: float | str | None = None,
        overwrite: bool = False,
        chunks: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        compression: str | None = None,
        zarr_format: int | None = None,
        wait: float | None = None,
        cluster: str | None = None,
        **job_options: Any,
    ) -> StorePlan:
        """Decide how this stack becomes an array at ``out``; nothing is written.

        Parameters
        ----------
        out : path
            Where the array goes; its suffix (.npy or .zarr) chooses the format.
        threads : int, optional
            Blocks at work at once in this process; default: the cores it may use
            (``SLURM_CPUS_PER_TASK`` is respected), and up to four more that wait for the disk meanwhile.
        scheduler : str or distributed.Client, optional
            Which of Dask's schedulers runs the tasks: "threads", "synchronous", "processes", a Client,
            an address (``tcp://...``) or a scheduler file (``.json``).  Default: a current Client, else
            Dask's configuration, else "threads".
        workers : int, optional
            Start a cluster of so many processes on this machine (TLS, on loopback alone).
        memory_limit : int or str, optional
            Bound on the bytes held for data at once, such as "2 GB".
        overwrite : bool, optional
            Replace an output of daskstack's own, once the new one is complete.
        chunks : sequence of int, optional
            Of Zarr: shape of what is read at once, items first; -1 is a whole axis.  Default: one item,
            a large one in parts, tiny ones together.
        shards : sequence of int, optional
            Of Zarr: shape of one file, in whole chunks; a block is one shard deep.
        compression : str, optional
            Of Zarr: ``none``, ``zstd[:LEVEL]``, ``gzip[:LEVEL]`` or
            ``blosc[:COMPRESSOR[:LEVEL[:SHUFFLE]]]``; default ``blosc:zstd:1:bitshuffle``.  A checksum
            (crc32c) follows each chunk always.
        zarr_format : {3, 2}, optional
            Version of the format.  2 has no shards: a chunk is a file, by default a block; compressed by
            ``zstd:1`` where nothing else is asked for, with the checksum that zstd itself offers.
        wait : float, optional
            Seconds that a cluster's scheduler or first worker may take to be there, and that it may be without
            workers later; by default 60, of a batch system 600.
        cluster : str, optional
            Start a cluster whose workers are jobs of a batch system (``pip install 'daskstack[hpc]'``): "slurm",
            "pbs", "lsf", "sge", "oar", "moab" or "htcondor".
        **job_options
            Of those jobs: jobs (how many), cores and memory of each, walltime, queue, account, interface
            (of the network: the one that is listened on) and cluster_options (a mapping with arguments of
            dask-jobqueue's class); what is left out is as its jobqueue.yaml says.

        Returns
        -------
        StorePlan
            Frozen; print it.

        Raises
        ------
        UsageError
            An option cannot be meant.

        Examples
        --------
        >>> open_stack("frames").plan("train.npy").blocks
        3
        >>> open_stack("frames").plan("train.zarr", chunks=(2, 4, 5)).target.shards
        (2, 4, 5)
        """
        return _planned(
            self,
            out,
            threads=threads,
            scheduler=scheduler,
            workers=workers,
            memory_limit=memory_limit,
            overwrite=overwrite,
            chunks=chunks,
            shards=shards,
            compression=compression,
            zarr_format=zarr_format,
            wait=wait,
            cluster=cluster,
            **job_options,
        )

    def to_npy(
        self,
        out: Source,
        *,
        progress: bool | None = None,
        on_error: OnError = "raise",
        restart: bool = False,
        part: str | tuple[int, int] | None = None,
        **options: Any,
    ) -> StoreReport:
        """Store the stack as one .npy, its index, labels and record beside it.

        Parameters
        ----------
        out : path
            Ends in ``.npy``.
        progress : bool, optional
            Whether to show progress on stderr; by default it is shown.
        on_error : {"raise", "fill"}, optional
            What becomes of bad files: an error, once everything else is done and kept; or items that
            hold the fill value (NaN or NaT where the dtype has it, else zero), each of them on record.
        restart : bool, optional
            Throw away what an earlier run, of whatever files and options, has kept for this output.
        part : str or (int, int), optional
            "I/N", with I from 0 on: do every N-th block from the I-th on; processes that each do a part
            build one output together, and whoever completes it publishes it.
        **options
            As for :meth:`plan`.

        Returns
        -------
        StoreReport
            Print it.

        Raises
        ------
        BadFilesError
            Some files are bad: all are named, everything else is kept, nothing is published.
        OutputExistsError
            ``out`` is taken by something that may not be replaced.
        NoSpaceError, OutputError
            It cannot be written.

        Examples
        --------
        >>> report = open_stack("frames").to_npy("frames.npy", progress=False)
        >>> report.shape, np.load("frames.npy", mmap_mode="r")[2].max()
        ((3, 4, 5), np.uint16(1))
        """
        how = make_how(progress=progress, on_error=on_error, restart=restart, part=part)
        return self._to(".npy", out, how, options)

    def to_zarr(
        self,
        out: Source,
        *,
        progress: bool | None = None,
        on_error: OnError = "raise",
        restart: bool = False,
        part: str | tuple[int, int] | None = None,
        **options: Any,
    ) -> StoreReport:
        """Store the stack as a Zarr group: ``data`` and, along its items, labels, file and checksum.

        Parameters
        ----------
        out : path
            Ends in ``.zarr``.
        progress, on_error, restart, part
            As for :meth:`to_npy`.
        **options
            As for :meth:`plan`.

        Returns
        -------
        StoreReport
            Print it.

        Raises
        ------
        BadFilesError, OutputExistsError, NoSpaceError, OutputError
            As for :meth:`to_npy`.

        Examples
        --------
        >>> report = open_stack("frames").to_zarr("frames.zarr", chunks=(2, 4, 5), progress=False)
        >>> import zarr
        >>> zarr.open_group("frames.zarr", mode="r")["data"][2].max()
        np.uint16(1)
        """
        how = make_how(progress=progress, on_error=on_error, restart=restart, part=part)
        return self._to(".zarr", out, how, options)

    def _to(self, suffix: str, out: Source, how: How, options: dict[str, Any]) -> StoreReport:
        if not os.fspath(out).endswith(suffix):
            raise UsageError(
                f"the output {printable(os.fspath(out))!r} does not end in {suffix}", f"let it end in {suffix}"
            )
        return _carried_out(self.plan(out, **options), self, how, options.get("scheduler"))

    def carry_out(
        self,
        made: StorePlan,
        *,
        progress: bool | None = None,
        on_error: OnError = "raise",
        restart: bool = False,
        part: str | tuple[int, int] | None = None,
        scheduler: str | Client | None = None,
    ) -> StoreReport:
        """Carry out a plan of this stack's, on the scheduler that it was made for; a Client is handed over again."""
        chosen = make_how(progress=progress, on_error=on_error, part=part, restart=restart)
        return _carried_out(made, self, chosen, scheduler)

    def check(self, met: Sequence[BadFileError] = ()) -> None:
        """Read every file's header, on several threads.

        Parameters
        ----------
        met : sequence of BadFileError, optional
            Bad files that are known already.

        Raises
        ------
        BadFilesError
            It names every file whose header is not what is due.

        Examples
        --------
        >>> open_stack("frames").check()
        """
        bad = list({b.path: b for b in (*met, *self.misfits())}.values())
        if bad:
            verb = "is" if len(bad) == 1 else "are"
            found = f"{count(len(bad))} of {plural(len(self.files), 'file')} {verb} bad; nothing was written"
            raise BadFilesError(found, ADVICE_FILES, bad)

    def measured(self, made: StorePlan) -> tuple[StorePlan, list[BadFileError]]:
        """The plan with the speed at which a sample of the items was read, and the bad files met.

        Up to 200 items spread over the stack are read one after another, for two seconds at most.
        """
        step = -(-self.items // SAMPLE_ITEMS)
        begin = time.perf_counter()
        bad: list[BadFileError] = []
        sampled = parsed = 0
        for item in range(0, self.items, step):
            read = self.block(item, item + 1).read()
            bad += read.bad
            parsed += read.parsed
            sampled += 1
            if time.perf_counter() - begin > SAMPLE_SECONDS:
                break
        rate = sampled / max(1e-9, time.perf_counter() - begin)
        rate *= len(self.files) / self.items
        return replace(made, files_per_second=rate, sampled=sampled, parsed=parsed), bad


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
    >>> open_stack("frames/*.npy", labels={"t": r"t(\d+)", "late": "t10"}).labels
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
    >>> report = build("frames", "inputs.npy", labels={"late": "t10"}, progress=False)
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


def build_listed(
    find: Callable[[], Listing],
    opened: Callable[[Listing], Stack],
    out: Source,
    *,
    asked: Sequence[Any],
    how: How,
    **options: Any,
) -> StoreReport:
    """Build of what ``find`` lists; as a part of a build, of what another part has listed for what was asked."""
    if options.get("cluster") == SRUN:  # before anything is listed: all processes of srun come here
        return _build_in_allocation(find, opened, out, asked=asked, how=how, **options)
    scheduler = options.get("scheduler")
    if how.part is None:
        stack = opened(find())
        return _carried_out(stack.plan(out, **options), stack, how, scheduler)
    path = _checked_out(out)
    request = hashlib.sha256(json.dumps([os.getcwd(), as_json(asked), path]).encode()).hexdigest()
    with ExitStack() as turn:
        turn.enter_context(turns.turn(path))
        stack = opened(turns.adopted(path, request) or find())
        made = stack.plan(out, **options)
        own = np.concatenate([stack.file_of[a:b] for a, b in _part_of(made.bounds, how.part)] or [stack.file_of[:0]])
        stack = replace(stack, listing=stack.listing.looked_at_again(np.unique(own)))
        return _carried_out(made, stack, replace(how, request=request, turn=turn), scheduler)


def _build_in_allocation(*arguments: Any, asked: Sequence[Any], how: How, **options: Any) -> StoreReport:
    names = [name for name in inspect.signature(make_jobs).parameters if name in options]
    jobs = make_jobs(**{name: options.pop(name) for name in names})
    check_scheduler(options.pop("scheduler", None), options.pop("workers", None), jobs)
    with in_allocation(jobs) as client:  # type: ignore[arg-type]  # a cluster is named
        return build_listed(*arguments, asked=asked, how=how, scheduler=client, **options)


def _part_of(bounds: NDArray[np.int64], part: tuple[int, int]) -> list[tuple[int, int]]:
    """First item and end of each of the blocks that a part does."""
    edges = bounds.tolist()
    return list(pairwise(edges))[part[0] :: part[1]]


def _part(part: object) -> tuple[int, int] | None:
    """Which part, of how many."""
    if part is None:
        return None
    text = part if isinstance(part, str) else "/".join(map(str, part)) if isinstance(part, Sequence) else repr(part)
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise UsageError(f"part={text!r}", "write it as I/N, counted from 0: of 16 parts 0/16 to 15/16")
    return int(found[1]), int(found[2])


def make_how(
    *,
    progress: bool | None = None,
    on_error: str = "raise",
    restart: bool = False,
    part: str | tuple[int, int] | None = None,
) -> How:
    """How a plan is carried out, from what the user says."""
    if on_error not in ("raise", "fill"):
        raise UsageError(f"on_error={on_error!r}", "choose raise or fill")
    if part is not None and restart:
        raise UsageError("restart with part", "each part would throw away what the others have done")
    return How(progress=progress, fill=on_error == "fill", part=_part(part), restart=restart)


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
    >>> stack = open_stack("frames", labels={"late": "t10"})
    >>> report = store(stack.array[:, 1:] / 2, "half.npy", like=stack, progress=False)
    >>> np.load("half.npy").dtype, np.load("half.late.npy")
    (dtype('float64'), array([False, False,  True]))
    """
    work = checked(array, like, resume_key)
    made = _planned(work, out, **options)
    check_place(array, made.scheduler)
    chosen = make_how(progress=progress, restart=restart)
    return _carried_out(made, work, chosen, options.get("scheduler"))


def _checked_out(out: Source) -> str:
    """The output's absolute path; its suffix must be a known one."""
    text = os.fspath(out)
    if files.is_url(text):
        raise UsageError(f"the output {text!r} is a URL; daskstack writes files", "store on a disk, copy it then")
    targets.format_of(text)
    return files.absolute(text)


def _planned(
    work: Storable,
    out: Source,
    *,
    threads: int | None = None,
    scheduler: str | Client | None = None,
    workers: int | None = None,
    memory_limit: float | str | None = None,
    overwrite: bool = False,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    compression: str | None = None,
    zarr_format: int | None = None,
    wait: float | None = None,
    cluster: str | None = None,
    **job_options: Any,
) -> StorePlan:
    path = _checked_out(out)
    jobs = make_jobs(cluster, **job_options)
    if cluster == SRUN:
        raise UsageError("cluster=srun with a stack", "daskstack.build: one process alone is to list the files")
    if wait is not None and not wait > 0:
        raise UsageError(f"wait={wait!r}", "give seconds, above 0")
    return make_plan(
        work,
        path,
        tiling=targets.Tiling(0, _sizes("chunks", chunks), _sizes("shards", shards), compression, zarr_format),
        threads=threads,
        scheduler=check_scheduler(scheduler, workers, jobs),
        workers=workers,
        memory_limit=memory_limit,
        overwrite=overwrite,
        free=files.free_space(path),
        jobs=jobs,
        wait=wait,
    )


def _carried_out(made: StorePlan, work: Storable, how: How, scheduler: str | Client | None) -> StoreReport:
    check_main(made.scheduler)
    wait = made.wait or (WAIT if made.jobs is None else QUEUE_WAIT)

    def connect(folder: str) -> AbstractContextManager[Any]:
        return connected(made.scheduler, scheduler, made.threads, folder=folder, jobs=made.jobs, wait=wait)

    return run(made, work, replace(how, connected=connect, wait=wait))


def _sizes(option: str, sizes: Any) -> tuple[int, ...] | None:
    """Sizes along the axes, as plain integers."""
    if sizes is None:
        return None
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise UsageError(f"{option}={sizes!r}", "give a size for each axis, as in (64, 64, 64)")
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sizes):
        raise UsageError(f"{option}={sizes!r}", "give whole numbers, as in (64, 64, 64)")
    return tuple(int(n) for n in sizes)


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
    >>> report = build("frames", "all.npy", labels={"late": "t10"}, progress=False)
    >>> out = open("all.npy")
    >>> out.array[1:, 0, 0].compute(), out.labels["late"]
    (array([2, 1], dtype=uint16), array([False, False,  True]))
    """
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
    >>> report = build("frames", "v.npy", progress=False)
    >>> print(verify("v.npy", data=True, progress=False))
    structure  (3, 4, 5) uint16, 2 files beside it
    data       3 items, all as recorded
    equal: v.npy
    """
    from daskstack.verification import verified

    return verified(os.fspath(out), data=data, inputs=inputs, sample=sample, seed=seed, progress=progress)


def limited(opened: Stack, limit: int | None) -> Stack:
    """The first ``limit`` items of a stack (of a grid: at least one entry along its first axis), or all."""
    if limit is None:
        return opened
    at_least_one("limit", limit)
    return opened[: max(1, limit // math.prod(opened.grid[1:]))]  # type: ignore[no-any-return]
