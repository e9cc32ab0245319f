"""A plan carried out on a Dask scheduler: one task a block, failures returned as values."""

from __future__ import annotations

import errno
import logging
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np

import daskstack
from daskstack import staging
from daskstack.checks import check_output, replaceable
from daskstack.errors import (
    SHOWN_BAD_FILES,
    BadFilesError,
    DaskstackError,
    OutputExistsError,
)
from daskstack.files import uninterrupted
from daskstack.plan import StorePlan
from daskstack.progress import Progress
from daskstack.reads import BlockRead
from daskstack.report import StoreReport
from daskstack.targets import Index
from daskstack.tasks import BlockResult, Storable
from daskstack.text import count, listed, plural, shown

log = logging.getLogger("daskstack")


def run(plan: StorePlan, work: Storable, *, progress: bool | None = None, client: Any = None) -> StoreReport:
    """Carry out a plan, on a distributed.Client where one is given.

    Raises
    ------
    BadFilesError
        Some files are bad; every other block was tried, nothing is published.
    NoSpaceError, OutputError, OutputExistsError
        The output cannot be written.
    """
    begin = time.monotonic()
    staging.recover(plan.out, plan.target)
    finished = check_output(plan, work)
    if finished is not None:
        return finished
    log.info("%s", plan)
    for bad in work.condemned()[:SHOWN_BAD_FILES]:
        log.warning("bad   %s", bad)
    held: staging.Staging | None = None
    published = False
    try:
        with uninterrupted():
            held = staging.prepare(plan.out, plan.plan_id, _record(plan, work), plan.target)
        results = _run_blocks(plan, work, held.folder, progress=progress, client=client)
        _raise_failures(plan, work, results)
        moves = plan.target.finish(held.folder, plan.out, _index(plan, work, results))
        with uninterrupted():
            staging.publish(held, moves, own_names=lambda: replaceable(plan))
            published = True
    except OutputExistsError:
        with suppress(DaskstackError):  # another run of this very build may have been faster
            finished = check_output(plan, work)
        if finished is None:
            raise
        return finished
    finally:
        if held is not None:
            staging.remove(held, published=published)
    report = (plan.out, plan.final_names[:-1], plan.target.shape, plan.target.dtype)
    left_out = len(work.listing.left_out)
    read = 0 if "derived" in work.origin else plan.files
    return StoreReport(*report, files=read, seconds=time.monotonic() - begin, left_out=left_out)


def _run_blocks(
    plan: StorePlan, work: Storable, folder: str, *, progress: bool | None, client: Any
) -> list[BlockResult]:
    """Every block's result, in order; the first failure that is no file's fault ends the run."""
    graph, keys = work.tasks(plan.bounds, plan.target, folder)
    edges = plan.bounds.tolist()
    with Progress(plan.target.items, f"{plan.unit}s", wanted=progress) as shown_progress:
        due = set(keys)

        def told(key: Any, result: Any, *_: Any) -> None:
            if key not in due:  # what computes a block of any array, or another name of its task
                return
            if result.error is not None:
                raise _explained(result.error)
            items = edges[result.block + 1] - edges[result.block]
            shown_progress.update(items, items * plan.target.item_nbytes, len(result.bad))

        if client is not None:
            return _gather(client, graph, keys, told)
        return list(_get(plan, graph, keys, told))


def _explained(error: Exception) -> Exception:
    """What is no file's fault, with what to do about it."""
    if isinstance(error, MemoryError):
        return DaskstackError("there is not enough memory for a block", "fewer threads, or a memory_limit")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return DaskstackError("too many files are open", "raise the limit (ulimit -n), or fewer threads")
    return error


def _get(plan: StorePlan, graph: Mapping[Any, Any], keys: list[Any], told: Callable[..., None]) -> Any:
    """Run the graph; dask.threaded is called by itself, since naming "threads" would import distributed.

    The callback is handed over, not registered: registered ones hear of every computation of the process.
    """
    callbacks = [(None, None, None, told, None)]
    if plan.scheduler == "synchronous":
        from dask.local import get_sync

        return get_sync(graph, keys, callbacks=callbacks)
    if plan.scheduler == "processes":
        return _get_in_processes(plan, graph, keys, callbacks)
    from dask.threaded import get

    with ThreadPoolExecutor(plan.threads) as pool:
        return get(graph, keys, pool=pool, callbacks=callbacks)


def _get_in_processes(plan: StorePlan, graph: Mapping[Any, Any], keys: list[Any], callbacks: list[Any]) -> Any:
    """One block a call to a worker, so that progress shows and a death costs one block."""
    from concurrent.futures.process import BrokenProcessPool

    from dask.multiprocessing import get

    try:
        return get(graph, keys, num_workers=plan.threads, optimize_graph=False, chunksize=1, callbacks=callbacks)
    except BrokenProcessPool as exc:
        raise DaskstackError("a worker process was killed", "look for what killed it; memory?") from exc


def _gather(client: Any, graph: Mapping[Any, Any], keys: list[Any], told: Callable[..., None]) -> list[BlockResult]:
    """Results as they come from a cluster, in the order of the blocks at the end."""
    from distributed import as_completed

    futures = client.get(dict(graph), keys, sync=False)
    results: dict[Any, BlockResult] = {}
    try:
        for future in as_completed(futures, loop=client.loop):
            try:
                results[future.key] = future.result()
            except DaskstackError:
                raise
            except Exception as exc:
                raise DaskstackError(
                    f"the cluster gave up on a block: {type(exc).__name__}{_files_of(graph[future.key])}",
                    "look at the workers' logs; the same command begins anew",
                ) from exc
            told(future.key, results[future.key])
    finally:
        client.cancel(futures)
    return [results[key] for key in keys]


def _files_of(task: Any) -> str:
    """The files that a task reads, for a message."""
    reads = [part for part in getattr(task, "args", ()) if isinstance(part, BlockRead)]
    return "".join(f"; its files: {listed([shown(path) for path in read.paths])}" for read in reads)


def _raise_failures(plan: StorePlan, work: Storable, results: list[BlockResult]) -> None:
    bad = [b for r in results for b in r.bad]
    if not bad:
        return
    place = {path: k for k, path in reversed(list(enumerate(work.listing.paths)))}
    once = {b.path: b for b in bad}
    files = sorted(once.values(), key=lambda b: place[b.path])
    verb = "is" if len(files) == 1 else "are"
    raise BadFilesError(
        f"{count(len(files))} of {plural(plan.files, 'file')} {verb} bad; {shown(plan.out)} not made",
        "mend or leave out these files, then the same command",
        files,
    )


def _record(plan: StorePlan, work: Storable) -> dict[str, Any]:
    """How the output is made, for the JSON beside it."""
    return {
        "plan_id": plan.plan_id,
        "version": daskstack.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **plan.target.options,
        "shape": list(plan.target.shape),
        "dtype": np.lib.format.dtype_to_descr(plan.target.dtype),
        "bytes": plan.target.size,
        "nbytes": plan.target.nbytes,
        "dims": list(work.dims),
        "axes": list(work.axes),
        "labels": list(plan.labels),
        **work.origin,
        "filled": [],
    }


def _index(plan: StorePlan, work: Storable, results: list[BlockResult]) -> Index:
    checksums = np.fromiter((c for r in results for c in r.checksums), dtype=np.uint32, count=plan.target.items)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Index(
        axes=work.axes,
        grid=plan.target.grid,
        columns={**work.columns, "checksum": checksums},
        labels=work.item_labels,
        record={"created": created, **_record(plan, work)},
    )
