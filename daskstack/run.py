"""A plan carried out on a Dask scheduler: what an earlier run kept is kept, the rest done, and all of it published."""

from __future__ import annotations

import errno
import logging
import os
import platform
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

import daskstack
from daskstack import files, receipts, staging
from daskstack.checks import check_output, replaceable
from daskstack.errors import (
    BadFileError,
    BadFilesError,
    DaskstackError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from daskstack.files import uninterrupted
from daskstack.hosts import Hosts
from daskstack.plan import StorePlan
from daskstack.progress import Progress
from daskstack.publication import publish, recover
from daskstack.reads import BlockRead, fill_value
from daskstack.receipts import Receipt
from daskstack.report import StoreReport, bad_files_csv
from daskstack.staging import Staging
from daskstack.staging.locks import publishing
from daskstack.staging.root import staging_root
from daskstack.targets import Index
from daskstack.tasks import BlockResult, Place, Storable, differs
from daskstack.text import SHOWN, count, listed, nbytes, plural, shown

LOOK_EVERY = 2.0  # seconds between looks at a cluster's workers
GATHER_EVERY = 0.1  # seconds between looks at what they have done
WAIT = 60.0  # seconds for a cluster's workers to be there

log = logging.getLogger("daskstack")


def _nowhere(_: str) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class How:
    """How a plan is carried out; nothing here decides the bytes of good files.

    Attributes
    ----------
    progress : bool, optional
        Whether progress is shown; by default it is.
    connected : callable
        Of the staging folder: a context whose value is the Client that the tasks go to, or None.
    wait : float
        Seconds that a cluster may be without a worker.
    fill : bool
        Whether items of bad files hold the fill value; else bad files are an error.
    part : (int, int), optional
        Do only each ``n``-th block, from the ``i``-th on.
    restart : bool
        Throw away what an earlier run kept.
    request : str
        A hash of what was asked for, by which parts know each other.
    turn : ExitStack, optional
        Closed once the staging folder is there.
    """

    progress: bool | None = None
    connected: Callable[[str], AbstractContextManager[Any]] = _nowhere
    wait: float = WAIT
    fill: bool = False
    part: tuple[int, int] | None = None
    restart: bool = False
    request: str = ""
    turn: ExitStack | None = None


def run(plan: StorePlan, work: Storable, how: How) -> StoreReport:
    """Carry out a plan.

    Raises
    ------
    BadFilesError
        Some files are bad; every other block is done and kept, nothing is published.
    NoSpaceError, OutputError, OutputExistsError
        The output cannot be written, or what an earlier run kept is no part of this plan.
    """
    begin = time.monotonic()
    recover(plan.out, plan.target)
    finished = check_output(plan, work, fill=how.fill, restart=how.restart)
    if finished is not None:
        staging.clear_published(plan.out, plan.plan_id)
        return finished
    log.info("%s", plan)
    for bad in work.condemned()[:SHOWN]:
        log.warning("bad   %s", bad)
    if how.part is not None and not work.repeatable:
        raise UsageError("part with a reader that cannot be pickled", "define it by def at the top of a module")
    held: Staging | None = None
    published: list[StoreReport] = []
    try:
        with uninterrupted():
            held = _prepared(plan, work, how)
        if how.turn is not None:
            how.turn.close()
        report = _store(plan, work, how, held, begin=begin, published=published)
    except BaseException as exc:  # noqa: BLE001  # it is raised again, with what is kept
        finished = _published_meanwhile(plan, work, how, held, exc)
        if finished is not None:
            published.append(finished)
        if not published:  # else a signal came when all was done
            left, held = held, None  # once, even where a signal comes meanwhile
            kept = staging.remove(left, published=False, repeatable=work.repeatable) if left is not None else 0
            raise _with_what_is_kept(exc, plan, kept) from exc.__cause__
        report = published[0]
    finally:
        if held is not None:
            staging.remove(held, published=bool(published))
    return report


def _prepared(plan: StorePlan, work: Storable, how: How) -> Staging:
    manifest = {
        "plan_id": plan.plan_id,
        "request": how.request,
        "repeatable": work.repeatable,
        "content": work.content_id,
        "blocks": plan.blocks,
        **_record(plan, work),
    }
    shared, listing = how.part is not None, work.listing
    return staging.prepare(plan.out, manifest, listing, plan.target, shared=shared, restart=how.restart)


def _store(
    plan: StorePlan, work: Storable, how: How, held: Staging, *, begin: float, published: list[StoreReport]
) -> StoreReport:
    """Do what is missing; publish if nothing is, and add the report to ``published`` as soon as that is done."""
    with files.writing(held.place):  # which another part that publishes takes away
        done = _kept_blocks(plan, work, how, held.place)
    todo = [k for k in _mine(plan, how) if k not in done]
    if done and how.progress is not False:
        log.warning("resuming: %s of %s are on disk", count(len(done)), plural(plan.blocks, "block"))
    with _hosts_at_work(plan, work, how, held, todo) as hosts:
        results = _run_blocks(plan, work, how, held.place, todo, hosts=hosts) if todo else []
        _raise_failures(plan, work, held, results)
        done |= {r.block: r.receipt for r in results if r.receipt is not None}
        if how.part is not None:  # what others have done meanwhile counts as well
            with files.writing(held.place):
                done = _whole(receipts.read(held.place, plan.plan_id), how) | done
        if len(done) == plan.blocks and _hosts(done):
            _read_back(plan, held.place, done, hosts)
    filled = _filled(plan, work, done)
    report = StoreReport(
        plan.out,
        plan.final_names[:-1],
        plan.target.shape,
        plan.target.dtype,
        files=0 if "derived" in work.origin else plan.files,
        read=len({work.columns["file"][i] for k in todo for i in range(*plan.bounds[k : k + 2])})
        if "file" in work.columns
        else 0,
        seconds=time.monotonic() - begin,
        parsed=sum(r.parsed for r in results),
        left_out=len(work.listing.left_out),
        filled=tuple(f"{f['file']}  {f['problem']}" for f in filled),
        blocks=plan.blocks,
        blocks_done=len(done),
        hosts=_hosts(done),
    )
    if len(done) < plan.blocks:
        return report
    with files.writing(plan.out), publishing(held.folder) as still_there:
        if not still_there:
            raise OutputError(f"{shown(held.folder)} is gone", "see whether another run has published it")
        with suppress(DaskstackError):  # a run that was killed may have published it
            if check_output(plan, work, fill=how.fill, restart=how.restart) is not None:
                published.append(report)
                return report
        moves = plan.target.finish(held.place, plan.out, _index(plan, work, done, filled))
        with uninterrupted():
            publish(held, moves, plan.target, own_names=lambda: replaceable(plan))
            published.append(report)
    return report


def _hosts(done: Mapping[int, Receipt]) -> dict[str, int]:
    """How many blocks each host has written; none where one has written all."""
    found = Counter(receipt.host for receipt in done.values())
    return dict(found) if len(found) > 1 else {}


def _published_meanwhile(
    plan: StorePlan, work: Storable, how: How, held: Staging | None, exc: BaseException
) -> StoreReport | None:
    """The report of another run of this very plan, where that was faster and so took our folder away."""
    if not isinstance(exc, OutputError | OutputExistsError):
        return None
    with suppress(DaskstackError, OSError):
        if held is not None:
            with publishing(held.folder):  # wait for one that is at it
                pass
        return check_output(plan, work, fill=how.fill)
    return None


def _with_what_is_kept(exc: BaseException, plan: StorePlan, kept: int) -> BaseException:
    """The same failure, with what is kept of the run and what to do."""
    root = shown(staging_root(plan.out))
    if isinstance(exc, NoSpaceError) and kept:
        size = nbytes(kept * int(np.diff(plan.bounds).max()) * plan.target.item_nbytes)
        advice = f"make room (or raise the quota), same command; to give up: rm -r {root}"
        return NoSpaceError(f"{exc.message}; {plural(kept, 'block')} kept (up to {size})", advice)
    if kept and not isinstance(exc, BadFilesError):
        exc.add_note(f"{count(kept)} of {plural(plan.blocks, 'block')} are safe in {root}")
    return exc


def _kept_blocks(plan: StorePlan, work: Storable, how: How, folder: str) -> dict[int, Receipt]:
    """The blocks with a receipt that counts: of files that have not changed, nothing filled that should not be.

    Raises
    ------
    OutputError
        A file under a receipt has changed.
    """
    with files.writing(folder):
        found = receipts.read(folder, plan.plan_id)
    columns = work.columns
    edges = plan.bounds.tolist()
    done: dict[int, Receipt] = {}
    changed: list[int] = []
    mine = _mine(plan, how)
    for k in sorted(k for k in found if k in mine):
        candidates = found[k]
        region = slice(edges[k], edges[k + 1])
        now = [array("q", np.asarray(columns[name][region]).tobytes()) for name in ("size", "mtime") if name in columns]
        whole = [r for r in candidates if len(r.checksums) == edges[k + 1] - edges[k]]
        same = [r for r in whole if [r.sizes, r.mtimes] == now or not r.sizes]
        valid = [r for r in same if how.fill or not r.filled]
        if len(valid) == 1:
            done[k] = valid[0]
        elif whole and not same and not any(r.filled for r in whole):
            changed += _changed_items(whole[0], now, edges[k])
    if changed:
        names = list(dict.fromkeys(columns["file"][k] for k in changed))
        raise OutputError(
            f"{plural(len(names), 'file')} changed since {'it was' if len(names) == 1 else 'they were'} stored: "
            f"{listed(names)}; the blocks in {shown(staging_root(plan.out))} were kept",
            "put the old files back, or --restart to begin anew",
        )
    if how.part is not None:  # the others look at their files themselves
        done |= {k: r for k, r in _whole(found, how).items() if k < plan.blocks and k not in mine}
    lost = plan.target.lost(folder, plan.bounds, list(done))
    return {k: r for k, r in done.items() if k not in lost}


def _mine(plan: StorePlan, how: How) -> range:
    """The blocks that this run is to do."""
    return range(plan.blocks) if how.part is None else range(how.part[0], plan.blocks, how.part[1])


def _changed_items(receipt: Receipt, now: Sequence[Sequence[int]], start: int) -> list[int]:
    sizes, mtimes = now
    then = zip(receipt.sizes, receipt.mtimes, strict=True)
    return [start + k for k, (a, b) in enumerate(zip(then, zip(sizes, mtimes, strict=True), strict=True)) if a != b]


def _whole(found: Mapping[int, list[Receipt]], how: How) -> dict[int, Receipt]:
    """The blocks whose receipts all say the same, with nothing filled that should not be."""
    alone = {k: candidates[0] for k, candidates in found.items() if len(candidates) == 1}
    return {k: receipt for k, receipt in alone.items() if how.fill or not receipt.filled}


@contextmanager
def _hosts_at_work(
    plan: StorePlan, work: Storable, how: How, held: Staging, todo: Sequence[int]
) -> Iterator[Hosts | None]:
    """The hosts of a cluster, looked at and found fit; None where there is nothing to do, or this process does it."""
    if not todo:
        yield None
        return
    with how.connected(held.folder) as client:
        if client is None:
            yield None
            return
        names = work.listing.paths
        some = [names[k] for k in (0, len(names) // 2, -1)] if names else []
        hosts = Hosts(client, paths=some, folder=held.place, a_block=plan.memory // plan.threads, wait=how.wait)
        hosts.await_first()
        yield hosts


def _run_blocks(
    plan: StorePlan, work: Storable, how: How, folder: str, todo: list[int], *, hosts: Hosts | None
) -> list[BlockResult]:
    """The results of the blocks to do, in order; the first failure that is no file's fault ends the run."""
    place = Place(plan.target, folder, plan.plan_id, how.fill, plan.readers)
    graph, keys = work.tasks(plan.bounds, todo, place)
    sizes = np.diff(plan.bounds).tolist()
    before = plan.target.items - sum(sizes[k] for k in todo) if how.part is None else 0
    total = before + sum(sizes[k] for k in todo)
    due = set(keys)
    with Progress(total, f"{plan.unit}s", wanted=how.progress, before=before, blocks=len(todo)) as shown_progress:

        def told(key: Any, result: Any, *_: Any) -> None:
            if key not in due:  # what computes a block of any array, or another name of its task
                return
            if result.error is not None:
                raise _explained(result.error)
            items = sizes[result.block]
            bad = len(result.bad) if result.receipt is None else len(result.receipt.filled)
            shown_progress.update(items, items * plan.target.item_nbytes, bad)

        def on_disk() -> dict[Any, BlockResult]:
            kept = _kept_blocks(plan, work, how, folder)
            return {key: BlockResult(k, kept[k]) for key, k in zip(keys, todo, strict=True) if k in kept}

        if hosts is not None:
            futures = hosts.client.get(dict(graph), keys, sync=False)
            return _gather(hosts, futures, graph, told, on_disk)
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


def _gather(
    hosts: Hosts,
    futures: Sequence[Any],
    tasks: Mapping[Any, Any],
    told: Callable[[Any, Any], None],
    on_disk: Callable[[], Mapping[Any, Any]] = dict,
) -> list[Any]:
    """Results as they come from a cluster, in the order of the futures at the end.

    Those that are there are fetched together, a few times a second: a message for each block would cost more than
    all else that the scheduler does for it.  Each is let go of at once: those that a dead worker still held would be
    worked out again.  For those that died with their worker, ``on_disk`` is asked.
    """
    waiting = {future.key: future for future in futures}
    results: dict[Any, Any] = dict.fromkeys(waiting)
    looked = time.monotonic()
    try:
        while waiting:
            time.sleep(GATHER_EVERY)
            found = _fetched(hosts.client, [future for future in waiting.values() if future.done()], tasks)
            if time.monotonic() - looked > LOOK_EVERY:
                if hosts.watch():
                    found |= {key: result for key, result in on_disk().items() if key in waiting}
                looked = time.monotonic()
            for key, result in found.items():
                results[key] = result
                waiting.pop(key).release()
                told(key, result)
    finally:
        hosts.client.cancel(list(waiting.values()))
    return list(results.values())


def _fetched(client: Any, futures: Sequence[Any], tasks: Mapping[Any, Any]) -> dict[Any, Any]:
    """Results of futures that are done, by their keys; none where one has died with its worker, or is slow to come."""
    for future in futures:
        if future.status != "finished":
            _raise_failure(future, tasks.get(future.key))
    try:
        gather = partial(client.gather, asynchronous=True)
        results = client.sync(gather, futures, callback_timeout=LOOK_EVERY) if futures else ()
    except TimeoutError:
        return {}
    return {future.key: result for future, result in zip(futures, results, strict=True)}


def _raise_failure(future: Any, task: Any) -> None:
    """Say why the cluster has given a block up; nothing where it is at it again."""
    try:
        future.result(timeout=LOOK_EVERY)
    except DaskstackError:
        raise
    except Exception as exc:
        if isinstance(exc, TimeoutError) and future.status != "error":
            return
        files = _files_of(task)
        if not files and not type(exc).__module__.startswith("distributed."):  # of a function of the user's
            raise
        raise DaskstackError(
            f"the cluster gave up on a block: {type(exc).__name__}{files}",
            "look at the workers' logs; the same command goes on",
        ) from exc


def _files_of(task: Any) -> str:
    """The files that a task reads, for a message."""
    reads = [part for part in getattr(task, "args", ()) if isinstance(part, BlockRead)]
    return "".join(f"; its files: {listed([shown(path) for path in read.paths])}" for read in reads)


def _read_back(plan: StorePlan, folder: str, done: Mapping[int, Receipt], hosts: Hosts | None) -> None:
    """See whether blocks that several hosts wrote are on the disk that they share: another host reads each of them.

    Raises
    ------
    OutputError
        One of them is not as it was written.
    """
    place = Place(plan.target, folder, plan.plan_id)
    todo = [(receipt, int(plan.bounds[k])) for k, receipt in sorted(done.items())]

    def told(_: Any, trouble: str) -> None:
        if trouble:
            raise OutputError(
                f"{trouble}; {shown(plan.out)} not made",
                "the file system mixes up what hosts write: --restart on one host, or build on another file system",
            )

    if hosts is None:
        for receipt, start in todo:
            told(receipt.block, differs(place, receipt, start))
        return
    futures = []
    for host in sorted({receipt.host for receipt, _ in todo}):
        own = [pair for pair in todo if pair[0].host == host]
        where = hosts.after(host) or None
        options = {"workers": where, "allow_other_workers": where is not None, "pure": False}
        futures += hosts.client.map(partial(differs, place), *zip(*own, strict=True), **options)
    _gather(hosts, futures, {}, told)


def _raise_failures(plan: StorePlan, work: Storable, held: Staging, results: list[BlockResult]) -> None:
    bad = [b for r in results for b in r.bad]
    if not bad:
        return
    place = {path: k for k, path in reversed(list(enumerate(work.listing.paths)))}
    once = {b.path: b for b in bad}
    ordered = sorted(once.values(), key=lambda b: place[b.path])
    kept = 0
    if work.repeatable:
        with files.writing(held.place):
            kept = len(receipts.read(held.place, plan.plan_id))
    message = (
        f"{count(len(ordered))} of {plural(plan.files, 'file')} {'is' if len(ordered) == 1 else 'are'} bad; "
        f"{shown(plan.out)} not made"
    )
    advice = "mend or leave out these files, then the same command"
    if kept:
        message += f", {count(kept)} of {plural(plan.blocks, 'block')} kept"
        redo = plural(len({r.block for r in results if r.bad}), "block")
        advice = f"mend them, same command (reads only {redo} again); or --on-error fill"
    to_list = work.repeatable and (kept or len(ordered) > SHOWN)
    listed_in = _write_list(held.folder, ordered) if to_list else ""
    raise BadFilesError(message, advice, ordered, listed_in)


def _write_list(folder: str, bad: Sequence[BadFileError]) -> str:
    """All bad files as a CSV in the staging folder."""
    path = os.path.join(folder, staging.BAD_FILES)
    with files.writing(path):
        with suppress(FileNotFoundError):  # of an earlier run
            os.unlink(path)
        files.write_new(path, bad_files_csv(bad))
    return path


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
    }


def _filled(plan: StorePlan, work: Storable, done: Mapping[int, Receipt]) -> list[dict[str, Any]]:
    """The items that hold the fill value, in order, each with its file and what was wrong with it."""
    names = work.columns.get("file", ())
    items = {int(plan.bounds[k]) + n: problem for k, r in done.items() for n, problem in r.filled.items()}
    return [{"item": item, "file": names[item], "problem": items[item]} for item in sorted(items)]


def _index(plan: StorePlan, work: Storable, done: Mapping[int, Receipt], filled: list[dict[str, Any]]) -> Index:
    ordered = [done[k] for k in range(plan.blocks)]
    columns = dict(work.columns)
    if "size" in columns and all(r.sizes for r in ordered):  # parts have looked at their own files only
        columns["size"] = np.frombuffer(b"".join(r.sizes for r in ordered), np.int64)
        columns["mtime"] = np.frombuffer(b"".join(r.mtimes for r in ordered), np.int64)
    columns["checksum"] = np.frombuffer(b"".join(r.checksums for r in ordered), np.uint32)
    record = {"created": datetime.now(UTC).isoformat(timespec="seconds"), **_record(plan, work), "filled": filled}
    if filled:
        record["fill_value"] = str(fill_value(plan.target.dtype))
        problems = {f["item"]: f["problem"] for f in filled}
        columns["filled"] = np.array([problems.get(k, "") for k in range(plan.target.items)])
    return Index(work.axes, plan.target.grid, columns, work.item_labels, record)
