"""Every system call of a run fails once, or from then on for good: no output, or a right one, and then it goes on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import image
from faultkit import ERRORS, SHORT, TORN, WRITES, Fault, Files, finished, injected, tree

from daskstack import build, verify
from daskstack.errors import DaskstackError

ITEMS = 3
OUTPUTS: dict[str, dict[str, Any]] = {
    "out.npy": {"labels": {"odd": "[13]"}},
    "out.zarr": {"chunks": (1, 5, 4), "shards": (1, 5, 8)},
    "two.zarr": {"zarr_format": 2, "chunks": (1, 5, 7)},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small files, and some of the user's beside them and in the folder of the outputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(ITEMS):
        np.save(tmp_path / "in" / f"{k}.npy", image(k))
    (tmp_path / "in" / "notes.txt").write_text("mine")
    for name in ("mine", "other.npy", "data.npy", "manifest.json"):
        (tmp_path / name).write_text("mine")
    return tmp_path


def run(name: str, **options: Any) -> None:
    build("in", name, files_per_block=1, progress=False, **OUTPUTS[name], **options)


def counted(folder: Path, name: str, **options: Any) -> dict[str, int]:
    """How many calls of each kind a run makes, none failing; its output is removed."""
    with injected(Fault(**options), folder) as fault:
        run(name, scheduler="synchronous")
    assert fault.hits == 0
    remove(folder, name)
    return fault.counts


def whole_output(folder: Path, name: str) -> dict[str, bytes]:
    """The files of a right output, which is removed."""
    run(name)
    assert verify(name, data=True, inputs=True, progress=False).status == 0
    whole = finished(folder / name)
    assert len(whole) >= 4
    remove(folder, name)
    return whole


def remove(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name.partition('.')[0]}.*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def faults(call: str, number: int, *, thin: bool = False, step: int = 1, **options: Any) -> Iterator[Fault]:
    """Each call in turn, or one in so many, once and for good (of a thin choice in turns); the errors take turns."""
    errors = (*ERRORS, SHORT, TORN) if call in WRITES else ERRORS
    for n in range(1, number + 1, step):
        for for_good in (False, True):
            if not thin or for_good == (n % 2 == 0):
                yield Fault(call, n, errors[(n // 2 + n + 2 * for_good) % len(errors)], for_good, **options)


def survive(folder: Path, name: str, fault: Fault, **options: Any) -> None:
    """A run with a fault: a clear error, or none."""
    with injected(fault, folder):
        try:
            run(name, **options)
        except DaskstackError as exc:
            said = (exc.message, exc.advice)
        except OSError as exc:
            raise AssertionError(f"{fault}: {exc!r}") from exc
        else:
            said = ("done", "nothing")
    assert all(said), fault
    assert fault.hits, fault


def go_on(folder: Path, name: str, whole: dict[str, bytes], before: Files, fault: Fault, **options: Any) -> None:
    """The same run without a fault makes the output, leaves nothing beside it, and touches nothing of the user's."""
    run(name, **options)
    if (folder / f"{name}.part").exists():  # it could not be deleted
        run(name, **options)
    assert finished(folder / name) == whole, fault
    names = {path.partition("/")[0] for path in (*whole, *before)}
    assert sorted(os.listdir(folder)) == sorted(names), fault
    assert others(folder, name) == before, fault
    remove(folder, name)


def others(folder: Path, name: str) -> Files:
    return tree(folder, besides=(name.partition(".")[0],))


IN_TASKS = ("pwrite", "writev", "fsync", "rename")
MANY = ("open", "close", "fsync", "mkdir")  # of which both versions of Zarr make most in the same lines
CASES = [
    (name, call, scheduler)
    for name in OUTPUTS
    for call in ("pwrite", "writev", "fsync", "rename", "renameat2", "mkdir", "unlink", "open", "close")
    for scheduler in ("synchronous", "threads")
    if scheduler == "synchronous" or name == "out.npy" or (name == "out.zarr" and call in IN_TASKS)
]


@pytest.mark.parametrize(("name", "call", "scheduler"), CASES)
def test_every_call_fails_once_and_for_good(folder: Path, name: str, call: str, scheduler: str) -> None:
    whole, counts, before = whole_output(folder, name), counted(folder, name), others(folder, name)
    assert counts[call] >= 1
    step = 3 if name == "two.zarr" and call in MANY else 1
    for fault in faults(call, counts[call], thin=scheduler == "threads" or name != "out.npy", step=step):
        survive(folder, name, fault, scheduler=scheduler)
        assert finished(folder / name) in ({}, whole), fault
        go_on(folder, name, whole, before, fault, scheduler=scheduler)


@pytest.mark.parametrize("call", ["link", "rename", "unlink"])
def test_without_an_exclusive_rename_every_link_fails(folder: Path, call: str) -> None:
    whole, before = whole_output(folder, "out.npy"), others(folder, "out.npy")
    counts = counted(folder, "out.npy", renameat2=False)
    assert counts["link"] == 4  # the staging folder has none
    for fault in faults(call, counts[call], renameat2=False):
        survive(folder, "out.npy", fault)
        if Path("out.npy").exists():
            assert finished(folder / "out.npy") == whole, fault
        go_on(folder, "out.npy", whole, before, fault)


@pytest.mark.parametrize("call", ["rename", "renameat2", "mkdir", "fsync", "unlink", "open"])
@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_an_older_output_stays_whole_until_the_new_one_is(folder: Path, name: str, call: str) -> None:
    whole, before = whole_output(folder, name), others(folder, name)
    run(name, limit=2)
    with injected(Fault(), folder) as count:
        run(name, overwrite=True)
    remove(folder, name)
    for fault in faults(call, count.counts[call]):
        if fault.n <= count.counts[call] - 7:  # what comes before is that of any run
            continue
        run(name, limit=2)
        old = finished(folder / name)
        survive(folder, name, fault, overwrite=True)
        found = finished(folder / name)
        assert found in (old, whole) or (fault.for_good and not Path(name).exists()), fault
        go_on(folder, name, whole, before, fault, overwrite=True)


def data_calls(log: list[tuple[str, str, int, int]], call: str) -> list[tuple[int, str, int, int]]:
    """The calls of a kind on files that hold pixels of blocks: which of its kind, file, offset and length."""
    every = [entry for entry in log if entry[0] == call]
    ours = [(n, entry) for n, entry in enumerate(every, 1) if "/unfinished/" in entry[1] or entry[3] == 70]
    return [(n, *entry[1:]) for n, entry in ours]


@pytest.mark.parametrize("block", range(ITEMS))
def test_after_a_failed_sync_a_shard_is_written_again(folder: Path, block: int) -> None:
    """The kernel tells of a failed sync once: the next one of the same file succeeds, though the pixels are lost."""
    whole = whole_output(folder, "out.zarr")
    with injected(Fault(), folder) as fault:
        run("out.zarr", scheduler="synchronous")
    remove(folder, "out.zarr")
    n = data_calls(fault.log, "fsync")[block][0]
    with (
        injected(Fault("fsync", n), folder) as fault,
        pytest.raises(DaskstackError, match=r"^cannot write .*/c\.\d\.0\.0: "),
    ):
        run("out.zarr", scheduler="synchronous")
    assert len(data_calls(fault.log, "writev")) == block + 1
    with injected(Fault(), folder) as again:
        run("out.zarr", scheduler="synchronous")
    assert len(data_calls(again.log, "writev")) == ITEMS - block
    assert not {path for _, path, *_ in data_calls(again.log, "fsync")} & {
        path for _, path, *_ in data_calls(fault.log, "writev")
    }
    assert finished(folder / "out.zarr") == whole


@pytest.mark.parametrize("block", range(ITEMS))
def test_after_a_failed_synced_write_a_block_is_written_again(folder: Path, block: int) -> None:
    """A .npy is written through O_DSYNC, so that a write is its own sync."""
    whole = whole_output(folder, "out.npy")
    with injected(Fault(), folder) as fault:
        run("out.npy", scheduler="synchronous")
    remove(folder, "out.npy")
    blocks = data_calls(fault.log, "pwrite")
    assert len(blocks) == ITEMS
    with injected(Fault("pwrite", blocks[block][0]), folder), pytest.raises(DaskstackError, match=r"^cannot write "):
        run("out.npy", scheduler="synchronous")
    with injected(Fault(), folder) as again:
        run("out.npy", scheduler="synchronous")
    due = [offset for _, _, offset, _ in blocks[block:]]
    assert [offset for _, _, offset, _ in data_calls(again.log, "pwrite")] == due
    assert finished(folder / "out.npy") == whole


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace, which lets the kernel fail")
@pytest.mark.parametrize(
    ("call", "when", "error"),
    [("pwrite64", "5", "EIO"), ("fsync", "8+", "EIO"), ("renameat2", "4", "EDQUOT"), ("writev", "2+", "ENOSPC")],
)
def test_what_the_kernel_refuses_on_the_command_line(folder: Path, call: str, when: str, error: str) -> None:
    """The same, but with nothing replaced: the real command, system calls refused by number."""
    whole, before = whole_output(folder, "out.npy"), others(folder, "out.npy")
    command = [sys.executable, "-m", "daskstack", "build", "in", "out.npy", "-q"]
    command += ["--files-per-block", "1", "--scheduler", "synchronous", "--label", "odd=[13]"]
    inject = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:error={error}:when={when}",
    ]
    done = subprocess.run([*inject, *command], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.match(r"error: cannot write out\.npy\S*: ", done.stderr)
    assert "\nnext  " in done.stderr
    assert finished(folder / "out.npy") == {}
    go_on(folder, "out.npy", whole, before, Fault(call))
