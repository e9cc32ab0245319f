"""A plan carried out on a Dask scheduler: one task a block, failures returned as values."""

from __future__ import annotations

import errno
import logging
import math
import os
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
from daskstack.errors import (
    SHOWN_BAD_FILES,
    BadFileError,
    BadFilesError,
    DaskstackError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
)
from daskstack.files import uninterrupted
from daskstack.plan import StorePlan
from daskstack.progress import Progress
from daskstack.stack import BlockRead, FileStack
from daskstack.targets import Index, Target, crc32c, format_of
from daskstack.text import count, duration, listed, nbytes, plural, printable, shape_text, shown

log = logging.getLogger("daskstack")


@dataclass(frozen=True, repr=False)
class StoreReport:
    """What a build did; print it.

    Attributes
    ----------
    out : str
        The output.
    side_files : tuple of str
        What lies beside it.
    shape, dtype
        Of the output.
    files : int
        Files read; 0 where the output was there already.
    seconds : float
        From plan to publication.
    left_out : int
        Names that the scan for files left out.
    """

    out: str
    side_files: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    files: int
    seconds: float
    left_out: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        what = f"{shown(self.out)} {shape_text(self.shape)} {self.dtype}, {nbytes(self.nbytes)}"
        if self.files:
            rate = count(round(self.files / max(1e-9, self.seconds)))
            head = f"done  {what} in {duration(self.seconds)}, {rate} files/s"
            head += (
                f"\n      from {plural(self.files, 'file')}; {count(self.left_out)} left out" if self.left_out else ""
            )
        else:
            head = f"done  {what}: it was there already, made from these files"
        meaning = {".csv": "row to file", ".json": "how it was made", ".npy": "label"}
        beside = [f"{shown(p)} ({meaning[os.path.splitext(p)[1]]})" for p in self.side_files]
        beside.sort(key=lambda text: not text.endswith("(row to file)"))
        read = format_of(self.out).read_hint(shown(self.out))
        return "\n".join([head, *(f"      {b}" for b in beside), f"read  {read}"])

    __repr__ = __str__


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
            staging.publish(held, moves, own_names=lambda: _replaceable(plan))
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


def check_output(plan: StorePlan, stack: FileStack) -> StoreReport | None:
    """Look, without writing, whether the plan can be carried out.

    Returns
    -------
    StoreReport, optional
        Where the output is there already, made by this very plan from files that have not changed.

    Raises
    ------
    OutputExistsError
        A final name is taken by something that may not be replaced, or is one of the inputs.
    OutputError, NoSpaceError
        The folder is not there, or the disk is too small.
    """
    parent = os.path.dirname(plan.out)
    if not os.path.isdir(parent):
        raise OutputError(f"there is no folder {shown(parent)}", f"make it: mkdir -p {shown(parent)}")
    _refuse_long_names(plan, parent)
    own = plan.target.own_names(plan.out)
    _refuse_inputs(plan, stack, own)
    if plan.out in own:
        changed = _changed_since(plan, stack)
        missing = [name for name in plan.final_names if name not in own]
        if changed == [] and not missing:
            report = (plan.out, plan.final_names[:-1], plan.target.shape, plan.target.dtype)
            return StoreReport(*report, files=0, seconds=0.0)
        if not plan.overwrite:
            raise OutputExistsError(*_why_not_again(plan, changed, missing))
    _refuse_taken(plan, own)
    need = plan.need - staging.size_of(plan.out, plan.plan_id)  # a run that was killed took its room already
    if plan.free is not None and plan.free < need:
        raise NoSpaceError(
            f"{shown(plan.out)} needs {nbytes(need)}; {nbytes(plan.free)} are free on its disk (or in its quota)",
            "make room, or choose another disk",
        )
    return None


def _refuse_long_names(plan: StorePlan, parent: str) -> None:
    longest = os.pathconf(parent, "PC_NAME_MAX")
    for name in map(os.path.basename, (*plan.final_names, staging.staging_root(plan.out))):
        if len(os.fsencode(name)) > longest:
            raise OutputError(
                f"the name {printable(name)} is longer than the {longest} bytes that its folder takes",
                "choose a shorter OUT or label",
            )


def _refuse_taken(plan: StorePlan, own: tuple[str, ...]) -> None:
    """What holds a final name must be daskstack's own, and meant to go."""
    may_go = _replaceable(plan)
    for name in plan.final_names:
        if not os.path.lexists(name) or name in may_go:
            continue
        what, advice = "was not made by daskstack", "choose another OUT"
        if plan.target.read_record(plan.out) is not None and os.path.lexists(plan.out):
            what, advice = "was changed since daskstack made it", "move it away, or choose another OUT"
        elif name in own:
            what, advice = "belongs to an output that is gone", "move it away, or --overwrite it"
        taken = plan.out if plan.out not in own and os.path.lexists(plan.out) else name
        raise OutputExistsError(f"{shown(taken)} exists and {what}; it was not touched", advice)


def _replaceable(plan: StorePlan) -> tuple[str, ...]:
    """What may be replaced now: with --overwrite an output of daskstack's own, and what a publication of this very
    plan that was killed left beside the place of its array.
    """
    own = plan.target.own_names(plan.out)
    if plan.overwrite:
        return own
    record = plan.target.read_record(plan.out)
    same = record is not None and record["plan_id"] == plan.plan_id
    return own if same and not os.path.lexists(plan.out) else ()


def _refuse_inputs(plan: StorePlan, stack: FileStack, own: tuple[str, ...]) -> None:
    """An output that is an input, by whatever name or link, would be destroyed before it is read."""
    for name in {*plan.final_names, *own}:
        try:
            found = os.stat(name)
        except OSError:
            continue
        alike = (stack.listing.sizes == found.st_size) & (stack.listing.mtimes == found.st_mtime_ns)
        for k in np.flatnonzero(alike):
            if os.path.samefile(name, stack.listing.paths[k]):
                raise OutputExistsError(
                    f"{shown(name)} is one of the inputs; it was not touched", "choose another OUT, or leave it out"
                )


def _changed_since(plan: StorePlan, stack: FileStack) -> list[str] | None:
    """The files that are not as they were when the output was made; None where another plan made it."""
    record = plan.target.read_record(plan.out)
    if record is None or record["plan_id"] != plan.plan_id:
        return None
    index = plan.target.read_index(plan.out)
    sizes, mtimes = (np.array(index[name], dtype=np.int64) for name in ("size", "mtime"))
    same = (sizes == stack.listing.sizes[stack.file_of]) & (mtimes == stack.listing.mtimes[stack.file_of])
    return [stack.files[k] for k in np.unique(stack.file_of[~same])]


def _why_not_again(plan: StorePlan, changed: list[str] | None, missing: list[str]) -> tuple[str, str]:
    if changed == []:
        what = f"its {shown(missing[0])} is missing or was changed"
    elif changed is None:
        what = "was made from other files or with other options"
    else:
        what = f"was made before {plural(len(changed), 'file')} changed: {listed([shown(p) for p in changed])}"
    return f"{shown(plan.out)} exists and {what}; it was not touched", "choose another OUT, or --overwrite it"


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
