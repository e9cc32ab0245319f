"""From what the user says to a plan, and from a plan to the array: options checked, the scheduler found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from daskstack import files, targets
from daskstack.cluster import WAIT, check_main, check_scheduler, connected
from daskstack.discover import Source
from daskstack.errors import UsageError
from daskstack.jobs import SRUN, make_jobs
from daskstack.plan import StorePlan, make_plan
from daskstack.report import StoreReport
from daskstack.run import How, run
from daskstack.tasks import Storable

if TYPE_CHECKING:
    from distributed import Client

OnError: TypeAlias = Literal["raise", "fill"]

QUEUE_WAIT = 600.0  # seconds for a job to come through the queue


def planned(
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
    """The plan of what is to be stored; the options are those of :meth:`daskstack.Stack.plan`.

    Raises
    ------
    UsageError
        An option cannot be meant.
    """
    path = checked_out(out)
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


def checked_out(out: Source) -> str:
    """The output's absolute path; its suffix must be a known one."""
    text = os.fspath(out)
    if files.is_url(text):
        raise UsageError(f"the output {text!r} is a URL; daskstack writes files", "store on a disk, copy it then")
    targets.format_of(text)
    return files.absolute(text)


def _sizes(option: str, sizes: Any) -> tuple[int, ...] | None:
    """Sizes along the axes, as plain integers."""
    if sizes is None:
        return None
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise UsageError(f"{option}={sizes!r}", "give a size for each axis, as in (64, 64, 64)")
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in sizes):
        raise UsageError(f"{option}={sizes!r}", "give whole numbers, as in (64, 64, 64)")
    return tuple(int(n) for n in sizes)


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


def _part(part: object) -> tuple[int, int] | None:
    """Which part, of how many."""
    if part is None:
        return None
    text = part if isinstance(part, str) else "/".join(map(str, part)) if isinstance(part, Sequence) else repr(part)
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise UsageError(f"part={text!r}", "write it as I/N, counted from 0: of 16 parts 0/16 to 15/16")
    return int(found[1]), int(found[2])


def carried_out(made: StorePlan, work: Storable, how: How, scheduler: str | Client | None) -> StoreReport:
    """Carry out a plan on the scheduler that it was made for; a Client is handed over.

    Raises
    ------
    DaskstackError
        As for :func:`daskstack.run.run`, or the scheduler is not there.
    """
    check_main(made.scheduler)
    wait = made.wait or (WAIT if made.jobs is None else QUEUE_WAIT)

    def connect(folder: str) -> AbstractContextManager[Any]:
        return connected(made.scheduler, scheduler, made.threads, folder=folder, jobs=made.jobs, wait=wait)

    return run(made, work, replace(how, connected=connect, wait=wait))
