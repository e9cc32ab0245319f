"""Faults for real: kill -9, signals, full disks, quotas, folders that cannot be written."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Array, Run, image, need_root, published, same
from faultkit import calls_of, struck
from forkserver import python

from daskstack import build, files
from daskstack.errors import DaskstackError, NoSpaceError, OutputError

KILLS = 12


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    """A folder ``many`` of 600 small .npy files in the current one; what it becomes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    whole = image(3, (600, 16, 16))
    for k, item in enumerate(whole):
        np.save(tmp_path / "many" / f"{k}.npy", item)
    return whole


BUILD = ("build", "many", "out.npy", "-q", "--files-per-block", "1")


def test_sigkill_before_any_call_leaves_nothing_under_the_final_name(many: Array, tmp_path: Path) -> None:
    calls = calls_of(*BUILD)
    reference = Path("out.npy").read_bytes()
    for path in tmp_path.glob("out.*"):
        path.unlink()
    rng = random.Random(0)
    for _ in range(KILLS):  # each goes on where the one before was
        assert struck("SIGKILL", rng.randrange(1, calls // KILLS), *BUILD) == (-signal.SIGKILL, "")
        assert not Path("out.npy").exists()
    assert struck("SIGKILL", 0, *BUILD)[0] == 0
    assert Path("out.npy").read_bytes() == reference
    assert same(np.load("out.npy"), many)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["many", "out.npy", "out.npy.index.csv", "out.npy.json"]


@pytest.mark.parametrize("moment", [0.02, 0.5, 0.97])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGXCPU"])
def test_a_signal_ends_the_run_in_order(many: Array, tmp_path: Path, number: str, moment: float) -> None:
    command = [*BUILD, "--limit", "500", "--threads", "2"]
    calls = calls_of(*command)
    for path in tmp_path.glob("out.*"):
        path.unlink()
    status, stderr = struck(number, round(moment * calls), *command)
    assert status == 75, stderr
    assert "Traceback" not in stderr
    kept = (
        "nothing was kept"
        if not (tmp_path / "out.npy.part").exists()
        else r"\d+ of 500 blocks are safe in out\.npy\.part"
    )
    assert re.search(rf"^stopped \({number}\): {kept}$", stderr, re.MULTILINE)
    assert f"next  daskstack {' '.join(command)}\n" in stderr
    assert published(tmp_path) == ["many"]


# -- full disks -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of about 3 MB that root mounts."""
    need_root("mounts a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", str(disk)]
    else:
        image_file = tmp_path / "disk.img"
        subprocess.run(["truncate", "-s", "4M", image_file], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image_file], check=True)
        command = ["mount", "-o", "loop", str(image_file), str(disk)]
    subprocess.run(command, check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight .npy files that make 4 MB."""
    folder = tmp_path / "large"
    folder.mkdir()
    for k in range(8):
        np.save(folder / f"{k}.npy", np.full((256, 1024), k, "uint16"))
    return folder


def clean(disk: Path) -> bool:
    return set(os.listdir(disk)) <= {"lost+found", "mine"}


@pytest.mark.parametrize("when", ["before", "reserving", "writing"])
def test_a_full_disk_is_one_clear_error(
    small_disk: Path, large: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    (small_disk / "mine").write_bytes(b"mine")
    free = files.free_space(str(small_disk)) or 0
    if when != "before":
        monkeypatch.setattr("daskstack.files.free_space", lambda _: 1 << 40)
    if when == "writing":  # a file system without fallocate; then the disk fills up block by block
        monkeypatch.setattr(files, "_fallocate", lambda *_: False)
    with pytest.raises(NoSpaceError) as caught:
        build(large, small_disk / "out.npy", progress=False, scheduler="synchronous")
    assert str(small_disk / "out.npy") in str(caught.value)
    assert "needed, " in str(caught.value) or "needs 4.2 MB" in str(caught.value)
    monkeypatch.undo()
    if when == "writing":
        kept = re.search(r"; (\d) blocks kept \(up to ", str(caught.value))
        assert kept is not None
        assert f"to give up: rm -r {small_disk}/out.npy.part" in str(caught.value)
        assert published(small_disk) == [name for name in ("lost+found", "mine") if (small_disk / name).exists()]
        return
    assert clean(small_disk)
    assert (files.free_space(str(small_disk)) or 0) >= free - 20_000


def test_a_full_disk_on_the_command_line(small_disk: Path, large: Path, daskstack: Run) -> None:
    done = daskstack("build", large, small_disk / "out.npy")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {small_disk}/out.npy needs 4.2 MB; ")
    assert done.stderr.endswith("next  make room, or choose another disk\n")
    assert clean(small_disk)


def test_a_limit_on_file_sizes_is_one_clear_error(large: Path, tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from daskstack.cli import main\n"
        "main(sys.argv[1:])"
    )
    done = python("-c", script, "build", large, "out.npy", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the limit on file sizes (ulimit -f, or the file system's own) is reached; 4.2 MB needed" in done.stderr
    assert os.listdir(tmp_path) == ["large"]


# -- folders ----------------------------------------------------------------------------------------------------


def as_nobody(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user without rights, who may not even read Python's own files: a first build loads them."""
    need_root("runs as another user")
    script = (
        "import os, sys, tempfile\n"
        "import daskstack\n"
        "from daskstack.cli import main\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    daskstack.build(sys.argv[2], folder + '/first.npy', progress=False)\n"
        "os.setgroups([])\n"
        "os.setegid(65534)\n"
        "os.seteuid(65534)\n"
        "main(sys.argv[1:])"
    )
    for above in (folder, *folder.parents[:3]):
        above.chmod(0o755)
    return python("-c", script, *arguments, cwd=folder)


def test_a_folder_that_cannot_be_written(frames: Path) -> None:
    (frames.parent / "locked").mkdir(mode=0o755)
    done = as_nobody(frames.parent, "build", "frames", "locked/out.npy")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: cannot write locked/out.npy.part: Permission denied",
        "next  choose a place that can be written",
    ]
    assert os.listdir("locked") == []


def test_files_that_cannot_be_read_are_named(frames: Path) -> None:
    (frames / "img_4.tif").chmod(0)
    (frames.parent / "open").mkdir()
    (frames.parent / "open").chmod(0o777)
    done = as_nobody(frames.parent, "build", "frames", "open/out.npy")
    assert done.returncode == 1
    assert (
        "error: 1 of 12 files is bad; open/out.npy not made, 11 of 12 blocks kept\n  frames/img_4.tif  permission denied\n"
        in done.stderr
    )


def test_a_staging_folder_removed_during_the_run(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from daskstack.targets import NpyTarget

    real = NpyTarget.write

    def write(self: NpyTarget, folder: str, start: int, block: Array) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        real(self, folder, start, block)

    monkeypatch.setattr(NpyTarget, "write", write)
    with pytest.raises(OutputError, match=r"cannot write .*data\.npy: No such file or directory"):
        build("frames", "out.npy", progress=False)
    assert os.listdir(frames.parent) == ["frames"]


def test_what_was_removed_from_a_staging_folder_is_made_anew(frames: Path, expected: Array) -> None:
    import shutil

    (frames / "img_4.tif").rename("away.tif")
    (frames / "img_4.tif").write_bytes(b"")
    with pytest.raises(DaskstackError, match="11 of 12 blocks kept"):
        build("frames", "out.npy", files_per_block=1, progress=False)
    os.replace("away.tif", frames / "img_4.tif")
    (place,) = Path().glob("out.npy.part/*/*/data.npy")
    shutil.rmtree(place.parent)
    build("frames", "out.npy", files_per_block=1, progress=False)
    assert same(np.load("out.npy"), expected)
    assert sorted(os.listdir(frames.parent)) == ["frames", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_files_and_descriptors_stay_within_a_limit_of_64(many: Array, tmp_path: Path) -> None:
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "import daskstack\n"
        "daskstack.build('many', 'out.npy', threads=8, progress=False)"
    )
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(np.load("out.npy"), many)


def test_memory_stays_near_threads_times_blocks(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for k in range(48):
        np.save(tmp_path / "in" / f"{k:02}.npy", np.full((1024, 1024), k, "float32"))
    script = (
        "import os, sys, threading, time\n"
        "import daskstack, dask.threaded, tifffile\n"
        "from daskstack import api\n"
        "def anonymous():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(l for l in lines if l.startswith('RssAnon')).split()[1]) << 10\n"
        "before, peak, going = anonymous(), 0, True\n"
        "def watch():\n"
        "    global peak\n"
        "    while going:\n"
        "        peak = max(peak, anonymous())\n"
        "        time.sleep(0.001)\n"
        "thread = threading.Thread(target=watch)\n"
        "thread.start()\n"
        "plan = api.open_stack('in').plan('out.npy', threads=2)\n"
        "api.open_stack('in').to_npy('out.npy', threads=2, progress=False)\n"
        "going = False\n"
        "thread.join()\n"
        "print(peak - before, plan.memory)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True, text=True)
    grown, bound = map(int, done.stdout.split())
    assert grown < bound + (8 << 20)
    assert bound < 40 << 20  # of an array of 192 MiB
