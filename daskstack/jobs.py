"""Jobs of a batch system (SLURM, PBS, LSF, ...) as Dask workers, through dask-jobqueue.

dask-jobqueue writes the job scripts and knows the batch systems; its own configuration (jobqueue.yaml) holds where
nothing is asked for.  What is added here: traffic is TLS, listeners are on the one interface that is named,
a job that is lost is asked for again, and a refusal is kept in the batch system's own words.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from daskstack.errors import DaskstackError, UsageError
from daskstack.extras import needed
from daskstack.files import uninterrupted
from daskstack.text import listed, plural

BATCH_SYSTEMS = ("slurm", "pbs", "lsf", "sge", "oar", "moab", "htcondor")
SRUN = "srun"  # no jobs are asked for: the processes that srun has started are the cluster
PREFIX = "jobs."  # of the folder with keys and logs
LOST_AFTER = 15.0  # seconds without any of a job's workers, until another one is asked for
LOOK_EVERY = 2.0  # seconds
ASK_EVERY = 30.0  # seconds between questions to the batch system
IN_VAIN = 4  # jobs in a row that ended before a worker came, until no more are asked for
NANNY_NBYTES = 200 << 20  # of a job's memory, for what runs beside its workers
LOG_LINES = 6
LOOPBACK = "127.0.0.1:0"  # of dashboards, which would listen everywhere where nothing is said

log = logging.getLogger("daskstack")


@dataclass(frozen=True)
class Jobs:
    """What is asked of a batch system; None where its configuration in jobqueue.yaml is to hold.

    Attributes
    ----------
    cluster : str
        The batch system.
    jobs : int
        How many jobs.
    cores : int, optional
        Of one job.
    memory : str, optional
        Of one job, all its processes together.
    walltime, queue, account : str, optional
        As the batch system writes them.
    interface : str, optional
        The network interface that scheduler and workers listen on, alone.
    options : mapping
        Arguments of dask-jobqueue's class.
    insecure : bool
        Whether traffic may go unencrypted, where it cannot be otherwise.
    """

    cluster: str
    jobs: int = 1
    cores: int | None = None
    memory: str | None = None
    walltime: str | None = None
    queue: str | None = None
    account: str | None = None
    interface: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    insecure: bool = False

    def __str__(self) -> str:
        return f"{plural(self.jobs, 'job')} of {self.cluster}"

    @property
    def arguments(self) -> dict[str, Any]:
        """What was asked for, as dask-jobqueue names it."""
        account = "account" if self.cluster in ("slurm", "pbs") else "project"
        asked = {
            "cores": self.cores,
            "memory": self.memory,
            "walltime": self.walltime,
            "queue": self.queue,
            account: self.account,
            "interface": self.interface,
        }
        return {name: value for name, value in asked.items() if value is not None} | dict(self.options)


def make_jobs(
    cluster: str | None,
    *,
    jobs: int | None = None,
    cores: int | None = None,
    memory: str | None = None,
    walltime: str | None = None,
    queue: str | None = None,
    account: str | None = None,
    interface: str | None = None,
    cluster_options: Mapping[str, Any] | None = None,
    insecure: bool | None = None,
) -> Jobs | None:
    """What is asked of a batch system; None where no cluster is to be started.

    Raises
    ------
    UsageError
        There is no batch system of that name, or jobs are described and no cluster is named.

    Examples
    --------
    >>> make_jobs("slurm", jobs=4, cores=8, memory="16GB", queue="short").arguments
    {'cores': 8, 'memory': '16GB', 'queue': 'short'}
    """
    asked: dict[str, Any] = {
        "jobs": jobs,
        "cores": cores,
        "memory": memory,
        "walltime": walltime,
        "queue": queue,
        "account": account,
        "interface": interface,
        "options": cluster_options,
        "insecure": insecure,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value}
    if cluster is None:
        if given:
            raise UsageError(f"{listed(list(given))} without cluster", f"name it: {', '.join(BATCH_SYSTEMS)}")
        return None
    if cluster not in (*BATCH_SYSTEMS, SRUN):
        raise UsageError(f"cluster={cluster!r}", f"choose from: {', '.join((*BATCH_SYSTEMS, SRUN))}")
    unfit = [name for name in given if (name not in ("interface", "insecure")) == (cluster == SRUN)]
    if cluster == SRUN and unfit:
        raise UsageError(f"{listed(unfit)} with cluster=srun", "give them to srun")
    if cluster != SRUN and insecure:
        raise UsageError(f"insecure with cluster={cluster}", "leave it out: traffic is encrypted")
    return Jobs(cluster, **given)


@contextmanager
def started(jobs: Jobs, folder: str) -> Iterator[Any]:
    """A Client of a cluster whose workers are jobs; they end with it, whatever happens.

    Parameters
    ----------
    jobs : Jobs
        What to ask for.
    folder : str
        A folder that all hosts see; a private one in it holds the keys and logs as long as the cluster lives.

    Raises
    ------
    UsageError
        What is asked for is no argument of dask-jobqueue, or something needed is missing.
    """
    from distributed import Client

    private = tempfile.mkdtemp(prefix=PREFIX, dir=folder)
    try:
        cluster = _cluster(jobs, private)
        try:
            with Client(cluster, set_as_default=False) as client:
                cluster.supervise(jobs.jobs)
                log.info("dashboard: %s", cluster.dashboard_link)
                yield client
        finally:
            with uninterrupted():
                cluster.close()
                _close_keys(cluster)
    finally:
        shutil.rmtree(private, ignore_errors=True)


@contextmanager
def in_allocation(jobs: Jobs) -> Iterator[Any]:
    """A Client of the cluster that the processes of one ``srun`` make; only the second of them gets here.

    The first one is the scheduler, all from the third on are workers; they end with the Client.

    Raises
    ------
    UsageError
        srun has not started this, or too few processes; or it is not said that traffic may be unencrypted.
    """
    import dask
    from distributed import Client

    interface = jobs.interface or dask.config.get("jobqueue.slurm.interface", None)
    if not jobs.insecure:
        raise UsageError("cluster=srun cannot encrypt its traffic", "--insecure, or cluster=slurm, which does")
    if interface is None:
        raise UsageError("cluster=srun: no network interface is named", f"--interface NAME; here: {interfaces()}")
    _jobqueue()
    from dask_jobqueue.slurm import SLURMRunner, WorldTooSmallException

    if os.environ.get("SLURM_PROCID") != "1":  # the others end by this signal, which they send themselves
        signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    scratch = tempfile.mkdtemp()
    listen = {"interface": interface, "dashboard_address": LOOPBACK}
    threads = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    name = f".daskstack.{os.environ.get('SLURM_STEP_ID')}.{{job_id}}.json"
    try:
        with (
            SLURMRunner(  # type: ignore[no-untyped-call]
                scheduler_file=name,
                scheduler_options=dict(listen),
                worker_options={**listen, "nthreads": threads, "local_directory": scratch},
            ) as runner,
            Client(runner.scheduler_address, set_as_default=False) as client,
        ):
            yield client
    except (RuntimeError, WorldTooSmallException) as exc:
        raise UsageError(f"cluster=srun: {exc}", "srun -n N daskstack build ..., with N at least 3") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _close_keys(cluster: Any) -> None:
    """Delete the files with keys that dask-jobqueue made for the workers."""
    for name in ("ca_file", "cert", "key"):
        file = getattr(cluster, f"_job_{name}", None)
        if file is not None:
            file.close()


def queue_state(client: Any) -> str:
    """What the batch system says of the jobs that were asked for, and the last lines of their logs."""
    said = getattr(client.cluster, "said", None)
    return "" if said is None else str(said())


def refusal(client: Any) -> str:
    """The batch system's own words, where it refused every job; else nothing."""
    refused = getattr(client.cluster, "refused", ())
    alive = [job for job in client.cluster.workers.values() if job.job_id is not None] if refused else []
    return "" if alive or not refused else str(refused[-1])


def _cluster(jobs: Jobs, private: str) -> Any:
    """The cluster without a job yet."""
    kind = _kind(jobs.cluster)
    command = kind.job_cls.submit_command.split()[0]
    if shutil.which(command) is None:
        raise UsageError(f"cluster={jobs.cluster}: there is no {command} here", "run it on a host that submits jobs")
    arguments = _arguments(jobs, private)
    try:
        return kind(private=private, **arguments)
    except (ValueError, TypeError, RuntimeError) as exc:
        words = str(exc).splitlines()[0].partition(". Very likely")[0].removeprefix("Cluster failed to start: ")
        raise UsageError(f"cluster={jobs.cluster}: {words}", "see the options for clusters") from exc


def _arguments(jobs: Jobs, private: str) -> dict[str, Any]:
    """Arguments of dask-jobqueue's class: what was asked for, on top of its configuration, on top of what we prefer.

    Raises
    ------
    UsageError
        No network interface is named, so that everything would listen on all of them.
    """
    import dask

    def configured(name: str, otherwise: Any) -> Any:
        return dask.config.get(f"jobqueue.{jobs.cluster}.{name}", None) or otherwise

    asked = jobs.arguments
    if not (asked.get("interface") or configured("interface", None)):
        raise UsageError(
            f"cluster={jobs.cluster}: no network interface is named", f"--interface NAME; here: {interfaces()}"
        )
    dashboards = ["--dashboard-address", LOOPBACK]
    prologue = ["scratch=$(mktemp -d) && trap 'rm -rf \"$scratch\"' EXIT"]
    return {
        "security": True,
        "shared_temp_directory": private,
        "log_directory": configured("log-directory", private),
        "local_directory": configured("local-directory", '"$scratch"'),
        "processes": configured("processes", 1),  # reading and writing release the GIL
        **asked,
        "worker_extra_args": dashboards + list(asked.get("worker_extra_args", configured("worker-extra-args", []))),
        "job_script_prologue": list(asked.get("job_script_prologue", configured("job-script-prologue", []))) + prologue,
        "scheduler_options": {
            "dashboard_address": LOOPBACK,
            **asked.get("scheduler_options", configured("scheduler-options", {})),
        },
        "silence_logs": 50,
    }


def interfaces() -> str:
    """Names of the network interfaces here."""
    import socket

    return ", ".join(name for _, name in socket.if_nameindex())


def _jobqueue() -> Any:
    """The module dask_jobqueue, without the handler of Ctrl-C that importing it puts in place."""
    if "dask_jobqueue" not in sys.modules and threading.current_thread() is not threading.main_thread():
        raise UsageError("cluster= in a thread", "import dask_jobqueue in the main thread first")
    handler = signal.getsignal(signal.SIGINT)
    module = needed("dask_jobqueue", "hpc", "cluster=")
    if signal.getsignal(signal.SIGINT) is not handler:
        signal.signal(signal.SIGINT, handler)
    return module


def _kind(name: str) -> Any:
    """dask-jobqueue's class for a batch system, with what its jobs and its cluster lack."""
    module = _jobqueue()
    base = {kind.lower().removesuffix("cluster"): kind for kind in vars(module) if kind.endswith("Cluster")}[name]
    parent = getattr(module, base)

    job = type(parent.job_cls.__name__, (_Job, parent.job_cls), {})
    return type(base, (_Cluster, parent), {"job_cls": job, "batch_system": name})


class _Job:
    """Mixed into a job of dask-jobqueue: a refusal is kept, the end is told, the workers leave room for others.

    Dask's nanny and what else runs in a job take memory too: a batch system that counts it would kill the
    whole job before the nanny ends the one worker that grew.
    """

    refused_as = ""

    @property
    def worker_process_memory(self) -> str:
        total = self.worker_memory  # type: ignore[attr-defined]
        return f"{max(total // 2, total - NANNY_NBYTES) // self.worker_processes}B"  # type: ignore[attr-defined]

    async def start(self) -> None:
        from distributed.core import Status

        try:
            await super().start()  # type: ignore[misc]
        except (RuntimeError, ValueError, OSError) as exc:  # raised, it would only go to a log
            self.refused_as = _own_words(str(exc))
            self.status = Status.running

    async def close(self) -> None:
        from distributed.core import Status

        await super().close()  # type: ignore[misc]
        self.status = Status.closed  # dask-jobqueue leaves the status, and the cluster asserts it


def _own_words(message: str) -> str:
    """What a command printed, without what dask-jobqueue says around it."""
    printed = message.partition("stderr:\n")[2].strip() or message.strip()
    lines = [line.strip().removeprefix("sbatch: error: ") for line in printed.splitlines()]
    return "; ".join(filter(None, lines))


class _Cluster:
    """Mixed into a cluster of dask-jobqueue: it asks again for jobs that are lost, and says what became of them.

    Dask's own ``adapt`` does not replace a job of several processes, nor one that was refused.
    """

    batch_system = ""

    def __init__(self, *, private: str, **arguments: Any) -> None:
        self.private = private
        self.wanted = 0
        self._begun: WeakSet[Any] = WeakSet()
        self._missing: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._told: WeakSet[Any] = WeakSet()
        self._asked = time.monotonic()
        self._in_vain = 0
        try:
            super().__init__(**arguments)
        except BaseException:
            from distributed.core import Status

            _close_keys(self)
            self.status = Status.closed  # what was begun of it has ended
            raise

    @property
    def refused(self) -> list[str]:
        """Why jobs were refused."""
        return [job.refused_as for job in list(self.workers.values()) if job.refused_as]  # type: ignore[attr-defined]

    def supervise(self, wanted: int) -> None:
        """Ask for so many jobs, now and whenever one of them is lost."""
        from tornado.ioloop import PeriodicCallback

        self.wanted = wanted
        self.scale(jobs=wanted)  # type: ignore[attr-defined]
        watch = PeriodicCallback(self._look, LOOK_EVERY * 1000)
        self.loop.add_callback(watch.start)  # type: ignore[attr-defined]

    async def _look(self) -> None:
        """Drop jobs that are lost, and ask for as many others."""
        from distributed.core import Status

        if self.status != Status.running:
            return
        idle = {name: job for name, job in list(self.workers.items()) if not self._has_workers(name, job)}  # type: ignore[attr-defined]
        ended = await self._ended_in_vain(list(idle.values()))
        lost = [name for name, job in idle.items() if job in ended or self._is_lost(job)]
        for name in lost:
            self.worker_spec.pop(name, None)  # type: ignore[attr-defined]
        if lost:
            await self._correct_state()  # type: ignore[attr-defined]  # the next one may have the same name
        if self.status == Status.running:
            self.scale(jobs=self.wanted)  # type: ignore[attr-defined]

    def _has_workers(self, name: str, job: Any) -> bool:
        there = {worker.name for worker in self.scheduler.workers.values()}  # type: ignore[attr-defined]
        group = self.worker_spec.get(name, {}).get("group", [""])  # type: ignore[attr-defined]
        if not there & {f"{name}{suffix}" for suffix in group}:
            self._missing.setdefault(job, time.monotonic())
            return False
        if job not in self._begun:
            self._begun.add(job)
            self._in_vain = 0
        self._missing.pop(job, None)
        return True

    def _is_lost(self, job: Any) -> bool:
        """Whether a job that had workers has had none for long, or was refused so long ago."""
        if job.refused_as and job not in self._told:
            self._told.add(job)
            log.warning("a job was refused: %s", job.refused_as)
        return (job in self._begun or bool(job.refused_as)) and time.monotonic() - self._missing[job] > LOST_AFTER

    async def _ended_in_vain(self, jobs: list[Any]) -> list[Any]:
        """Those of the jobs that are over, cancelled or failed, and never had a worker; only SLURM is asked."""
        pending = [job for job in jobs if job.job_id and job not in self._begun]
        due = time.monotonic() - self._asked > ASK_EVERY and self._in_vain < IN_VAIN
        if not (self.batch_system == "slurm" and pending and due):
            return []
        self._asked = time.monotonic()
        queue = await asyncio.to_thread(_squeue)
        ended = [] if queue is None else [job for job in pending if job.job_id not in queue]
        self._in_vain += len(ended)
        if ended:
            said = _last_lines(self.private)
            log.warning("%s ended before a worker came%s", plural(len(ended), "job"), f"; {said}" if said else "")
        return ended

    def said(self) -> str:
        """What the batch system says of the jobs, and the last lines of their logs."""
        jobs = list(self.workers.values())  # type: ignore[attr-defined]
        words = [f"refused: {text}" for text in dict.fromkeys(self.refused)]
        words += [_queue([job.job_id for job in jobs if job.job_id])] if self.batch_system == "slurm" else []
        return "; ".join(filter(None, [*words, _last_lines(self.private)]))


def _queue(ids: list[str]) -> str:
    """The state of jobs in SLURM's words."""
    states = _squeue() if ids else None
    if states is None:
        return ""
    return "squeue: " + ("; ".join(states[job] for job in ids if job in states) or "none of them is in the queue")


def _squeue() -> dict[str, str] | None:
    """The user's jobs that are not over, by their numbers, in SLURM's words; None where it does not answer."""
    command = ["squeue", "--me", "-h", "-o", "%i job %i %T %r"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return {number: words for number, _, words in (line.partition(" ") for line in done.stdout.splitlines())}
    return None


def _last_lines(folder: str) -> str:
    """The end of the log that was written to last."""
    with suppress(OSError, ValueError):
        newest = max(glob.glob(os.path.join(glob.escape(folder), "*")), key=os.path.getmtime)
        with open(newest, "rb") as f:
            f.seek(max(0, os.path.getsize(newest) - 4096))
            lines = [line.strip() for line in f.read().decode(errors="replace").splitlines() if line.strip()]
        return f"the newest log ends: {' | '.join(lines[-LOG_LINES:])}" if lines else ""
    return ""


def no_workers(client: Any, what: str) -> DaskstackError:
    """The error where nobody is there to do the work."""
    state = queue_state(client)
    return DaskstackError(
        f"{what}{f'; {state}' if state else ''}",
        "see to it that jobs can start, or --wait longer; the same command goes on",
    )
