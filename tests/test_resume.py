"""What long jobs are promised: a stopped run goes on where it was, with the same files and options or not at all."""

from __future__ import annotations

import csv
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import tifffile
import zarr
from conftest import Array, Run, image, published, same
from distributed import Client, LocalCluster

import daskstack as ds
from daskstack import build, open_stack, receipts, staging, store
from daskstack.errors import BadFilesError, DaskstackError, OutputError, OutputExistsError, UsageError

# Each target so that a block is one file of the twelve.
TARGETS: dict[str, dict[str, Any]] = {
    "out.npy": {"files_per_block": 1},
    "out.zarr": {"chunks": (1, -1, -1), "shards": (1, -1, -1)},
    "two.zarr": {"chunks": (1, -1, -1), "zarr_format": 2},
}
EACH_TARGET = pytest.mark.parametrize("out", TARGETS)
NPY_AND_ZARR = pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
ON_COMMAND_LINE = {
    "out.npy": ["--files-per-block", "1"],
    "out.zarr": ["--chunks", "1,-1,-1", "--shards", "1,-1,-1"],
}


def make(out: str, sources: Any = "frames", **options: Any) -> ds.report.StoreReport:
    return build(sources, out, **{"progress": False, **TARGETS.get(out, {}), **options})


def stored(out: str) -> Array:
    if out.endswith(".npy"):
        return np.asarray(np.load(out))
    return np.asarray(zarr.open_array(f"{out}/data", mode="r")[:])


def index_of(out: str, column: str) -> list[str]:
    """A column of the index, as text."""
    return ds.targets.format_of(out).read_index(out, [column])[column]


# -- what is opened, listed, looked at --------------------------------------------------------------------------

_events: list[tuple[str, str]] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _events is not None and event in ("open", "os.scandir", "os.listdir"):
        _events.append((event, str(arguments[0])))


sys.addaudithook(_listen)  # it can never be removed; it listens only while a test asks for it


@contextmanager
def listening() -> Iterator[list[tuple[str, str]]]:
    """Every file that this process opens and every folder that it lists, whoever does it."""
    global _events  # noqa: PLW0603  # an audit hook has no other way to be told
    _events = heard = []
    try:
        yield heard
    finally:
        _events = None


def opened(heard: Sequence[tuple[str, str]], folder: str = "frames") -> set[int]:
    """Numbers of the files of a folder that were opened."""
    names = [path for event, path in heard if event == "open" and f"/{folder}/img_" in path]
    return {int(name.rpartition("_")[2].partition(".")[0]) for name in names}


def log_of(path: str) -> Path:
    return Path(path).parent.parent / "reads.log"


def read_logged(path: str) -> Array:
    """A reader that tells, from whatever process, what it reads; it believes no file that holds ``bad``."""
    with log_of(path).open("a") as f:
        f.write(f"{Path(path).stem.rpartition('_')[2]}\n")
    if Path(path).read_bytes() == b"bad":
        raise ValueError("no good")
    return tifffile.imread(path)


def logged() -> list[int]:
    """Numbers of the files that it has read since the last time this was asked for, sorted."""
    found = sorted(map(int, Path("reads.log").read_text().split()))
    Path("reads.log").unlink()
    return found


# -- stopping ---------------------------------------------------------------------------------------------------


@contextmanager
def spoilt(*numbers: int, folder: str = "frames") -> Iterator[None]:
    """Some files hold three bytes for a while; afterwards they are as they were, their times too."""
    paths = [Path(f"{folder}/img_{k}.tif") for k in numbers]
    before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    for path in paths:
        path.write_bytes(b"bad")
    try:
        yield
    finally:
        for path, data, mtime in before:
            path.write_bytes(data)
            os.utime(path, ns=(mtime, mtime))


def stop(out: str, *numbers: int, **options: Any) -> None:
    """A run that comes to its end with all blocks but those of some files."""
    with spoilt(*(numbers or (7,))), pytest.raises(BadFilesError):
        make(out, **options)


def kept_bytes(out: str) -> dict[str, bytes]:
    """All that is kept of a run, but for the files of locks, which tell at most who came last."""
    locks = (staging.LOCK, staging.TURN, staging.PUBLISHING)
    return {str(p): p.read_bytes() for p in Path(f"{out}.part").rglob("*") if p.is_file() and p.name not in locks}


def staged(out: str) -> Path:
    """The one staging folder of an output."""
    (folder,) = [p for p in Path(f"{out}.part").iterdir() if len(p.name) == 16]
    return folder


def blocks_kept(out: str) -> set[int]:
    """The blocks that have a receipt."""
    return set(receipts.read(str(staged(out)), staged(out).name))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
        local_directory=str(tmp_path_factory.mktemp("workers")),
    ) as cluster:
        yield cluster


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug in these tests: no build of the very many waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "O_DSYNC", 0)


# -- only what is missing is done -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "scheduler"),
    [(out, scheduler) for out in TARGETS for scheduler in ("synchronous", "threads", "client")]
    + [("out.npy", "processes")],
)
def test_after_bad_files_were_mended_only_they_are_read(
    frames: Path, expected: Array, request: pytest.FixtureRequest, out: str, scheduler: str, caplog: Any
) -> None:
    options: dict[str, Any] = {"sources": "frames/*.tif", "reader": read_logged, "scheduler": scheduler, "threads": 2}
    if scheduler == "client":
        options["scheduler"] = request.getfixturevalue("cluster").scheduler_address
    with spoilt(2, 5, 11), pytest.raises(BadFilesError) as caught:
        make(out, **options)
    folder = staged(out)
    assert str(caught.value).splitlines() == [
        f"3 of 12 files are bad; {out} not made, 9 of 12 blocks kept",
        *(f"  frames/img_{k}.tif  cannot be read: ValueError: no good" for k in (2, 5, 11)),
        f"list  {folder}/bad.csv",
        "next  mend them, same command (reads only 3 blocks again); or --on-error fill",
    ]
    assert list(csv.reader((folder / "bad.csv").read_text().splitlines())) == [
        ["file", "problem"],
        *([str(frames / f"img_{k}.tif"), "cannot be read: ValueError: no good"] for k in (2, 5, 11)),
    ]
    assert logged() == [0, *range(12)]  # the first one's header as well
    assert published(frames.parent) == ["frames"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "daskstack"):
        report = make(out, **options, progress=None)
    assert caplog.messages == ["resuming: 9 of 12 blocks are on disk"]
    assert logged() == [0, 2, 5, 11]
    assert same(stored(out), expected)
    assert (report.blocks, report.blocks_done, report.filled) == (12, 12, ())
    assert not Path(f"{out}.part").exists()
    assert [int(size) for size in index_of(out, "size")] == [
        (frames / f"img_{k}.tif").stat().st_size for k in range(12)
    ]


def read_out_of_memory(path: str) -> Array:
    """What asks for too much at one file, while another one says so."""
    if path.endswith("_5.tif") and Path("memory is short").exists():
        raise MemoryError
    return read_logged(path)


@EACH_TARGET
def test_after_an_error_that_is_no_file_s_fault(frames: Path, expected: Array, out: str) -> None:
    options: dict[str, Any] = {"sources": "frames/*.tif", "reader": read_out_of_memory, "scheduler": "synchronous"}
    Path("memory is short").touch()
    with pytest.raises(DaskstackError) as caught:
        make(out, **options)
    assert str(caught.value) == "there is not enough memory for a block\nnext  fewer threads, or a memory_limit"
    kept = blocks_kept(out)
    assert len(kept) == sum(k in kept for k in logged()[1:]) > 0  # what was read is there, and was read once
    Path("memory is short").unlink()
    make(out, **options)
    assert logged() == [0, *(k for k in range(12) if k not in kept)]
    assert same(stored(out), expected)


def fail_at_write(monkeypatch: pytest.MonkeyPatch, out: str, nth: int, error: BaseException) -> None:
    """Let the nth writing of a block fail."""
    target = ds.targets.format_of(out)
    real, written = target.write, 0

    def write(self: Any, folder: str, start: int, part: Array) -> None:
        nonlocal written
        written += 1
        if written == nth:
            raise error
        real(self, folder, start, part)

    monkeypatch.setattr(target, "write", write)


@EACH_TARGET
def test_an_interrupt_in_python_says_what_is_safe(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    with monkeypatch.context() as patch:
        fail_at_write(patch, out, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt) as caught:
            make(out, scheduler="synchronous")
    assert caught.value.__notes__ == [f"4 of 12 blocks are safe in {out}.part"]
    kept = blocks_kept(out)
    with listening() as heard:
        make(out)
    assert opened(heard) == {0} | set(range(12)) - kept
    assert len(kept) == 4
    assert same(stored(out), expected)


def test_the_first_block_of_all_stopped_leaves_nothing(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at_write(monkeypatch, "out.npy", 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        make("out.npy", scheduler="synchronous")
    assert caught.value.__notes__ == ["nothing was kept"]
    assert os.listdir(frames.parent) == ["frames"]


# The command line, which sends itself a signal once so many blocks have their receipts.
SIGNALLED = """
import os, signal, sys
from daskstack import receipts
from daskstack.cli import main
number, after, done, real = signal.Signals[sys.argv.pop(1)], int(sys.argv.pop(1)), 0, receipts.add
def add(*arguments):
    global done
    real(*arguments)
    done += 1
    if done == after:
        os.kill(os.getpid(), number)
receipts.add = add
if __name__ == "__main__":
    main()
"""


def signalled(number: str, after: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SIGNALLED, number, str(after), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("out", "number"),
    [("out.npy", name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGXCPU")] + [("out.zarr", "SIGTERM")],
)
def test_a_signal_says_what_is_safe_and_how_to_go_on(frames: Path, expected: Array, out: str, number: str) -> None:
    command = ["build", "frames", out, *ON_COMMAND_LINE[out], "--scheduler", "synchronous"]
    done = signalled(number, 5, *command)
    assert done.returncode == 75
    assert done.stdout == ""
    assert done.stderr.endswith(
        f"stopped ({number}): 5 of 12 blocks are safe in {out}.part\nnext  daskstack {' '.join(command)}\n"
    )
    assert published(frames.parent) == ["frames"]
    kept = blocks_kept(out)
    assert len(kept) == 5
    with listening() as heard:
        make(out)
    assert opened(heard) == {0} | set(range(12)) - kept
    assert same(stored(out), expected)


@NPY_AND_ZARR
def test_sigkill_loses_only_what_was_not_on_disk(frames: Path, expected: Array, daskstack: Run, out: str) -> None:
    command = ["build", "frames", out, *ON_COMMAND_LINE[out], "--scheduler", "synchronous"]
    assert signalled("SIGKILL", 5, *command).returncode == -signal.SIGKILL
    assert published(frames.parent) == ["frames"]
    assert signalled("SIGKILL", 4, *command).returncode == -signal.SIGKILL
    done = daskstack(*command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "resuming: 9 of 12 blocks are on disk"
    assert same(stored(out), expected)
    assert not Path(f"{out}.part").exists()


def test_threads_and_a_signal(frames: Path, expected: Array) -> None:
    done = signalled("SIGTERM", 5, "build", "frames", "out.npy", "--files-per-block", "1", "--threads", "2")
    assert done.returncode == 75
    kept = blocks_kept("out.npy")
    assert len(kept) >= 5
    assert f"stopped (SIGTERM): {len(kept)} of 12 blocks are safe in out.npy.part\n" in done.stderr
    with listening() as heard:
        make("out.npy")
    assert opened(heard) == {0} | set(range(12)) - kept
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize(
    "other",
    [
        {"threads": 1},
        {"threads": 7},
        {"scheduler": "synchronous"},
        {"memory_limit": "1 GB"},
        {"overwrite": True},
        {"on_error": "fill"},
        {"sources": "frames/*.tif"},
        {"sources": "frames/../frames"},
    ],
    ids=str,
)
@NPY_AND_ZARR
def test_what_decides_no_pixel_may_differ(frames: Path, expected: Array, out: str, other: dict[str, Any]) -> None:
    if other.get("sources") == "frames/../frames":  # another name of the files: it is not known that they are the same
        stop(out, sources=str(frames))
        with pytest.raises(OutputError, match="the list has 12 files more"):
            make(out, **other)
        return
    stop(out)
    with listening() as heard:
        make(out, **other)
    assert opened(heard) == {0, 7}
    assert same(stored(out), expected)


# -- what has changed is refused --------------------------------------------------------------------------------


@EACH_TARGET
@pytest.mark.parametrize("what", ["size", "mtime"])
def test_a_file_that_changed_under_its_receipt(frames: Path, expected: Array, out: str, what: str) -> None:
    stop(out)
    path = frames / "img_3.tif"
    data, mtime = path.read_bytes(), path.stat().st_mtime_ns
    if what == "size":
        path.write_bytes(data + b"more")
    os.utime(path, ns=(mtime, mtime + (what == "mtime")))
    before = kept_bytes(out)
    for options in ({}, {"on_error": "fill"}):
        with pytest.raises(OutputError) as caught:
            make(out, **options)
        assert str(caught.value) == (
            f"1 file changed since it was stored: img_3.tif; the blocks in {out}.part were kept\n"
            "next  put the old files back, or --restart to begin anew"
        )
        assert kept_bytes(out) == before
    path.write_bytes(data)
    os.utime(path, ns=(mtime, mtime))
    with listening() as heard:
        make(out)
    assert opened(heard) == {0, 7}
    assert same(stored(out), expected)


def test_several_files_that_changed_are_counted_and_named(frames: Path) -> None:
    stop("out.npy")
    for k in (1, 2, 9):
        os.utime(frames / f"img_{k}.tif", ns=(1, 1))
    with pytest.raises(
        OutputError, match=r"^3 files changed since they were stored: img_1\.tif, img_2\.tif, img_9\.tif;"
    ):
        make("out.npy")


@NPY_AND_ZARR
def test_restart_takes_files_that_have_changed(frames: Path, expected: Array, out: str) -> None:
    stop(out)
    tifffile.imwrite(frames / "img_3.tif", image(50), photometric="minisblack")
    with listening() as heard:
        make(out, restart=True)
    assert opened(heard) == set(range(12))
    assert same(stored(out), np.stack([image(50 if k == 3 else k) for k in range(12)]))


MORE = "the list has 1 file more (frames/img_99.tif)"
FEWER = "the list has 1 file fewer (frames/img_3.tif)"
PATHS = [f"frames/img_{k}.tif" for k in range(12)]


def first_of(path: str) -> dict[str, Any]:
    return {"k": int(path.partition("_")[2].partition(".")[0])}


def last_of(path: str) -> dict[str, Any]:
    return {"k": 100 - first_of(path)["k"]}


last_of.__qualname__ = first_of.__qualname__  # by its name alone it is the same


def read_otherwise(path: str) -> Array:
    return tifffile.imread(path)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more": ({}, {"sources": ["frames", "more/img_99.tif"]}, "the list has 1 file more (more/img_99.tif)"),
    "fewer": ({}, {"sources": [p for p in PATHS if "_3." not in p]}, FEWER),
    "limit": ({}, {"limit": 11}, "the list has 1 file fewer (frames/img_11.tif)"),
    "order": ({}, {"sources": PATHS[::-1]}, "the files are in another order"),
    "repeat": ({}, {"sources": [*PATHS, PATHS[0]]}, "the files are in another order"),
    "join": ({}, {"join": "concat"}, "join stack, now concat\n"),
    "labels": ({}, {"labels": r"_(?P<k>\d+)"}, "labels [], now ['k']; options {"),
    "names": ({"labels": r"_(?P<k>\d+)"}, {"labels": r"_(?P<n>\d+)"}, "labels ['k'], now ['n']; options {"),
    "axes": (
        {"labels": r"_(?P<k>\d+)"},
        {"labels": r"_(?P<k>\d+)", "axes": "k"},
        "dims ['item', 'y', 'x'], now ['k', 'y', 'x']; axes ['item'], now ['k']; options {",
    ),
    "values": (
        {"labels": first_of},
        {"labels": last_of},
        "the bounds of its blocks or the values of its labels differ",
    ),
    "reader": (
        {"sources": "frames/*.tif", "reader": read_logged},
        {"sources": "frames/*.tif", "reader": read_otherwise},
        "options {",
    ),
}
OTHERS_OF_NPY = {"files_per_block": ({}, {"files_per_block": 2}, "blocks 12, now 6; options {'files_per_block': 1}, ")}
OTHERS_OF_ZARR: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "chunks": ({}, {"chunks": (1, 5, 4)}, "chunks [1, 5, 7], now [1, 5, 4]; shards [1, 5, 7], now [1, 5, 8]"),
    "shards": ({}, {"shards": (4, 5, 7)}, "blocks 12, now 3; shards [1, 5, 7], now [4, 5, 7]"),
    "compression": ({}, {"compression": "zstd:3"}, "compression blosc:zstd:1:bitshuffle, now zstd:3"),
    "format": (
        {},
        {"zarr_format": 2, "shards": None},
        "zarr_format 3, now 2; compression blosc:zstd:1:bitshuffle, now zstd:1",
    ),
}
REFUSED = [
    *(pytest.param(out, *case, id=f"{name}-{out}") for name, case in OTHERS.items() for out in ("out.npy", "out.zarr")),
    *(pytest.param("out.npy", *case, id=f"{name}-out.npy") for name, case in OTHERS_OF_NPY.items()),
    *(pytest.param("out.zarr", *case, id=f"{name}-out.zarr") for name, case in OTHERS_OF_ZARR.items()),
    pytest.param("two.zarr", *OTHERS["fewer"], id="fewer-two.zarr"),
]


@pytest.mark.parametrize(("out", "first", "second", "difference"), REFUSED)
def test_another_build_is_refused_by_what_differs_and_restart_throws_the_old_one_away(
    frames: Path, out: str, first: dict[str, Any], second: dict[str, Any], difference: str
) -> None:
    (frames.parent / "more").mkdir()
    shutil.copy(frames / "img_1.tif", "more/img_99.tif")
    stop(out, **first)
    before = kept_bytes(out)
    with pytest.raises(OutputError) as caught:
        make(out, **second)
    assert str(caught.value).startswith(f"{out}.part holds 11 blocks of another build: {difference}")
    assert str(caught.value).endswith("\nnext  give the command as it was, or --restart to throw them away")
    assert kept_bytes(out) == before
    with listening() as heard:  # the command as it was goes on as if nothing had been
        make(f"{out}", **first)
    assert opened(heard) == {0, 7}
    whole = stored(out)
    for path in Path().glob(f"{out.partition('.')[0]}.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    stop(out, **first)
    make(out, **second, restart=True)
    assert not Path(f"{out}.part").exists()
    restarted = stored(out)
    make(f"fresh.{out.rpartition('.')[2]}", **{**TARGETS[out], **second})
    assert same(restarted, stored(f"fresh.{out.rpartition('.')[2]}"))
    assert len(whole) == 12


def test_a_file_more_in_a_folder_and_one_that_is_gone(frames: Path) -> None:
    stop("out.npy")
    before = kept_bytes("out.npy")
    shutil.copy(frames / "img_1.tif", frames / "img_99.tif")
    with pytest.raises(OutputError) as caught:
        make("out.npy")
    assert str(caught.value).splitlines()[0] == f"out.npy.part holds 11 blocks of another build: {MORE}"
    (frames / "img_3.tif").unlink()
    with pytest.raises(OutputError) as caught:
        make("out.npy")
    both = "the list has 1 file more (frames/img_99.tif) and 1 file fewer (frames/img_3.tif)"
    assert str(caught.value).splitlines()[0] == f"out.npy.part holds 11 blocks of another build: {both}"
    assert kept_bytes("out.npy") == before


def test_a_file_without_a_receipt_may_be_another_one(frames: Path, expected: Array) -> None:
    stop("out.npy", 3, 7)
    tifffile.imwrite(frames / "img_3.tif", image(33), photometric="minisblack", software="another size, another time")
    make("out.npy")
    expected[3] = image(33)
    assert same(np.load("out.npy"), expected)
    assert int(index_of("out.npy", "size")[3]) == (frames / "img_3.tif").stat().st_size
    assert make("out.npy").was_there


def test_on_the_command_line_another_build_is_an_error_and_restart_begins_anew(
    frames: Path, expected: Array, daskstack: Run
) -> None:
    stop("out.npy")
    done = daskstack("build", "frames", "out.npy", "--files-per-block", "3")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: out.npy.part holds 11 blocks of another build: blocks 12, now 4; "
        "options {'files_per_block': 1}, now {'files_per_block': 3}",
        "next  give the command as it was, or --restart to throw them away",
    ]
    done = daskstack("build", "frames", "out.npy", "--files-per-block", "3", "--restart")
    assert done.returncode == 0, done.stderr
    assert same(np.load("out.npy"), expected)


@NPY_AND_ZARR
def test_restart_throws_away_what_is_provably_its_own_and_nothing_else(frames: Path, expected: Array, out: str) -> None:
    stop(out)
    root = Path(f"{out}.part")
    (root / "notes.txt").write_bytes(b"mine")
    (root / "folder").mkdir()
    (root / "folder" / "thesis.txt").write_bytes(b"years")
    (root / "0123456789abcdef").mkdir()  # named like a plan, without a manifest
    (root / "0123456789abcdef" / "thesis.txt").write_bytes(b"years")
    (root / ("." + "0" * 32)).mkdir()  # named like one that is being made
    (root / ("." + "0" * 32) / "thesis.txt").write_bytes(b"years")
    shutil.copytree(staged_of(root), root / "fedcba9876543210")  # of another name than its manifest says
    ours = staged_of(root).name
    mine = {k: v for k, v in kept_bytes(out).items() if ours not in k}
    make(out, restart=True, limit=11)
    assert same(stored(out), expected[:11])
    assert kept_bytes(out) == mine


def staged_of(root: Path) -> Path:
    """The staging folder among what is a user's: it has the name that its manifest says."""
    (folder,) = [p for p in root.iterdir() if p.is_dir() and staging.manifest_id(str(p)) == p.name]
    return folder


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_with_a_damaged_manifest_is_left_alone_and_named(frames: Path, *, restart: bool) -> None:
    stop("out.npy")
    manifest = staged("out.npy") / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    before = kept_bytes("out.npy")
    with pytest.raises(OutputError) as caught:
        make("out.npy", restart=restart)
    assert str(caught.value) == (
        f"{staged('out.npy')} is no staging folder of this build, or its manifest was damaged\nnext  move it away"
    )
    assert kept_bytes("out.npy") == before
    make("out.npy", limit=11, restart=restart)  # another build goes on beside it
    assert kept_bytes("out.npy") == before


# -- damage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def three(fast: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    """Three tiny files, of a stopped build of which two blocks are on disk; what they become."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frames").mkdir()
    for k in range(3):
        tifffile.imwrite(f"frames/img_{k}.tif", image(k, (2, 3)), photometric="minisblack")
    stop("out.npy", 1)
    return np.stack([image(k, (2, 3)) for k in range(3)])


def damaged(data: bytes) -> Iterator[bytes]:
    """Each byte flipped, one bit of it or all; cut at each byte; each byte doubled."""
    for at in range(len(data)):
        for bits in (1 << at % 8, 255):
            yield data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
        yield data[:at]
        yield data[: at + 1] + data[at:]


def test_no_damage_to_a_manifest_passes_for_a_manifest(three: Array) -> None:
    folder = staged("out.npy")
    path = folder / "manifest.json"
    whole, data = staging.read_manifest(str(folder)), path.read_bytes()
    assert whole is not None
    tried = 0
    for tried, bad in enumerate(damaged(data), 1):
        path.write_bytes(bad)
        assert staging.read_manifest(str(folder)) in (None, whole)  # a blank more or less says the same
    assert tried == 4 * len(data)


def test_no_damage_to_a_listing_passes_for_a_listing(three: Array) -> None:
    folder = staged("out.npy")
    manifest = staging.read_manifest(str(folder))
    assert manifest is not None
    path = folder / "listing.npz"
    assert staging.read_listing(str(folder), manifest) is not None
    for bad in damaged(path.read_bytes()):
        path.write_bytes(bad)
        assert staging.read_listing(str(folder), manifest) is None
    path.unlink()
    assert staging.read_listing(str(folder), manifest) is None


def test_no_damage_to_receipts_makes_another_receipt(three: Array) -> None:
    folder = staged("out.npy")
    (path,) = (folder / "receipts").iterdir()
    whole = receipts.read(str(folder), folder.name)
    assert set(whole) == {0, 2}
    lost = 0
    for bad in damaged(path.read_bytes()):
        path.write_bytes(bad)
        found = receipts.read(str(folder), folder.name)
        assert all(whole[k] == candidates for k, candidates in found.items())
        lost += len(found) < 2
    assert lost > len(path.read_bytes())


@pytest.mark.parametrize("name", ["manifest.json", "listing.npz", "receipts"])
@pytest.mark.parametrize("how", ["flipped", "cut", "twice", "gone"])
def test_a_build_on_damage_is_right_or_refused(three: Array, name: str, how: str) -> None:
    path = staged("out.npy") / name
    if path.is_dir():
        (path,) = path.iterdir()
    data = path.read_bytes()
    pristine = Path("pristine")
    shutil.copytree("out.npy.part", pristine)
    done = refused = 0
    for at in range(0, 1 if how == "gone" else len(data), 23):
        shutil.rmtree("out.npy.part", ignore_errors=True)
        shutil.copytree(pristine, "out.npy.part")
        if how == "gone":
            path.unlink()
        else:
            flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            path.write_bytes({"flipped": flipped, "cut": data[:at], "twice": data[:at] + data}[how])
        try:
            make("out.npy", scheduler="synchronous")
        except OutputError as exc:
            assert "its manifest was damaged" in str(exc)
            assert not Path("out.npy").exists()
            refused += 1
        else:
            assert same(np.load("out.npy"), three)
            for made in Path().glob("out.npy*"):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            done += 1
    assert (refused > 0) == (name == "manifest.json")
    assert (done > 0) == (name != "manifest.json" or how == "twice" and done > 0)


def test_another_build_s_lost_listing_is_refused_all_the_same(frames: Path) -> None:
    stop("out.npy")
    (staged("out.npy") / "listing.npz").unlink()
    before = kept_bytes("out.npy")
    with pytest.raises(OutputError, match="holds 11 blocks of another build: blocks 12, now 6"):
        make("out.npy", files_per_block=2)
    assert kept_bytes("out.npy") == before


def test_a_target_that_is_gone_is_made_again(frames: Path, expected: Array) -> None:
    stop("out.npy")
    (staged("out.npy") / "data.npy").unlink()
    make("out.npy")
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("size", [0, 300, 5000])
def test_a_target_of_another_size_is_made_again(frames: Path, expected: Array, size: int) -> None:
    stop("out.npy")
    os.truncate(staged("out.npy") / "data.npy", size)
    make("out.npy")
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("out", ["out.zarr", "two.zarr"])
def test_a_shard_that_is_gone_under_its_receipt_is_written_again(frames: Path, expected: Array, out: str) -> None:
    stop(out)
    name = "c.3.0.0" if out == "out.zarr" else "3.0.0"
    (staged(out) / "data.zarr" / "data" / name).unlink()
    with listening() as heard:
        make(out)
    assert opened(heard) == {0, 3, 7}
    assert same(stored(out), expected)


@EACH_TARGET
def test_receipts_that_are_gone_are_written_again(frames: Path, expected: Array, out: str) -> None:
    stop(out)
    shutil.rmtree(staged(out) / "receipts")
    make(out)
    assert same(stored(out), expected)
    assert not Path(f"{out}.part").exists()


def test_a_torn_line_costs_one_block_and_the_next_receipt_stands(frames: Path, expected: Array) -> None:
    stop("out.npy")
    (path,) = (staged("out.npy") / "receipts").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with listening() as heard:
        make("out.npy")
    assert len(opened(heard) - {0, 7}) <= 1
    assert same(np.load("out.npy"), expected)
