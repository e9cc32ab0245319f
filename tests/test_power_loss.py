"""Power lost at any moment: what has a receipt is right afterwards, and what has its final name is whole.

An ext4 on a loop device is shut down by its own ioctl, which drops all that was not made durable, as when
the power fails; then it is mounted again.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import image, need_root

from daskstack import build, receipts, verify

pytestmark = pytest.mark.syncs
ITEMS = 120
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN of fs/ext4/ext4.h
NO_LOG_FLUSH = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: the journal in memory is lost as well
OPTIONS = ("--files-per-block", "1", "--threads", "2")


class Disk:
    """A small ext4 that can lose its power."""

    def __init__(self, folder: Path) -> None:
        self.image, self.path = folder / "disk.img", folder / "disk"
        self.path.mkdir()
        subprocess.run(["truncate", "-s", "64M", self.image], check=True)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.path], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self.path], check=True)

    def lose_power(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    need_root("mounts a small file system")
    made = Disk(tmp_path)
    made.mount()
    yield made
    made.unmount()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(ITEMS):
        np.save(folder / f"{k}.npy", image(k, (64, 64)))
    return folder


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


def sync_receipts(out: Path) -> None:
    """Put the receipts, and nothing else, on the disk, as the system would do in its own time."""
    for path in out.parent.glob(f"{out.name}.part/[0-9a-f]*/[0-9a-f]*/receipts/*"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def receipts_right(out: Path, whole: Path) -> int:
    """How many blocks have a receipt; each holds the bytes of an undisturbed build."""
    found = 0
    for folder in out.parent.glob(f"{out.name}.part/[0-9a-f]*/[0-9a-f]*"):
        for k in receipts.read(str(folder), folder.parent.name):
            found += 1
            if out.suffix == ".npy":
                size = 64 * 64 * 2
                with open(folder / "data.npy", "rb") as f, open(whole, "rb") as g:
                    f.seek(128 + k * size)
                    g.seek(128 + k * size)
                    assert f.read(size) == g.read(size)
            else:
                shard = Path("data") / f"c.{k}.0.0"
                assert (folder / "data.zarr" / shard).read_bytes() == (whole / shard).read_bytes()
    return found


def lose_power_once(disk: Disk, sources: Path, out: Path, whole: Path, rng: random.Random, seconds: float) -> int:
    command = [sys.executable, "-m", "daskstack", "build", str(sources), str(out), "-q", *OPTIONS]
    if out.suffix == ".zarr":
        command += ["--chunks", "1,64,64", "--shards", "1,64,64"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(out.parent.glob(f"{out.name}.part/[0-9a-f]*/[0-9a-f]*/receipts/*")), child)
    time.sleep(rng.uniform(0, seconds))
    sync_receipts(out)
    disk.lose_power()
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    disk.unmount()
    disk.mount()
    if out.exists():
        report = verify(out, data=True, inputs=True, progress=False)
        assert report.status == 0, report
        return 0  # its blocks have left the staging folder
    return receipts_right(out, whole)


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.long)])
def test_what_has_a_receipt_outlives_a_loss_of_power(
    disk: Disk, sources: Path, tmp_path: Path, name: str, times: int
) -> None:
    whole = tmp_path / f"whole{Path(name).suffix}"
    tiling: dict[str, Any] = {"chunks": (1, 64, 64), "shards": (1, 64, 64)} if name == "out.zarr" else {}
    begin = time.monotonic()
    build(sources, whole, files_per_block=1, progress=False, **tiling)
    seconds = (time.monotonic() - begin) / 2
    rng, kept = random.Random(times), 0
    for _ in range(times):
        kept += lose_power_once(disk, sources, disk.path / name, whole, rng, seconds)
        if (disk.path / name).exists():  # begin another one
            for path in disk.path.glob("out.*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert kept > 0
    build(sources, disk.path / name, files_per_block=1, progress=False, **tiling)
    assert verify(disk.path / name, data=True, inputs=True, progress=False).status == 0
