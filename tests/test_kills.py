"""Kills, stops and crowds: whatever is killed, and whenever, the final name holds nothing or what is right."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from conftest import image

from daskstack import build, receipts

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
SHORT = {"threads": 6, "processes": 2, "workers": 2}
LONG = {"threads": 60, "processes": 25, "workers": 20}

# Every Python process of the command imports this: it logs each source that is opened, and takes its time.
SITE = f"""
import os, time
real = os.open
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
    if not path.name.endswith(".json") or b'"daskstack"' not in data:
        return data
    text = json.loads(data)
    holder = text.get("attributes", text)
    del holder["daskstack"]["created"], holder["crc32c"]
    return json.dumps(text).encode()


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
        for folder in self.folder.glob(f"{self.out}.part/*"):
            with suppress(FileNotFoundError):  # it is done this very moment
                found |= set(receipts.read(str(folder), folder.name))
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
        opened = opened[1:]  # the first file's header says what is due
        self.reread += [name for name in opened if int(name.split(".")[0]) // PER_BLOCK in safe]

    def kill_one(self) -> None:
        before = self.receipts()
        missing = FILES // PER_BLOCK - len(before)
        with self.running() as child:
            if self.rng.random() < 0.1:
                time.sleep(self.rng.uniform(0, 2))
            else:
                self._wait_for_a_receipt(child, before)
                time.sleep(self.rng.uniform(0, 0.5) * missing * PER_BLOCK * DELAY / 2)
            self.kills += 1
            orphans = self._kill(child)
            self.landed += bool(self.receipts()) and not (self.folder / self.out).exists()
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
            time.sleep(0.002)

    def _kill(self, child: subprocess.Popen[str]) -> bool:
        """Kill all of it, or its parent alone, or one worker; whether workers without a parent are left."""
        workers = _workers_of(child.pid)
        kind = self.rng.choices(["all", "parent", "worker"], [6, 2, 2])[0] if workers else "all"
        if kind == "worker":
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(workers), signal.SIGKILL)
            _, stderr = child.communicate(timeout=120)
            assert child.returncode == 0 or "error: a worker process was killed\n" in stderr, stderr
            return False
        with suppress(ProcessLookupError):
            if kind == "all":
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()
        child.wait(timeout=60)
        return kind == "parent"

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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("out", OUTS)
def test_a_build_that_is_killed_again_and_again_becomes_what_it_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = killing(tmp_path, out, way, SHORT[way])
    assert made.landed > made.kills / 2


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("out", OUTS)
def test_the_same_of_more_than_a_hundred_kills_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = killing(tmp_path, out, way, LONG[way])
    print(f"{out} {way}: {made.kills} kills, {made.landed} between first receipt and publication, {made.runs} runs")
    assert made.landed >= 0.8 * made.kills
