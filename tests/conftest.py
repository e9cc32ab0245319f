"""What many tests use: small files whose every pixel tells where it belongs."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import dask
import numpy as np
import pytest
import tifffile
from distributed import Client, LocalCluster
from forkserver import python
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
DATA = Path(__file__).parent / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for SLURM come first: one process takes them all, and the others take the rest meanwhile."""
    items.sort(key=lambda item: "slurm" not in getattr(item, "fixturenames", ()))


def image(k: int, shape: tuple[int, ...] = (5, 7), dtype: str = "uint16") -> Array:
    """Distinct for each k, not square, so that a swap of items or axes shows."""
    return (np.arange(np.prod(shape)).reshape(shape) + 100 * k).astype(dtype)


def same(found: Any, expected: Array) -> bool:
    """Whether an array, a lazy one too, has exactly these values and this dtype."""
    found = np.asarray(found)
    return found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve TIFF files, not padded, in a folder ``frames`` of the current one; item k is ``image(k)``."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "frames"
    folder.mkdir()
    for k in range(12):
        tifffile.imwrite(folder / f"img_{k}.tif", image(k), photometric="minisblack")
    return folder


@pytest.fixture
def expected() -> Array:
    """What ``frames`` becomes."""
    return np.stack([image(k) for k in range(12)])


def never_wait_for_the_disk() -> None:
    """Syncs that return at once."""
    os.fsync = lambda _: None  # type: ignore[assignment]
    os.O_DSYNC = 0  # type: ignore[misc]


@pytest.fixture(autouse=True)
def no_syncs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug but in the tests marked so: none of the others waits for the disk."""
    if request.node.get_closest_marker("syncs") is None:
        monkeypatch.setattr(os, "fsync", lambda _: None)
        monkeypatch.setattr(os, "O_DSYNC", 0)


@contextmanager
def few_descriptors(more: int = 40) -> Iterator[None]:
    """Only so many more files can be open than there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_below(folder: Path) -> list[str]:
    """The files in a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one by which this folder was listed
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/")]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster that is there already, its workers in a folder of their own; nobody's default."""
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # silence_logs would silence caplog as well
    with LocalCluster(
        n_workers=2,
        threads_per_worker=2,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path_factory.mktemp("workers")),
        silence_logs=False,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="session")
def started_pool() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, initializer=never_wait_for_the_disk) as pool:
        yield pool


@pytest.fixture
def pool(started_pool: ProcessPoolExecutor) -> Iterator[None]:
    """The processes of the scheduler of that name are there already, where each build would start its own."""
    with dask.config.set(pool=started_pool):
        yield


def published(folder: Path) -> list[str]:
    """What is in a folder, but for what is kept of runs that did not finish."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".part"))


Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def daskstack() -> Run:
    """The command line in a process of its own."""
    return partial(python, "-m", "daskstack")


def need_root(what: str) -> None:
    """Skip a test that root alone can run; where everything must run, fail."""
    if os.geteuid() != 0:
        message = f"needs root: {what}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
