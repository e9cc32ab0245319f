"""A plan carried out on a Dask scheduler: one task a block, failures returned as values."""

from __future__ import annotations

import errno
import logging
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

import daskstack
from daskstack import staging
from daskstack.blocks import as_bytes
from daskstack.checks import check_output, replaceable
from daskstack.errors import (
    SHOWN_BAD_FILES,
    BadFileError,
    BadFilesError,
    DaskstackError,
    OutputExistsError,
)
from daskstack.files import uninterrupted
from daskstack.plan import StorePlan
from daskstack.progress import Progress
from daskstack.reads import BlockRead
from daskstack.report import StoreReport
from daskstack.stack import FileStack
from daskstack.targets import Index, Target, crc32c
from daskstack.text import count, listed, plural, shown

log = logging.getLogger("daskstack")


@dataclass(frozen=True)
class BlockResult:
    """What a task gives back: checksums of its items, its bad files, or why it failed."""

    block: int
    checksums: tuple[int, ...] = ()
    bad: tuple[BadFileError, ...] = ()
    error: Exception | None = None


def store_block(k: int, read: BlockRead, target: Target, folder: str, start: int) -> BlockResult:
    """The one task: read a block, check it, write it durably, tell what it was.

    Local schedulers stop at the first exception, so that every failure is a value.
    """
    try:
        array, bad = read.read()
        if bad:
            return BlockResult(k, bad=tuple(bad))
        target.write(folder, start, array)
        items = as_bytes(array).reshape(len(array), -1)
        return BlockResult(k, tuple(crc32c(item) for item in items))
    except Exception as exc:  # noqa: BLE001  # raised again where the results are gathered
        return BlockResult(k, error=exc)


def run(plan: StorePlan, stack: FileStack, *, progress: bool | None = None, client: Any = None) -> StoreReport:
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
    finished = check_output(plan, stack)
    if finished is not None:
        return finished
    log.info("%s", plan)
    for bad in stack.condemned()[:SHOWN_BAD_FILES]:
        log.warning("bad   %s", bad)
    held: staging.Staging | None = None
    published = False
    try:
        with uninterrupted():
            held = staging.prepare(plan.out, plan.plan_id, _record(plan, stack), plan.target)
        results = _run_blocks(plan, stack, held.folder, progress=progress, client=client)
        _raise_failures(plan, stack, results)
        moves = plan.target.finish(held.folder, plan.out, _index(plan, stack, results))
        with uninterrupted():
            staging.publish(held, moves, own_names=lambda: replaceable(plan))
            published = True
    except OutputExistsError:
        with suppress(DaskstackError):  # another run of this very build may have been faster
            finished = check_output(plan, stack)
        if finished is None:
            raise
        return finished
    finally:
        if held is not None:
            staging.remove(held, published=published)
    report = (plan.out, plan.final_names[:-1], plan.target.shape, plan.target.dtype)
    left_out = len(stack.listing.left_out)
    return StoreReport(*report, files=len(stack.files), seconds=time.monotonic() - begin, left_out=left_out)


def _run_blocks(
    plan: StorePlan, stack: FileStack, folder: str, *, progress: bool | None, client: Any
) -> list[BlockResult]:
    """Every block's result, in order; the first failure that is no file's fault ends the run."""
    from dask.task_spec import Task

    edges = plan.bounds.tolist()
    keys = [f"store-{plan.plan_id}-{k}" for k in range(plan.blocks)]
    graph = {
        key: Task(key, store_block, k, stack.block(edges[k], edges[k + 1]), plan.target, folder, edges[k])
        for k, key in enumerate(keys)
    }
    item = stack.header.item_nbytes
    unit = "files" if len(stack) == len(stack.files) else "items"
    with Progress(len(stack), unit, wanted=progress) as shown_progress:

        def told(_: str, result: BlockResult, *__: Any) -> None:
            if result.error is not None:
                raise _explained(result.error)
            items = edges[result.block + 1] - edges[result.block]
            shown_progress.update(items, items * item, len(result.bad))

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


def _get(plan: StorePlan, graph: Mapping[str, Any], keys: list[str], told: Callable[..., None]) -> Any:
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


def _get_in_processes(plan: StorePlan, graph: Mapping[str, Any], keys: list[str], callbacks: list[Any]) -> Any:
    """One block a call to a worker, so that progress shows and a death costs one block."""
    from concurrent.futures.process import BrokenProcessPool

    from dask.multiprocessing import get

    try:
        return get(graph, keys, num_workers=plan.threads, optimize_graph=False, chunksize=1, callbacks=callbacks)
    except BrokenProcessPool as exc:
        raise DaskstackError("a worker process was killed", "look for what killed it; memory?") from exc


def _gather(client: Any, graph: Mapping[str, Any], keys: list[str], told: Callable[..., None]) -> list[BlockResult]:
    """Results as they come from a cluster, in the order of the blocks at the end."""
    from distributed import as_completed

    futures = client.get(dict(graph), keys, sync=False)
    results: dict[str, BlockResult] = {}
    try:
        for future in as_completed(futures, loop=client.loop):
            try:
                results[future.key] = future.result()
            except Exception as exc:
                block = graph[future.key].args[1]
                raise DaskstackError(
                    f"the cluster gave up on a block: {type(exc).__name__}; its files: "
                    f"{listed([shown(path) for path in block.paths])}",
                    "look at the workers' logs; the same command begins anew",
                ) from exc
            told(future.key, results[future.key])
    finally:
        client.cancel(futures)
    return [results[key] for key in keys]


def _raise_failures(plan: StorePlan, stack: FileStack, results: list[BlockResult]) -> None:
    bad = [b for r in results for b in r.bad]
    if not bad:
        return
    place = {path: k for k, path in reversed(list(enumerate(stack.files)))}
    once = {b.path: b for b in bad}
    files = sorted(once.values(), key=lambda b: place[b.path])
    verb = "is" if len(files) == 1 else "are"
    raise BadFilesError(
        f"{count(len(files))} of {plural(len(stack.files), 'file')} {verb} bad; {shown(plan.out)} not made",
        "mend or leave out these files, then the same command",
        files,
    )


def _record(plan: StorePlan, stack: FileStack) -> dict[str, Any]:
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
        "dims": list(stack.dims),
        "labels": list(plan.labels),
        "sources": list(stack.listing.sources),
        "root": stack.root,
        "join": stack.reader.join,
        "options": stack.options,
        "filled": [],
    }


def _index(plan: StorePlan, stack: FileStack, results: list[BlockResult]) -> Index:
    names = stack.names
    checksums = np.fromiter((c for r in results for c in r.checksums), dtype=np.uint32, count=len(stack))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Index(
        files=[names[k] for k in stack.file_of.tolist()],
        pages=stack.row_of if stack.reader.join == "concat" else None,
        labels=stack.labels,
        sizes=stack.listing.sizes[stack.file_of],
        mtimes=stack.listing.mtimes[stack.file_of],
        checksums=checksums,
        record={"created": created, **_record(plan, stack)},
    )
