"""Several hosts, one file system: who wrote what is on record, and another host reads it back before publication."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Array, published, same
from distributed import Client
from slurmkit import until

import daskstack.run
from daskstack import build
from daskstack.errors import DaskstackError, OutputError
from daskstack.output import open_output
from daskstack.progress import Progress
from daskstack.targets.npy import WRITERS

OUTPUTS = [
    ("out.npy", {}),
    ("out.zarr", {"shards": (2, 5, 7), "chunks": (1, 5, 7)}),
    ("out.zarr", {"shards": (2, 6, 8), "chunks": (1, 3, 4)}),
    ("out.zarr", {"chunks": (2, 5, 7), "zarr_format": 2}),
]


def damage(folder: Path) -> None:
    """Change a byte of the first block's pixels, as a file system might that mixes up what hosts write."""
    path = next(p for p in sorted(folder.rglob("*")) if p.name in ("data.npy", "c.0.0.0", "0.0.0"))
    with path.open("r+b") as file:
        file.seek(130 if path.suffix == ".npy" else 9)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(("out", "options"), OUTPUTS)
@pytest.mark.parametrize("damaged", [False, True])
def test_parts_of_several_hosts_are_read_back(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, out: str, options: dict[str, Any], damaged: bool
) -> None:
    asked: dict[str, Any] = {"progress": False, "files_per_block": 2, **options}
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    build("frames", out, part="0/2", **asked)
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    if not damaged:
        report = build("frames", out, part="1/2", **asked)
        assert report.hosts == {"n1": 3, "n2": 3}
        assert "\n      n1: 3 blocks\n      n2: 3 blocks\n" in str(report)
        assert same(open_output(out).array.compute(), expected)
        return
    damage(frames.parent / f"{out}.part")
    with pytest.raises(OutputError, match=r"block 0, written by n1, (has other bytes when|cannot be read by) n2"):
        build("frames", out, part="1/2", **asked)
    assert published(frames.parent) == ["frames"]
    report = build("frames", out, restart=True, **asked)
    assert not report.hosts
    assert same(open_output(out).array.compute(), expected)


def test_a_block_of_one_host_is_not_read_back(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daskstack.run, "_read_back", None)
    assert not build("frames", "out.npy", progress=False).hosts


@pytest.fixture
def two_hosts(client: Client) -> Iterator[Client]:
    """Two workers that say they are on hosts of their own."""
    for name, address in zip("ab", client.scheduler_info(n_workers=-1)["workers"], strict=True):
        client.run(lambda name: os.environ.update(SLURMD_NODENAME=name), name, workers=[address])
    yield client
    client.run(lambda: os.environ.pop("SLURMD_NODENAME"))


@pytest.mark.parametrize(("out", "options"), OUTPUTS[:2])
def test_workers_read_back_what_those_of_another_host_wrote(
    frames: Path,
    expected: Array,
    two_hosts: Client,
    monkeypatch: pytest.MonkeyPatch,
    out: str,
    options: dict[str, Any],
) -> None:
    asked: dict[str, Any] = {"scheduler": two_hosts, "progress": False, "files_per_block": 2, **options}
    real = daskstack.run._read_back

    def read_back(plan: Any, folder: str, done: Any, hosts: Any) -> None:
        damage(Path(folder))
        real(plan, folder, done, hosts)

    with monkeypatch.context() as patch:
        patch.setattr(daskstack.run, "_read_back", read_back)
        with pytest.raises(OutputError) as caught:
            build("frames", out, **asked)
    wrong = "has other bytes when {} reads it" if out == "out.npy" else "cannot be read by {}: "
    assert any(
        caught.value.message.startswith(f"block 0, written by {writer}, {wrong.format(reader)}")
        for writer, reader in ("ab", "ba")
    )
    assert published(frames.parent) == ["frames"]
    report = build("frames", out, restart=True, **asked)
    assert sorted(report.hosts) == ["a", "b"]
    assert sum(report.hosts.values()) == 6
    assert same(open_output(out).array.compute(), expected)


def test_what_a_worker_of_a_killed_client_still_writes_is_waited_for_and_what_is_done_is_kept(frames: Path) -> None:
    asked: dict[str, Any] = {"progress": False, "files_per_block": 2}
    build("frames", "out.npy", part="0/2", **asked)
    path = next((frames.parent / "out.npy.part").rglob(WRITERS))
    left = path.open()
    fcntl.flock(left, fcntl.LOCK_SH)

    def end_once_the_folder_is_taken_over() -> None:
        until(lambda: not path.exists(), "the next run")
        left.close()

    worker = threading.Thread(target=end_once_the_folder_is_taken_over)
    worker.start()
    report = build("frames", "out.npy", **asked)
    worker.join()
    assert report.read == 6


def test_a_worker_with_other_versions_is_named(
    frames: Path, two_hosts: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    with pytest.raises(
        DaskstackError, match=r"the worker on [ab] has daskstack \S+ \(here 0\.1\), dask \S+ \(here 0\.1\), "
    ):
        build("frames", "out.npy", scheduler=two_hosts, progress=False)
    assert published(frames.parent) == ["frames"]


def test_a_line_of_progress_tells_blocks_files_a_second_and_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    with Progress(4000, "files", wanted=True, blocks=40) as progress:
        now += 61
        progress.update(1000, 122_000_000, 0)
        now += 10
        progress.update(1000, 122_000_000, 1)  # less than a minute later
        now += 51
        progress.update(1000, 122_000_000, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        " 25%  1,000/4,000 files  122 MB  2.00 MB/s  bad 0  left 3:03  16 files/s  1/40 blocks  until 1970-01-01 00:03"
    )
    assert lines[1] == (
        " 75%  3,000/4,000 files  366 MB  3.00 MB/s  bad 1  left 0:41  25 files/s  3/40 blocks  until 1970-01-01 00:00"
    )
    assert len(lines) == 3  # the last one at the end
    monkeypatch.undo()
    time.tzset()
