"""The same bytes from every scheduler, and no trouble with any."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from conftest import Array, Run, image, published, same
from distributed import Client, LocalCluster

from daskstack import build, open_stack
from daskstack.errors import BadFilesError, DaskstackError


@pytest.fixture
def reference(frames: Path) -> bytes:
    build("frames", "reference.npy", scheduler="synchronous", progress=False)
    return Path("reference.npy").read_bytes()


def stored(out: str) -> Array:
    if out.endswith(".npy"):
        return np.asarray(np.load(out))
    import zarr

    return np.asarray(zarr.open_array(f"{out}/data", mode="r")[:])


@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
@pytest.mark.parametrize("how", ["processes", "client", "current", "address", "file"])
def test_the_same_array_from_each(
    frames: Path, expected: Array, reference: bytes, cluster: LocalCluster, pool: None, how: str, out: str, capfd: Any
) -> None:
    with Client(cluster, set_as_default=how == "current") as client:
        if how == "file":
            Path("scheduler.json").write_text(json.dumps({"address": cluster.scheduler_address}))
        scheduler = {
            "processes": "processes",
            "client": client,
            "current": None,
            "address": cluster.scheduler_address,
            "file": "scheduler.json",
        }[how]
        report = build("frames", out, scheduler=scheduler, threads=2)
    assert report.files == 12
    assert same(stored(out), expected)
    if out == "out.npy":
        assert Path(out).read_bytes() == reference
    assert re.search(r"100%  12/12 files  ", capfd.readouterr().err)


def test_workers_of_its_own_are_on_loopback_and_encrypted(frames: Path, expected: Array) -> None:
    script = (
        "import daskstack, subprocess\n"
        "from daskstack.cluster import connected\n"
        "if __name__ == '__main__':\n"
        "    with connected('workers', None, 2, folder='.') as client:\n"
        "        print(client.scheduler.address)\n"
        "        pids = [*client.run(__import__('os').getpid).values(), __import__('os').getpid()]\n"
        "        found = subprocess.run(['ss', '-ltnp'], capture_output=True, text=True).stdout\n"
        "        print(*(line.split()[3] for line in found.splitlines() if any(f'pid={p},' in line for p in pids)))\n"
        "    daskstack.build('frames', 'out.npy', workers=2)\n"
    )
    Path("script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    address, listeners = done.stdout.splitlines()
    assert address.startswith("tls://127.0.0.1:")
    assert len(listeners.split()) >= 4
    assert all(name.startswith("127.0.0.1:") for name in listeners.split())
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("options", ["scheduler='processes'", "workers=2"])
def test_a_script_without_a_guard_gets_one_clear_message(frames: Path, options: str) -> None:
    Path("script.py").write_text(f"import daskstack\ndaskstack.build('frames', 'out.npy', {options})\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("if __name__ == '__main__':") == 1
    assert not Path("out.npy").exists()


def test_a_script_without_a_guard_runs_by_default(frames: Path, expected: Array) -> None:
    Path("script.py").write_text("import daskstack\ndaskstack.build('frames', 'out.npy')\n")
    subprocess.run([sys.executable, "script.py"], check=True, capture_output=True, timeout=60)
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("scheduler", ["sync", "single-threaded", "threads", "processes"])
def test_dask_s_configuration_is_respected(frames: Path, expected: Array, scheduler: str) -> None:
    with dask.config.set(scheduler=scheduler):
        plan = open_stack("frames").plan("out.npy")
        assert plan.scheduler in ("synchronous", "threads", "processes")
        assert plan.scheduler[:4] == {"sing": "sync"}.get(scheduler[:4], scheduler[:4])
        build("frames", "out.npy", progress=False)
    assert same(np.load("out.npy"), expected)


def test_bad_files_come_in_one_report_from_a_cluster_too(frames: Path, cluster: LocalCluster) -> None:
    for k in (3, 7):
        (frames / f"img_{k}.tif").write_bytes(b"")
    with Client(cluster), pytest.raises(BadFilesError) as caught:
        build("frames", "out.npy", progress=False)
    assert [os.path.basename(f.path) for f in caught.value.files] == ["img_3.tif", "img_7.tif"]
    assert published(frames.parent) == ["frames"]


class KillOnce:
    """Reads .npy files, and kills its own process the first time it meets one of them."""

    def __init__(self, marker: str, times: int) -> None:
        self.marker, self.times = marker, times

    def __call__(self, path: str) -> Array:
        if path.endswith("3.npy") and os.path.getsize(self.marker) < self.times:
            with open(self.marker, "a") as f:
                f.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return np.asarray(np.load(path))


@pytest.mark.parametrize("times", [1, 99])
def test_a_worker_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster, times: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(6):
        np.save(tmp_path / "in" / f"{k}.npy", image(k))
    (tmp_path / "marker").touch()
    reader = KillOnce(str(tmp_path / "marker"), times)
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 1)
    with Client(cluster, set_as_default=False) as client:
        if times == 1:
            build("in", "out.npy", reader=reader, scheduler=client, progress=False)
            assert same(np.load("out.npy"), np.stack([image(k) for k in range(6)]))
        else:
            with pytest.raises(
                DaskstackError, match=r"the cluster gave up on a block: KilledWorker; its files: in/\d\.npy"
            ):
                build("in", "out.npy", reader=reader, scheduler=client, progress=False)
            assert not Path("out.npy").exists()


def test_a_scheduler_that_is_not_there(frames: Path, daskstack: Run) -> None:
    with pytest.raises(DaskstackError, match=r"there is no scheduler file nowhere\.json"):
        build("frames", "out.npy", scheduler="nowhere.json", progress=False, wait=1)
    with pytest.raises(DaskstackError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        build("frames", "out.npy", scheduler="tcp://127.0.0.1:9", progress=False, wait=1)
    assert os.listdir(frames.parent) == ["frames"]


def test_on_the_command_line(frames: Path, expected: Array, daskstack: Run) -> None:
    for k, options in enumerate((["--scheduler", "processes"], ["--workers", "2"], ["--scheduler", "synchronous"])):
        done = daskstack("build", "frames", f"out{k}.npy", *options)
        assert done.returncode == 0, done.stderr
        assert same(np.load(f"out{k}.npy"), expected)
    assert "12 blocks of 1 file, 2 workers, " in daskstack("plan", "frames", "x.npy", "--workers", "2").stdout
    assert daskstack("build", "frames", "x.npy", "--workers", "2", "--scheduler", "threads").returncode == 2
