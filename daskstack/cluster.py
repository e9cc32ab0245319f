"""Where the tasks run: this process, processes of its own, or a Dask cluster that is there or is started.

Dask is the engine; nothing here schedules anything.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from daskstack.errors import DaskstackError, UsageError
from daskstack.jobs import Jobs, started
from daskstack.text import shown

LOCAL = ("threads", "synchronous", "processes")
ALIASES = {
    "sync": "synchronous",
    "single-threaded": "synchronous",
    "threading": "threads",
    "multiprocessing": "processes",
}
WAIT = 60.0  # seconds for a scheduler file, or a scheduler, to be there
GUARD = "put the call under: if __name__ == '__main__':"


def default_scheduler() -> str:
    """What is in force where nobody says: a current Client, else Dask's configuration, else threads.

    Neither Dask nor distributed is imported for it: what was not imported is not in force.
    """
    distributed = sys.modules.get("distributed")
    if distributed is not None and current_client() is not None:
        return "client"
    dask = sys.modules.get("dask")
    configured = dask.config.get("scheduler", None) if dask is not None else None
    if isinstance(configured, str):
        return ALIASES.get(configured, configured)
    return "threads"


def current_client() -> Any:
    """The current distributed.Client, or None."""
    from distributed.client import default_client

    try:
        return default_client()
    except ValueError:
        return None


def check_scheduler(scheduler: object, workers: int | None, jobs: Jobs | None = None) -> str:
    """The scheduler's name as a plan holds it.

    Raises
    ------
    UsageError
        There is none of that name, or ``workers`` or a batch system's jobs are given as well.
    """
    given = {"scheduler": scheduler, "workers": workers, "cluster": jobs}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} are both given", "use one of them")
    if jobs is not None:
        return jobs.cluster
    if workers is not None:
        return "workers"
    if scheduler is None:
        return default_scheduler()
    if isinstance(scheduler, str):
        name = ALIASES.get(scheduler, scheduler)
        if name in LOCAL or name.startswith(("tcp://", "tls://")) or name.endswith(".json"):
            return name
    elif hasattr(scheduler, "scheduler_info"):
        return "client"
    raise UsageError(
        f"scheduler={scheduler!r}", f"choose from: {', '.join(LOCAL)}, tcp://..., tls://..., a scheduler file (.json)"
    )


def check_place(array: Any, name: str) -> None:
    """Refuse to compute here what was persisted on a cluster; local schedulers would miss its blocks.

    Raises
    ------
    UsageError
        Blocks of the Dask array lie on a cluster, and ``name`` is a local scheduler.
    """
    distributed = sys.modules.get("distributed")
    if distributed is None or name not in LOCAL:
        return
    if any(isinstance(task, distributed.Future) for task in dict(array.__dask_graph__()).values()):
        raise UsageError("the array, or a part of it, lies on a Dask cluster", "give its Client: scheduler=client")


@contextmanager
def connected(
    name: str, scheduler: object, workers: int, *, folder: str, jobs: Jobs | None = None, wait: float = WAIT
) -> Iterator[Any]:
    """The Client that a plan's tasks go to; None where they stay on this machine's local schedulers.

    Raises
    ------
    DaskstackError
        The scheduler is not there, or worker processes cannot start.
    """
    if jobs is not None:
        with started(jobs, folder) as client:
            yield client
    elif name in LOCAL:
        yield None
    elif name == "client":
        yield current_client() if isinstance(scheduler, str) or scheduler is None else scheduler
    elif name == "workers":
        with _local_cluster(workers) as client:
            yield client
    else:
        with _remote(name, wait) as client:
            yield client


def check_main(name: str) -> None:
    """See whether a process can be started, where a scheduler starts some: it imports the script that starts it.

    A script that starts processes wherever it is imported would start them in each of them; one that
    does so ends here, so that the script itself can say once what to do.

    Raises
    ------
    DaskstackError
        It cannot.
    """
    if name not in ("processes", "workers"):
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(1)
    if not hasattr(sys.modules["__main__"], "__file__"):
        return  # nothing to import: interactive, or python -c
    trial = multiprocessing.get_context("spawn").Process(target=_do_nothing)
    trial.start()
    trial.join(WAIT)
    if trial.exitcode != 0:
        raise DaskstackError("this script cannot start worker processes: each would run it again", GUARD)


def _do_nothing() -> None:
    """What a trial process does."""


@contextmanager
def _local_cluster(workers: int) -> Iterator[Any]:
    """Worker processes on this machine: TLS, on loopback alone, without a dashboard."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            worker_dashboard_address="127.0.0.1:0",
            security=True,
            silence_logs=50,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def _remote(address: str, wait: float) -> Iterator[Any]:
    """A cluster that is there already, by its address or its scheduler file."""
    from distributed import Client

    is_file = address.endswith(".json")
    begin = time.monotonic()
    while is_file and not os.path.exists(address):  # Client alone would wait for ever
        if time.monotonic() - begin > wait:
            raise DaskstackError(
                f"there is no scheduler file {shown(address)} after {wait:g} seconds", "start the scheduler first"
            )
        time.sleep(0.2)
    try:
        where = {"scheduler_file": address} if is_file else {"address": address}
        client = Client(**where, timeout=wait, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as exc:
        raise DaskstackError(f"no Dask scheduler answers at {address}: {exc}", "start it first") from exc
    with client:
        yield client
