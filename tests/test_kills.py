"""Kills, stops and crowds: whatever is killed, and whenever, the final name holds nothing or what is right."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import image
from dask.local import get_sync
from forkserver import python

import daskstack.run
from daskstack import build, open_stack, receipts, staging
from daskstack.run import How, _prepared
from daskstack.tasks import Place

OUTS = ["out.npy", "out.zarr"]
FILES = 120
PER_BLOCK = 2
TILE = f"{PER_BLOCK},-1,-1"
DELAY = 0.01  # seconds that a source takes to open, so that a kill finds a run at work
WAYS = {
    "threads": ["--scheduler", "threads", "--threads", "2"],
    "processes": ["--scheduler", "processes", "--threads", "2"],
    "workers": ["--workers", "2"],
}
# How often in every run of the tests: each output and each way, though not all of their pairs.
SHORT = [("out.npy", "threads", 5), ("out.zarr", "threads", 5), ("out.zarr", "processes", 2), ("out.npy", "workers", 1)]
LONG = {"threads": 60, "processes": 25, "workers": 20}

# Every Python process of the command imports this: it logs each source that is opened, and takes its time.
SITE = f"""
import os, time
real = os.open
os.fsync, os.O_DSYNC = lambda descriptor: None, 0  # a kill, other than a loss of power, loses nothing that was written
def logged(path, *args, **kwargs):
    if "many" in str(path) and str(path).endswith(".npy"):
        log = real(os.environ["OPENED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, os.path.basename(path).encode() + b"\\n")
        os.close(log)
        time.sleep({DELAY})
    return real(path, *args, **kwargs)
os.open = logged
"""


def contents(folder: Path, out: str) -> dict[str, bytes]:
    """Every file of an output; of its record all but when it was made, and what that decides."""
    stem = out.removesuffix(".npy")
    found = [p for top in folder.iterdir() if top.name.startswith(stem) for p in (top, *top.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): _timeless(p) for p in found if f"{out}.part" not in p.parts}


def _timeless(path: Path) -> bytes:
    data = path.read_bytes()
    if b'"daskstack"' not in data:
        return data

    def without(entry: dict[str, Any]) -> dict[str, Any]:
        if "daskstack" in entry:
            del entry["daskstack"]["created"], entry["crc32c"]
        return entry

    return json.dumps(json.loads(data, object_hook=without)).encode()


@dataclass
class Killing:
    """A build that is killed and given again, until it is done; then once more from the beginning."""

    folder: Path
    out: str
    way: str
    rng: random.Random
    landed: int = 0
    kills: int = 0
    runs: int = 0
    reread: list[str] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        options = ["-q", "--files-per-block", str(PER_BLOCK), *WAYS[self.way]]
        if self.out.endswith(".zarr"):
            options += ["--chunks", TILE, "--shards", TILE]
        return [sys.executable, "-m", "daskstack", "build", "many", self.out, *options]

    def receipts(self) -> set[int]:
        """The blocks that have a receipt."""
        found: set[int] = set()
        root = self.folder / f"{self.out}.part"
        with suppress(FileNotFoundError):  # it is done, or taken over, this very moment
            for name in os.listdir(root):
                if re.fullmatch("[0-9a-f]{16}", name):
                    found |= set(receipts.read(staging.place_in(str(root / name)), name))
        return found

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The command at work in a process group of its own, which is gone afterwards; nothing safe is read again."""
        safe = self.receipts()
        self.runs += 1
        log = self.folder / f"opened.{self.runs}"
        environment = {
            **os.environ,
            "OPENED": str(log),
            "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), os.environ.get("PYTHONPATH", "")]),
        }
        child = subprocess.Popen(
            self.command, stderr=subprocess.PIPE, text=True, cwd=self.folder, env=environment, start_new_session=True
        )
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate(timeout=60)
        opened = log.read_text().split() if log.exists() else []
        assert opened[:2] == ["0.npy"] * len(opened[:2])  # its header says what is due, and how it is laid out
        self.reread += [name for name in opened[2:] if int(name.split(".")[0]) // PER_BLOCK in safe]

    def kill_one(self) -> None:
        before = self.receipts()
        missing = FILES // PER_BLOCK - len(before)
        with self.running() as child:
            if self.rng.random() < 0.05:
                time.sleep(self.rng.uniform(0, 2))
            else:
                self._wait_for_a_receipt(child, before)
                time.sleep(self.rng.uniform(0, 0.5) * missing * PER_BLOCK * DELAY / 2)
            self.kills += 1
            orphans = self._kill(child)
            self.check()
            if orphans:  # they go on beside the next run
                self._resume_beside()
        self.check()

    def _resume_beside(self) -> None:
        with self.running() as child:
            assert child.wait(timeout=120) == 0

    def _wait_for_a_receipt(self, child: subprocess.Popen[str], before: set[int]) -> None:
        deadline = time.monotonic() + 120
        while not self.receipts() - before and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def _kill(self, child: subprocess.Popen[str]) -> bool:
        """Kill all of it, or its parent alone, or one worker; whether workers without a parent are left."""
        workers = _workers_of(child.pid)
        kind = self.rng.choices(["all", "parent", "worker"], [6, 2, 2])[0] if workers else "all"
        if kind == "worker":
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(workers), signal.SIGKILL)
            self.count()  # before the others go on
            _, stderr = child.communicate(timeout=120)
            assert child.returncode == 0 or "error: a worker process was killed\n" in stderr, stderr
            return False
        with suppress(ProcessLookupError):
            if kind == "all":
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
        child.wait(timeout=60)
        self.count()
        return kind == "parent"

    def count(self) -> None:
        """Whether the kill came between the first receipt and publication."""
        self.landed += bool(self.receipts()) and not (self.folder / self.out).exists()

    def check(self) -> None:
        """The final name holds nothing, or what an undisturbed build has made."""
        if (self.folder / self.out).exists():
            assert contents(self.folder, self.out) == contents(self.folder / "reference", self.out)

    def finish(self) -> None:
        """The command once more, undisturbed; then all that it made is taken away."""
        with self.running() as child:
            assert child.wait(timeout=120) == 0
        assert contents(self.folder, self.out) == contents(self.folder / "reference", self.out)
        assert not (self.folder / f"{self.out}.part").exists()
        self.clear()

    def clear(self, into: Path | None = None) -> None:
        for path in self.folder.glob(f"{self.out.removesuffix('.npy')}*"):
            if into is not None:
                path.rename(into / path.name)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _workers_of(pid: int) -> list[int]:
    """Processes of Python's own that a process has spawned, but for the one that tracks resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def killing(folder: Path, out: str, way: str, kills: int) -> Killing:
    (folder / "many").mkdir()
    (folder / "site").mkdir()
    (folder / "reference").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    for k in range(FILES):
        np.save(folder / "many" / f"{k}.npy", image(k))
    made = Killing(folder, out, way, random.Random(f"{out} {way} {kills}"))
    tile = [PER_BLOCK, -1, -1] if out.endswith(".zarr") else None
    done = build("many", out, files_per_block=PER_BLOCK, chunks=tile, shards=tile, progress=False)
    assert done.blocks == FILES // PER_BLOCK
    made.clear(into=folder / "reference")
    while made.kills < kills:
        made.kill_one()
        if len(made.receipts()) > 0.85 * FILES // PER_BLOCK or (folder / out).exists():
            made.finish()
    made.finish()
    assert made.reread == []
    return made


@pytest.mark.parametrize(("out", "way", "kills"), SHORT)
def test_a_build_that_is_killed_again_and_again_becomes_what_it_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, way: str, kills: int
) -> None:
    monkeypatch.chdir(tmp_path)
    made = killing(tmp_path, out, way, kills)
    assert made.landed > made.kills / 2


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("out", OUTS)
def test_the_same_of_more_than_a_hundred_kills_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = killing(tmp_path, out, way, LONG[way])
    sys.stdout.write(
        f"{out} {way}: {made.kills} kills, {made.landed} between first receipt and publication, {made.runs} runs\n"
    )
    assert made.landed >= 0.8 * made.kills


# -- crowds -----------------------------------------------------------------------------------------------------

# Forks processes that have imported everything already, and lets each give the command as a program would.
CROWD = """
import json, os, random, signal, sys, time
import dask.threaded, numcodecs, zarr
import daskstack.api
from daskstack.cli import main

said, seed, kills, *command = sys.argv[1:]
os.fsync, os.O_DSYNC = lambda descriptor: None, 0  # nobody pulls the plug
rng = random.Random(seed)
parts = [["--part", f"{k}/16"] for k in range(16)] + [["--part", f"{rng.randrange(16)}/16"] for _ in range(4)]
jobs = [[] for _ in range(8)] + parts
rng.shuffle(jobs)
running, outcomes = {}, []
for n, job in enumerate(jobs):
    stderr = os.open(f"{said}/{n}", os.O_WRONLY | os.O_CREAT)
    pid = os.fork()
    if not pid:
        os.dup2(stderr, 2)
        main([*command, *job])
    running[pid] = n
for pid in rng.sample(list(running), int(kills)):
    time.sleep(rng.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)
for pid, n in running.items():
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    outcomes.append((status, open(f"{said}/{n}").read()))
print(json.dumps(outcomes))
"""
NAMED = r"error: \S+ is held by another run (of this build|into the same output) \(\S+, pid \d+, since \S+\)\nnext  wait for it, or stop it\n"


def sources(folder: Path, number: int) -> None:
    (folder / "many").mkdir()
    for k in range(number):
        np.save(folder / "many" / f"{k}.npy", image(k))


def crowd(folder: Path, out: str, seed: int, kills: int) -> list[int]:
    """Statuses of eight builds and twenty parts at once; what they, or the command once more, have made is right."""
    said = folder / f"said.{seed}"
    said.mkdir()
    command = ["build", "many", out, "-q", "--threads", "2", "--files-per-block", "2"]
    done = python("-c", CROWD, said, seed, kills, *command, cwd=folder)
    assert done.returncode == 0, done.stderr
    statuses: list[int] = []
    for status, stderr in json.loads(done.stdout):
        statuses.append(status)
        assert status in (0, -signal.SIGKILL) or (status == 1 and re.fullmatch(NAMED, stderr)), (status, stderr)
    if kills:
        assert python("-m", "daskstack", *command, cwd=folder).returncode == 0
    assert contents(folder, out) == contents(folder / "reference", out)
    left = sorted(map(str, (folder / f"{out}.part").rglob("*"))) if (folder / f"{out}.part").exists() else None
    assert left is None
    return statuses


def crowds(folder: Path, out: str, times: int) -> None:
    sources(folder, 40)
    build("many", out, files_per_block=2, progress=False)
    (folder / "reference").mkdir()
    for path in take_away(folder, out):
        path.rename(folder / "reference" / path.name)
    for seed in range(times):
        statuses = crowd(folder, out, seed, kills=8 * (seed % 3))
        assert 0 in statuses
        for path in take_away(folder, out):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def take_away(folder: Path, out: str) -> list[Path]:
    """Everything of an output."""
    return list(folder.glob(f"{out.removesuffix('.npy')}*"))


@pytest.mark.parametrize("out", OUTS)
def test_builds_and_parts_and_kills_at_once_make_one_right_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    crowds(tmp_path, out, 3)


@pytest.mark.long
@pytest.mark.parametrize("out", OUTS)
def test_the_same_of_many_crowds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    crowds(tmp_path, out, 40)


@pytest.mark.parametrize("out", OUTS)
def test_a_part_that_another_part_overtakes_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sources(tmp_path, 4)
    tile = [1, -1, -1] if out.endswith(".zarr") else None
    real = daskstack.run._raise_failures

    def overtaken(*args: Any) -> None:
        """Between the last block of one part and its look at what others have done."""
        monkeypatch.setattr(daskstack.run, "_raise_failures", real)
        assert (
            build("many", out, files_per_block=1, chunks=tile, shards=tile, part=(1, 2), progress=False).blocks_done
            == 4
        )
        real(*args)

    monkeypatch.setattr(daskstack.run, "_raise_failures", overtaken)
    assert build("many", out, files_per_block=1, chunks=tile, shards=tile, part=(0, 2), progress=False).was_there


# -- workers that sleep -----------------------------------------------------------------------------------------

# Forks the last worker of a killed run, which stops before the n-th of its calls that touch files, for each n;
# meanwhile something happens; then it goes on, and whatever it does may change nothing.
SLEEPER = """
import os, shutil, signal, sys
import dask
import numpy as np
import daskstack.staging
from daskstack import build, errors, open_stack
from daskstack.run import How, _prepared
from daskstack.tasks import Place

daskstack.staging.WRITE_ENDS = 0  # it sleeps longer than that
out, happens = sys.argv[1:]
os.fsync, os.O_DSYNC = lambda descriptor: None, 0  # nobody pulls the plug
TILE = dict(chunks=(1, -1, -1), shards=(1, -1, -1)) if out.endswith(".zarr") else {}
CALLS = {"open", "pwrite", "writev", "rename", "fsync", "unlink"}
if out.endswith(".npy") and happens == "resumed_with_other_files":
    CALLS.remove("pwrite")  # a descriptor that is open leads to the output itself: the one gap that is left


def put(add, ns):
    for k in range(2):
        np.save(f"in/{k}.npy", np.full((3, 5), 7 * k + 1 + add, "uint16"))
        os.utime(f"in/{k}.npy", ns=(ns, ns))


def run(**more):
    return build("in", out, files_per_block=1, scheduler="synchronous", progress=False, **{**TILE, **more})


def work(n):
    stack = open_stack("in", files_per_block=1)
    plan = stack.plan(out, **TILE)
    held = _prepared(plan, stack, How())
    os.close(held.lock)  # its parent is dead
    graph, keys = stack.tasks(plan.bounds, range(2), Place(plan.target, held.place, plan.plan_id))
    left = n

    def stopping(real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(*args, **kwargs)
        return call

    for name in CALLS:
        setattr(os, name, stopping(getattr(os, name)))
    dask.get(graph, keys)


def published():
    run()


def resumed_with_other_files():
    put(3, 2)
    try:
        run()
    except errors.OutputError:  # a block has its receipt already
        run(restart=True)


def restarted_with_other_options():
    run(restart=True, labels={"odd": "1"})


def restarted_with_other_files():
    put(3, 2)
    run(restart=True)


def overwritten():
    run()
    put(3, 2)
    run(overwrite=True)


def without(k, **more):
    with open(f"in/{k}.npy", "r+b") as f:
        data = f.read()
        f.truncate(3)
    found = os.stat(f"in/{1 - k}.npy").st_mtime_ns
    try:
        run(**more)
    except errors.BadFilesError:
        pass
    finally:
        with open(f"in/{k}.npy", "wb") as f:
            f.write(data)
        os.utime(f"in/{k}.npy", ns=(found, found))


def restarted_and_killed():
    without(0, restart=True)


def restarted_with_other_files_and_killed():
    put(3, 2)
    without(0, restart=True)


def resumed_with_other_files_and_killed():
    put(3, 2)
    try:
        without(1)
    except errors.OutputError:
        without(1, restart=True)


def everything():
    return {
        os.path.join(at, name): open(os.path.join(at, name), "rb").read()
        for at, _, names in os.walk(".") for name in names
    }


os.mkdir("in")
stops = 0
while True:
    put(0, 1)
    pid = os.fork()
    if not pid:
        work(stops + 1)
        os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    stops += 1
    globals()[happens]()
    before = everything()
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    if happens.endswith("killed"):
        try:
            run()
        except errors.OutputError:  # it had a receipt half written, and that says what is true: other files
            run(restart=True)
    else:
        assert everything() == before, (stops, sorted(n for n in before if everything().get(n) != before[n]))
    if out.endswith(".zarr"):
        import zarr
        data = zarr.open_group(out)["data"][...]
    else:
        data = np.load(out)
    due = np.stack([np.load(f"in/{k}.npy") for k in range(2)])
    assert np.array_equal(data, due), (stops, data, due)
    left = sorted(n for n in os.listdir(".") if n.endswith(".part"))
    assert not left, (stops, left)
    for name in os.listdir("."):
        if name.startswith("out"):
            shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)
print(stops)
"""
HAPPENINGS = [
    "published",
    "resumed_with_other_files",
    "restarted_with_other_options",
    "restarted_with_other_files",
    "overwritten",
    "restarted_and_killed",
    "restarted_with_other_files_and_killed",
    "resumed_with_other_files_and_killed",
]


@pytest.mark.parametrize("happens", HAPPENINGS)
@pytest.mark.parametrize("out", OUTS)
def test_a_worker_that_slept_changes_nothing(tmp_path: Path, out: str, happens: str) -> None:
    done = python("-c", SLEEPER, out, happens, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8


@pytest.mark.parametrize(
    ("out", "options"),
    [("out.npy", {}), ("out.zarr", {"chunks": (1, -1, -1)}), ("out.zarr", {"chunks": (2, 3, 4), "zarr_format": 2})],
)
def test_tasks_that_run_twice_and_in_any_order_leave_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    sources(tmp_path, 12)
    build("many", out, files_per_block=2, progress=False, **options)
    (tmp_path / "reference").mkdir()
    for path in take_away(tmp_path, out):
        path.rename(tmp_path / "reference" / path.name)
    stack = open_stack("many", files_per_block=2)
    plan = stack.plan(out, **options)
    held = _prepared(plan, stack, How())
    graph, keys = stack.tasks(plan.bounds, range(plan.blocks), Place(plan.target, held.place, plan.plan_id))
    assert len(keys) > 1
    for key in random.Random(0).sample(keys * 2, 2 * len(keys)):
        assert get_sync(graph, key).error is None
    os.close(held.lock)
    for path in (tmp_path / "many").iterdir():  # all is there, and nothing is read again
        found = path.stat()
        path.write_bytes(path.read_bytes()[:128] + bytes(found.st_size - 128))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    build("many", out, files_per_block=2, progress=False, **options)
    assert contents(tmp_path, out) == contents(tmp_path / "reference", out)
