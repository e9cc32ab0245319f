"""A plan: every decision of a build, made before anything is written.

Pure: one function makes it from what it is handed (the disk's free space too), another module carries
it out.  Print it to read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.blocks import items_per_block, run_bounds
from daskstack.errors import UsageError
from daskstack.jobs import Jobs
from daskstack.targets import Target, Tiling, format_of
from daskstack.tasks import Storable
from daskstack.text import count, duration, nbytes, plural, shown, table

MOST_WAITING = 4  # blocks: more of them keep a disk no busier
MOST_WAITING_NBYTES = 256 << 20
PLAN_FORMAT = 1  # part of the plan id: to be raised whenever the same decisions give other bytes


@dataclass(frozen=True, repr=False, eq=False)
class StorePlan:
    """What a build will do.  Made by :meth:`daskstack.Stack.plan`.

    Attributes
    ----------
    out : str
        The output, absolute.
    target : Target
        Format, shape and dtype of what is written.
    bounds : array of int64, shape (blocks + 1,)
        Block ``k`` is the items ``bounds[k]`` to ``bounds[k + 1]``.
    labels : tuple of str
        Labels written beside the array.
    final_names : tuple of str
        Every path the output takes.
    plan_id : str
        Hash of what decides the bytes: files, order, shape, dtype, blocks, target and labels; not
        threads, memory or scheduler.
    threads : int
        Blocks at work at once in this process.
    readers : int
        How many of them are read at once; the others are on their way to the disk.
    scheduler : str
        Which of Dask's schedulers runs the tasks: "threads", "synchronous", "processes", "workers",
        "client", an address, a scheduler file or a batch system.
    jobs : Jobs, optional
        What is asked of the batch system.
    wait : float, optional
        Seconds that a cluster may be without a worker.
    memory : int
        Bound on the bytes held for data at once.
    overwrite : bool
        Whether an output of daskstack's own may be replaced.
    free : int, optional
        Bytes free on the output's disk, where that is known.
    files : int
        Files to read.
    columns : int
        Columns of the index, labels included.
    unit : str
        What an item is: "file" or "item".
    files_per_second : float, optional
        Measured on a sample.
    sampled, parsed : int
        How many items it was measured on, and for how many of them a library had to parse a file.
    about : tuple of (word, text)
        What the stack is, for printing.
    """

    out: str
    target: Target
    bounds: NDArray[np.int64]
    labels: tuple[str, ...]
    final_names: tuple[str, ...]
    plan_id: str
    threads: int
    readers: int
    scheduler: str
    memory: int
    overwrite: bool
    free: int | None
    files: int
    columns: int
    unit: str
    files_per_second: float | None = None
    sampled: int = 0
    parsed: int = 0
    about: tuple[tuple[str, str], ...] = ()
    jobs: Jobs | None = None
    wait: float | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks, and of tasks."""
        return len(self.bounds) - 1

    @property
    def need(self) -> int:
        """Bytes that the output takes, its side files roughly."""
        return self.target.nbytes + 200 * self.target.items

    def rows(self) -> list[tuple[str, str]]:
        """Every decision, as a word and a text."""
        per_block = int(np.diff(self.bounds).max())
        items, unit = self.target.items, self.unit
        places = {"threads": "thread", "processes": "process", "workers": "worker"}
        workers = plural(self.threads, places[self.scheduler]) if self.scheduler in places else "on the cluster"
        if self.jobs is not None:
            workers = f"in {self.jobs}"
        if self.scheduler == "synchronous":
            workers = "one after another"
        up_to = "" if per_block * self.blocks == items else "up to "
        work = f"{plural(self.blocks, 'block')} of {up_to}{plural(per_block, unit)}, {workers}"
        disk = f"{nbytes(self.target.nbytes)} in {plural(self.target.file_count(self.labels, self.columns), 'file')}"
        share = "" if self.scheduler in (*places, "synchronous") else " a task"
        rows = [
            *self.about,
            ("work", f"{work}, at most {nbytes(self.memory)} memory{share}"),
            ("disk", f"{disk}; free {'unknown' if self.free is None else nbytes(self.free)}"),
        ]
        if self.files_per_second:
            left = duration(self.files / self.files_per_second)
            rate = f"{count(round(self.files_per_second))} files/s"
            sample = f"{count(self.sampled)} {unit}s"
            if self.parsed:
                sample += f", {count(self.parsed)} parsed one by one"
            rows.append(("time", f"about {left} (reading {sample}: {rate})"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        known = ("out", "plan_id", "files", "blocks", "threads", "scheduler", "memory", "overwrite", "free")
        return {
            **{name: getattr(self, name) for name in known},
            "shape": list(self.target.shape),
            "dtype": np.lib.format.dtype_to_descr(self.target.dtype),
            "nbytes": self.target.nbytes,
            "labels": list(self.labels),
            "final_names": list(self.final_names),
            "target": self.target.options,
            "files_per_second": self.files_per_second,
        }

    def _repr_html_(self) -> str:
        from daskstack import display

        title = f"daskstack.StorePlan: {shown(self.out)}"
        return display.html(lambda: display.card(title, self.rows()), "daskstack.StorePlan")

    def __str__(self) -> str:
        return table(self.rows())

    __repr__ = __str__


def make_plan(
    work: Storable,
    out: str,
    *,
    tiling: Tiling,
    threads: int | None,
    scheduler: str,
    workers: int | None,
    memory_limit: float | str | None,
    overwrite: bool,
    free: int | None,
    jobs: Jobs | None = None,
    wait: float | None = None,
) -> StorePlan:
    """Decide everything; of the tiling, what is left open.

    Raises
    ------
    UsageError
        An option cannot be meant, or one block does not fit into ``memory_limit``.
    """
    at_least_one("workers", workers)
    at_least_one("threads", threads)
    target, bounds = _target_and_bounds(work, out, tiling, memory_limit)
    for name in work.item_labels:
        if name in target.reserved:
            raise UsageError(f"label {name} has the name of an axis", f"choose another, such as {name}_label")
    labels = tuple(work.item_labels)
    most = int(np.diff(bounds).max())
    a_block = most * target.item_nbytes + work.scratch(bounds) + target.scratch
    at_once = min(workers or threads or _usual_threads(scheduler, a_block), len(bounds) - 1)
    if scheduler not in ("threads", "processes", "workers"):  # one, or as many as a cluster's workers take
        at_once = 1
    if memory_limit is not None:
        limit = parse_nbytes(memory_limit)
        if a_block > limit:
            raise UsageError(*_too_large(memory_limit, a_block, most * limit // a_block, target))
        at_once = min(at_once, limit // max(1, a_block))
    return StorePlan(
        out=out,
        target=target,
        bounds=bounds,
        labels=labels,
        final_names=target.final_names(out, labels),
        plan_id=_plan_id(target, bounds, work),
        threads=at_once,
        readers=threads or usable_cores(),
        scheduler=scheduler,
        memory=at_once * a_block,
        overwrite=overwrite,
        free=free,
        files=len(work.listing.paths),
        columns=len(work.columns) + 1 + len(labels),
        unit=work.unit,
        about=tuple(work.report()),
        jobs=jobs,
        wait=wait,
    )


def _target_and_bounds(
    work: Storable, out: str, tiling: Tiling, memory_limit: float | str | None
) -> tuple[Target, NDArray[np.int64]]:
    """The target, and where its blocks begin and end."""
    grid_axes = len(work.axes)
    grid, item = work.shape[:grid_axes], work.shape[grid_axes:]
    items, item_nbytes = math.prod(grid), math.prod(item) * work.dtype.itemsize
    most = most_items(memory_limit, item_nbytes, work.scratch(work.cut(None)))
    rows = min(items_per_block(items, item_nbytes), most or items)
    target = format_of(out).make(work.shape, work.dtype, work.dims, grid_axes, replace(tiling, rows=rows))
    return target, work.cut(most) if target.tile is None else run_bounds(grid, target.tile)


def _too_large(memory_limit: float | str, a_block: int, fits: int, target: Target) -> tuple[str, str]:
    advice = f"give at least {nbytes(a_block)}"
    if target.tile is not None and fits:
        advice += f", or chunks of at most {plural(fits, 'item')}"
    return f"memory_limit={memory_limit}: one block takes {nbytes(a_block)}", advice


def most_items(memory_limit: float | str | None, item_nbytes: int, scratch: int) -> int | None:
    """How many items a block may have so that one block and its scratch fit into the limit.

    The scratch for reading parts of files shrinks with the block: at least a third is the block's own.
    """
    if memory_limit is None:
        return None
    limit = parse_nbytes(memory_limit)
    return max(1, max(limit - scratch, limit // 3) // max(1, item_nbytes))


def _usual_threads(scheduler: str, a_block: int) -> int:
    """As many as there are cores; threads, which share them, a few more that wait for the disk meanwhile."""
    cores = usable_cores()
    waiting = min(cores, MOST_WAITING, MOST_WAITING_NBYTES // max(1, a_block)) if scheduler == "threads" else 0
    return cores + waiting


def usable_cores() -> int:
    """How many cores this process may use: what SLURM gave it, else its CPU affinity."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit() and int(given):
        return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def at_least_one(option: str, value: object) -> None:
    """Refuse an option that is given and no whole number from 1 on."""
    if value is not None and not (isinstance(value, int | np.integer) and value >= 1):
        raise UsageError(f"{option}={value!r}", "give a whole number, at least 1")


def parse_nbytes(size: float | str) -> int:
    """A number of bytes from a number or a text such as "2 GB" or "512 MiB".

    Examples
    --------
    >>> parse_nbytes("2 GB"), parse_nbytes("512MiB"), parse_nbytes(1000)
    (2000000000, 536870912, 1000)
    """
    if not isinstance(size, str):
        number, unit = float(size), ""
    else:
        text = size.strip().lower()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = text[len(digits) :].strip().removesuffix("b")
        try:
            number = float(digits)
        except ValueError:
            number = 0
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    factor |= {f"{u}i": 1024**k for k, u in enumerate("kmgt", 1)}
    if unit not in factor or not 0 < number < 2**62:
        raise UsageError(f"{size!r} is no number of bytes", 'write it as in "2 GB" or "512 MiB"')
    return int(number * factor[unit])


def _plan_id(target: Target, bounds: NDArray[np.int64], work: Storable) -> str:
    h = hashlib.sha256(f"{PLAN_FORMAT} {work.content_id}".encode())
    descr = np.lib.format.dtype_to_descr(target.dtype)
    h.update(json.dumps([target.shape, descr, work.dims, work.axes, target.options]).encode() + bounds.tobytes())
    for name, values in work.item_labels.items():
        h.update(f"{name} {values.dtype.str} ".encode() + values.tobytes())
    return h.hexdigest()[:16]
