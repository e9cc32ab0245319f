"""The hosts that a cluster's workers are on: waited for, looked at before the first block, watched until the last."""

from __future__ import annotations

import math
import os
import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from daskstack.errors import DaskstackError
from daskstack.files import host_name
from daskstack.jobs import no_workers, refusal
from daskstack.text import nbytes, plural, shown

PACKAGES = ("daskstack", "dask", "distributed", "zarr")
POLL = 0.2  # seconds
ENDS = 10.0  # seconds that a worker that is told to end may take for the blocks it is at
SHARED = "all hosts must see the same files under the same paths, and be able to write where the output is"


@dataclass(frozen=True)
class Worker:
    """What a worker says of itself: its host, its versions, its threads, and its memory in bytes (0: no limit)."""

    host: str
    versions: tuple[str, ...]
    threads: int
    memory: int


class Hosts:
    """Workers of a cluster; each is looked at once, the first ones before anything is done.

    Parameters
    ----------
    client : distributed.Client
        The cluster's.
    paths : sequence of str
        Some of the sources.
    folder : str
        Where blocks go.
    a_block : int
        Bytes that one block takes.
    wait : float
        Seconds to wait for a worker.
    """

    def __init__(self, client: Any, *, paths: Sequence[str], folder: str, a_block: int, wait: float) -> None:
        self.client, self.folder, self.a_block, self.wait = client, folder, a_block, wait
        self.paths = [path for path in paths if os.path.isfile(path)]  # the others are bad files wherever one looks
        self.workers: dict[str, Worker] = {}
        self.there: set[str] = set()
        self.seen = time.monotonic()
        self.lost = -math.inf

    def await_first(self) -> None:
        """Return when some worker is there and all that are there have been looked at.

        Raises
        ------
        DaskstackError
            None comes in time, every job was refused, or a worker cannot do the work: the message says which
            and why.
        """
        self.seen = time.monotonic()
        while not self.look():
            refused = refusal(self.client)
            if refused:
                raise DaskstackError(
                    f"the batch system refused the jobs: {refused}",
                    "ask for what it has: partition, account, walltime, cores, memory",
                )
            if time.monotonic() - self.seen > self.wait:
                raise no_workers(self.client, f"no worker came within {self.wait:g} seconds")
            time.sleep(POLL)

    def look(self) -> bool:
        """Whether some worker is there; those that are new are looked at.

        Raises
        ------
        DaskstackError
            The scheduler is gone, no worker was there for too long, or one cannot do the work.
        """
        try:
            there = self.client.scheduler_info(n_workers=-1)["workers"]
            new = sorted(set(there) - set(self.workers))
            if new:
                self._look_at(new)
        except (OSError, TimeoutError) as exc:
            raise DaskstackError(f"the scheduler is gone: {exc}", "see its log; the same command goes on") from exc
        if there:
            self.seen = time.monotonic()
        if self.there - set(there):
            self.lost = time.monotonic()
        self.there = set(there)
        return bool(there)

    def watch(self) -> bool:
        """Look again while blocks are done; whether a worker was lost lately.

        One that is told to end may still write its blocks and their receipts, and tell nobody.

        Raises
        ------
        DaskstackError
            As for :meth:`look`, and where no worker was there for too long.
        """
        if not self.look() and time.monotonic() - self.seen > self.wait:
            raise no_workers(self.client, f"there has been no worker for {self.wait:g} seconds")
        return time.monotonic() - self.lost < ENDS

    def _look_at(self, addresses: list[str]) -> None:
        known = {worker.host for worker in self.workers.values()}
        for address, found in self._asked(_about, addresses).items():
            self.workers[address] = found
            self._check(found)
        ones = {found.host: address for address, found in self.workers.items() if found.host not in known}
        for address, trouble in self._asked(_trouble, list(ones.values()), self.paths, self.folder).items():
            if trouble:
                raise DaskstackError(f"the worker on {self.workers[address].host} {trouble}", SHARED)

    def _asked(self, function: Any, addresses: list[str], *arguments: Any) -> dict[str, Any]:
        """What a function returns in each of these workers; those that are gone by now are left out."""
        answers = self.client.run(function, *arguments, workers=addresses, on_error="return") if addresses else {}
        for address, answer in answers.items():
            if isinstance(answer, ImportError | AttributeError | TypeError):
                raise DaskstackError(
                    f"the worker at {address} cannot run daskstack: {type(answer).__name__}: {answer}",
                    "install the same daskstack for the workers' Python",
                )
        return {address: answer for address, answer in answers.items() if not isinstance(answer, BaseException)}

    def _check(self, worker: Worker) -> None:
        here = _versions()
        differing = [
            f"{name} {there} (here {own})"
            for name, there, own in zip(("python", *PACKAGES), worker.versions, here, strict=True)
            if there != own
        ]
        if differing:
            raise DaskstackError(f"the worker on {worker.host} has {', '.join(differing)}", "install the same there")
        if worker.memory and worker.memory < worker.threads * self.a_block:
            raise DaskstackError(
                f"the worker on {worker.host} has {nbytes(worker.memory)} for {plural(worker.threads, 'thread')}, "
                f"each of which takes {nbytes(self.a_block)} for a block",
                "give it more memory or fewer cores, or a memory_limit",
            )

    def after(self, host: str) -> list[str]:
        """Addresses of the workers on the host that comes after this one, of all in a ring; none where it is alone."""
        there = self.client.scheduler_info(n_workers=-1)["workers"]
        others = {worker.host for address, worker in self.workers.items() if address in there and worker.host != host}
        following = min(others, key=lambda name: (name < host, name), default=None)
        return [a for a, worker in self.workers.items() if worker.host == following and a in there]


def _versions() -> tuple[str, ...]:
    """Of Python, and of what decides the bytes or must understand the other side."""
    from importlib.metadata import version

    return (".".join(platform.python_version_tuple()[:2]), *map(version, PACKAGES))


def _about(dask_worker: Any = None) -> Worker:
    """What a worker says of itself; Dask hands it over."""
    limit = dask_worker.memory_manager.memory_limit
    return Worker(host_name(), _versions(), dask_worker.state.nthreads, int(limit or 0))


def _trouble(paths: Sequence[str], folder: str) -> str:
    """What hinders work on this host; the folder's random name is proof that it is the one."""
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except OSError as exc:
            return f"cannot read {shown(path)}: {exc.strerror}"
    trial = os.path.join(folder, f".{uuid.uuid4().hex}")
    try:
        with open(trial, "xb"):
            pass
        os.unlink(trial)
    except OSError as exc:
        return f"cannot write in {shown(folder)}: {exc.strerror}"
    return ""
