"""The stack that people use: what it shows of itself, its plan, its way to disk.

It is long by what people read of each method: its options, its errors, an example.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskstack import blocks
from daskstack.api.storing import OnError, carried_out, make_how, planned
from daskstack.discover import Source
from daskstack.errors import BadFileError, BadFilesError, UsageError
from daskstack.plan import StorePlan
from daskstack.reads import ADVICE_FILES
from daskstack.report import StoreReport
from daskstack.run import How
from daskstack.stack import FileStack
from daskstack.text import count, plural, printable, shape_text, table

if TYPE_CHECKING:
    import xarray
    from distributed import Client

    from daskstack.display import Preview
    from daskstack.pictures import Look

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
    >>> stack = daskstack.open_stack("frames", labels=r"t(?P<t>\d+)")
    >>> stack.shape, stack.labels["t"]
    ((3, 4, 5), array([ 1,  2, 10]))
    >>> stack[2].sum(), stack[::2].shape
    (np.uint64(20), (2, 4, 5))
    >>> stack.array[:, 1:3].mean().compute()
    np.float64(1.0)
    """

    def preview(self, n: int = 16) -> Preview:
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
        >>> daskstack.open_stack("frames").preview().caption
        '3 of 3 items, black 0, white 2 (percentiles 0.5 and 99.5 of what is shown)'
        """
        from daskstack import display

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
        >>> found = daskstack.open_stack("frames", labels=r"t(?P<t>\d+)").to_xarray()
        >>> found.data.dims, found.t.values
        (('item', 'y', 'x'), array([ 1,  2, 10]))
        """
        from daskstack.xarrays import as_dataset

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
            ``blosc[:COMPRESSOR[:LEVEL[:SHUFFLE]]]``; default ``blosc:lz4:1:bitshuffle``.  A checksum
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
        >>> daskstack.open_stack("frames").plan("train.npy").blocks
        3
        >>> daskstack.open_stack("frames").plan("train.zarr", chunks=(2, 4, 5)).target.shards
        (2, 4, 5)
        """
        return planned(
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
        >>> report = daskstack.open_stack("frames").to_npy("frames.npy", progress=False)
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
        >>> report = daskstack.open_stack("frames").to_zarr("frames.zarr", chunks=(2, 4, 5), progress=False)
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
        return carried_out(self.plan(out, **options), self, how, options.get("scheduler"))

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
        """Carry out a plan that :meth:`plan` has made of this stack.

        Parameters
        ----------
        made : StorePlan
            The plan.
        progress, on_error, restart, part
            As for :meth:`to_npy`.
        scheduler : distributed.Client, optional
            The Client for which the plan was made, where it was made for one; all else is in the plan.

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
        >>> stack = daskstack.open_stack("frames")
        >>> stack.carry_out(stack.plan("planned.npy"), progress=False).shape
        (3, 4, 5)
        """
        chosen = make_how(progress=progress, on_error=on_error, part=part, restart=restart)
        return carried_out(made, self, chosen, scheduler)

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
        >>> daskstack.open_stack("frames").check()
        """
        bad = list({b.path: b for b in (*met, *self.misfits())}.values())
        if bad:
            verb = "is" if len(bad) == 1 else "are"
            found = f"{count(len(bad))} of {plural(len(self.files), 'file')} {verb} bad; nothing was written"
            raise BadFilesError(found, ADVICE_FILES, bad)

    def measured(self, made: StorePlan) -> tuple[StorePlan, list[BadFileError]]:
        """The plan with the speed at which a sample of the items was read, and the bad files met.

        Up to 200 items spread over the stack are read one after another, for two seconds at most.

        Parameters
        ----------
        made : StorePlan
            A plan of this stack.

        Returns
        -------
        StorePlan
            The same with ``files_per_second``, ``sampled`` and ``parsed``.
        list of BadFileError
            The bad files among those that were read.

        Examples
        --------
        >>> stack = daskstack.open_stack("frames")
        >>> measured, bad = stack.measured(stack.plan("train.npy"))
        >>> measured.sampled, bad
        (3, [])
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

    def looks(self, most: int, side: int, most_nbytes: float = math.inf) -> Iterator[Look]:
        """Pictures of evenly spaced items, ``side`` pixels long; of each the middle plane alone is read.

        Parameters
        ----------
        most : int
            How many items.
        side : int
            Pixels along the longer side of a picture.
        most_nbytes : float, optional
            Planes that take more bytes are not read.
        """
        from daskstack import pictures

        for item in pictures.spaced(self.items, most):
            file, row = int(self.file_of[item]), int(self.row_of[item])
            page = f" {row}" if self.reader.join == "concat" else ""
            about = pictures.labelled({name: values[item] for name, values in self.item_labels.items()})
            due = replace(self.header, rows=int(self.file_rows[file]))
            read = functools.partial(self.reader.plane, self.listing.paths[file], due, row, most_nbytes)
            yield pictures.look(self.names[file] + page, about, self.header.dims, side, read)

    def as_dict(self) -> dict[str, Any]:
        """What the stack is, for JSON."""
        return {
            "files": len(self.files),
            "first": self.names[0],
            "last": self.names[-1],
            "order": "natural" if self.listing.natural else "as given",
            "left_out": list(self.listing.left_out),
            **self.origin,
            "shape": list(self.shape),
            "dtype": np.lib.format.dtype_to_descr(self.dtype),
            "dims": list(self.dims),
            "axes": list(self.axes),
            "nbytes": self.nbytes,
            "labels": list(self.item_labels),
        }

    def _repr_html_(self) -> str:
        from daskstack import display

        return display.html(self._card, "daskstack.Stack")

    def _card(self) -> str:
        from daskstack import display

        chunks = tuple(c[0] for c in blocks.chunks_along(self.grid, self.bounds))
        pieces = f"{shape_text((*chunks, *self.header.shape))}: {plural(len(self.bounds) - 1, 'read')} in Dask"
        looks = list(self.looks(display.THUMBNAILS, display.SIDE, display.MOST_NBYTES))
        title = f"daskstack.Stack {shape_text(self.shape)} {self.dtype}"
        return display.card(title, [*self.report(), ("chunks", pieces)], looks, self.items)

    def __repr__(self) -> str:
        return f"<daskstack.Stack {shape_text(self.shape)} {self.dtype}>\n{table(self.report())}"
