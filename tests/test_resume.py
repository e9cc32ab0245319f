"""What long jobs are promised: a stopped run goes on where it was, with the same files and options or not at all."""

from __future__ import annotations

import csv
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
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
from forkserver import python

import daskstack as ds
from daskstack import build, open_stack, publication, receipts, staging, store
from daskstack.errors import BadFilesError, DaskstackError, OutputError, OutputExistsError, UsageError
from daskstack.staging import locks, records
from daskstack.staging.root import OWN_MODE, TURN, sweep

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
    heard: list[tuple[str, str]] = []
    _events = heard
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
    held = (locks.LOCK, TURN, locks.PUBLISHING)
    found = (p for p in Path(f"{out}.part").rglob("*") if p.is_file() and p.name not in held)
    return {re.sub(r"\b[0-9a-f]{32}\b", "*", str(p)): p.read_bytes() for p in found}  # places have random names


def staged(out: str) -> Path:
    """The one staging folder of an output."""
    (folder,) = [p for p in Path(f"{out}.part").iterdir() if len(p.name) == 16]
    return folder


def place(out: str) -> Path:
    """Where in it the target grows."""
    return Path(staging.place_in(str(staged(out))))


def blocks_kept(out: str) -> set[int]:
    """The blocks that have a receipt."""
    return set(receipts.read(str(place(out)), staged(out).name))


# -- what is left of a run that was killed while it began --------------------------------------------------------


PREPARED = ["lock", "publishing", "manifest.json", "listing.npz"]


@pytest.mark.parametrize("steps", range(len(PREPARED) + 1))
def test_a_folder_that_a_killed_run_was_preparing_goes_with_the_next_build(
    frames: Path, expected: Array, steps: int
) -> None:
    private = Path("out.npy.part") / f".{'0' * 32}"
    private.mkdir(parents=True)
    os.chmod("out.npy.part", OWN_MODE)
    for name in PREPARED[:steps]:
        (private / name).write_bytes(b"")
    make("out.npy")
    assert same(stored("out.npy"), expected)
    assert not os.path.lexists("out.npy.part")


def test_a_folder_that_is_being_prepared_now_is_left_alone(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = records.listing_bytes  # called when half of the folder is there
    seen: list[tuple[list[str], list[str]]] = []

    def while_it_is_made(listing: Any) -> bytes:
        before = os.listdir("out.npy.part")
        if not seen:
            sweep("out.npy.part")
            seen.append((before, os.listdir("out.npy.part")))
        return real(listing)

    monkeypatch.setattr(records, "listing_bytes", while_it_is_made)
    make("out.npy")
    ((before, after),) = seen
    assert before == after
    assert len(before) == 1
    assert same(stored("out.npy"), expected)


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
    elif scheduler == "processes":
        request.getfixturevalue("pool")
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
    assert not hasattr(caught.value, "__notes__")
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
    return python("-c", SIGNALLED, number, after, *arguments)


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
OTHERS_OF_NPY: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "files_per_block": ({}, {"files_per_block": 2}, "blocks 12, now 6; options {'files_per_block': 1}, ")
}
OTHERS_OF_ZARR: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "chunks": ({}, {"chunks": (1, 5, 4)}, "chunks [1, 5, 7], now [1, 5, 4]; shards [1, 5, 7], now [1, 5, 8]"),
    "shards": ({}, {"shards": (4, 5, 7)}, "blocks 12, now 3; shards [1, 5, 7], now [4, 5, 7]"),
    "compression": ({}, {"compression": "zstd:3"}, "compression blosc:lz4:1:bitshuffle, now zstd:3"),
    "format": (
        {},
        {"zarr_format": 2, "shards": None},
        "zarr_format 3, now 2; compression blosc:lz4:1:bitshuffle, now zstd:1",
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
        "error: out.npy.part holds 11 blocks of another build: blocks 12, now 4; options {'files_per_block': 1}, now {'files_per_block': 3}",
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
    (folder,) = [p for p in root.iterdir() if p.is_dir() and records.manifest_id(str(p)) == p.name]
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
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    """Three tiny files, of a stopped build of which two blocks are on disk; what they become."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frames").mkdir()
    for k in range(3):
        tifffile.imwrite(f"frames/img_{k}.tif", image(k, (2, 3)), photometric="minisblack")
    stop("out.npy", 1)
    return np.stack([image(k, (2, 3)) for k in range(3)])


def damaged(data: bytes) -> Iterator[bytes]:
    """One bit of each byte flipped; cut at each byte."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        yield data[:at]


def test_no_damage_to_a_manifest_passes_for_a_manifest(three: Array) -> None:
    folder = staged("out.npy")
    path = folder / "manifest.json"
    whole, data = records.read_manifest(str(folder)), path.read_bytes()
    assert whole is not None
    for bad in damaged(data):
        path.write_bytes(bad)
        assert records.read_manifest(str(folder)) in (None, whole)  # a blank more or less says the same


def test_no_damage_to_a_listing_passes_for_a_listing(three: Array) -> None:
    folder = staged("out.npy")
    manifest = records.read_manifest(str(folder))
    assert manifest is not None
    path = folder / "listing.npz"
    assert records.read_listing(str(folder), manifest) is not None
    for bad in damaged(path.read_bytes()):
        path.write_bytes(bad)
        assert records.read_listing(str(folder), manifest) is None
    path.unlink()
    assert records.read_listing(str(folder), manifest) is None


def test_no_damage_to_receipts_makes_another_receipt(three: Array) -> None:
    folder, plan_id = place("out.npy"), staged("out.npy").name
    (path,) = (folder / "receipts").iterdir()
    whole = receipts.read(str(folder), plan_id)
    assert set(whole) == {0, 2}
    lost = 0
    for bad in damaged(path.read_bytes()):
        path.write_bytes(bad)
        found = receipts.read(str(folder), plan_id)
        assert all(whole[k] == candidates for k, candidates in found.items())
        lost += len(found) < 2
    assert lost > 100


@pytest.mark.parametrize("name", ["manifest.json", "listing.npz", "receipts"])
@pytest.mark.parametrize("how", ["flipped", "cut", "twice", "gone"])
def test_a_build_on_damage_is_right_or_refused(three: Array, name: str, how: str) -> None:
    path = staged("out.npy") / name
    if name == "receipts":
        (path,) = (place("out.npy") / name).iterdir()
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
            refused += "its manifest was damaged" in str(exc) and not Path("out.npy").exists()
        else:
            assert same(np.load("out.npy"), three)
            for made in Path().glob("out.npy*"):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            done += 1
    tried = 1 if how == "gone" else len(range(0, len(data), 23))
    assert done + refused == tried
    if name != "manifest.json":
        assert refused == 0
    elif how != "twice":
        assert done == 0


def test_another_build_s_lost_listing_is_refused_all_the_same(frames: Path) -> None:
    stop("out.npy")
    (staged("out.npy") / "listing.npz").unlink()
    before = kept_bytes("out.npy")
    with pytest.raises(OutputError, match="holds 11 blocks of another build: blocks 12, now 6"):
        make("out.npy", files_per_block=2)
    assert kept_bytes("out.npy") == before


def test_a_target_that_is_gone_is_made_again(frames: Path, expected: Array) -> None:
    stop("out.npy")
    (place("out.npy") / "data.npy").unlink()
    make("out.npy")
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("size", [0, 300, 5000])
def test_a_target_of_another_size_is_made_again(frames: Path, expected: Array, size: int) -> None:
    stop("out.npy")
    os.truncate(place("out.npy") / "data.npy", size)
    make("out.npy")
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("out", ["out.zarr", "two.zarr"])
def test_a_shard_that_is_gone_under_its_receipt_is_written_again(frames: Path, expected: Array, out: str) -> None:
    stop(out)
    name = "c.3.0.0" if out == "out.zarr" else "3.0.0"
    (place(out) / "data.zarr" / "data" / name).unlink()
    with listening() as heard:
        make(out)
    assert opened(heard) == {0, 3, 7}
    assert same(stored(out), expected)


@EACH_TARGET
def test_receipts_that_are_gone_are_written_again(frames: Path, expected: Array, out: str) -> None:
    stop(out)
    shutil.rmtree(place(out) / "receipts")
    make(out)
    assert same(stored(out), expected)
    assert not Path(f"{out}.part").exists()


def test_a_torn_line_costs_one_block_and_the_next_receipt_stands(frames: Path, expected: Array) -> None:
    stop("out.npy")
    (path,) = (place("out.npy") / "receipts").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    with listening() as heard:
        make("out.npy")
    assert len(opened(heard) - {0, 7}) <= 1
    assert same(np.load("out.npy"), expected)


# -- bad files filled -------------------------------------------------------------------------------------------

FILLED: dict[str, Any] = {
    "bool": False,
    "int8": 0,
    "uint16": 0,
    "int64": 0,
    "float16": np.nan,
    "float32": np.nan,
    "float64": np.nan,
    "complex64": complex(np.nan, 0),
    "complex128": complex(np.nan, 0),
    "datetime64[s]": np.datetime64("NaT", "s"),
    "timedelta64[ns]": np.timedelta64("NaT", "ns"),
    "U3": "",
    "S4": b"",
}


def saved(dtype: Any, *, cut: Sequence[int], shape: tuple[int, ...] = (4, 2, 3)) -> Array:
    """Four .npy files in a folder ``frames``, some of them without their last byte; what they held."""
    whole = (np.arange(np.prod(shape)).reshape(shape) + 1).astype(dtype)
    Path("frames").mkdir()
    for k, item in enumerate(whole):
        np.save(f"frames/img_{k}.npy", item)
        if k in cut:
            os.truncate(f"frames/img_{k}.npy", os.path.getsize(f"frames/img_{k}.npy") - 1)
    return whole


@pytest.mark.filterwarnings("ignore:.*specification")  # zarr's, of dates and texts
@pytest.mark.parametrize("dtype", FILLED)
@EACH_TARGET
def test_items_of_bad_files_hold_the_fill_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, dtype: str
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = saved(dtype, cut=(1, 3))
    report = make(out, on_error="fill")
    found = stored(out)
    assert same(found[[0, 2]], whole[[0, 2]])
    assert found[[1, 3]].tobytes() == np.full((2, 2, 3), FILLED[dtype], dtype).tobytes()
    problems = index_of(out, "filled")
    assert [bool(text) for text in problems] == [False, True, False, True]
    record = ds.open(out).record
    assert record["filled"] == [{"item": k, "file": f"img_{k}.npy", "problem": problems[k]} for k in (1, 3)]
    assert report.filled == tuple(f"img_{k}.npy  {problems[k]}" for k in (1, 3))


def test_records_and_longdoubles_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = saved([("a", "<f4"), ("b", "<i2", (2,))], cut=(1,))
    make("out.npy", on_error="fill")
    assert np.load("out.npy")[1].tobytes() == bytes(6 * 8)  # records have no NaN as a whole
    assert same(np.load("out.npy")[2], whole[2])
    shutil.rmtree("frames")
    saved("longdouble", cut=(1,))
    make("long.npy", on_error="fill")
    assert np.isnan(np.load("long.npy")).sum(axis=(1, 2)).tolist() == [0, 6, 0, 0]


def spoil_pixels(path: Path) -> None:
    """Damage what is compressed of a TIFF's first page, and nothing of its header."""
    with tifffile.TiffFile(path) as tif:
        at = tif.pages.first.dataoffsets[0]
    data = bytearray(path.read_bytes())
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)


@EACH_TARGET
def test_pages_of_bad_files_are_filled_and_each_of_them_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("frames").mkdir()
    whole = image(1, (12, 5, 7), "float32")
    for k in range(4):
        path = Path(f"frames/img_{k}.tif")
        tifffile.imwrite(path, whole[3 * k : 3 * k + 3], photometric="minisblack", compression="zlib")
    spoil_pixels(Path("frames/img_2.tif"))
    report = make(out, join="concat", on_error="fill", chunks=None if out == "out.npy" else (2, 5, 7), shards=None)
    # Of a bad file those pages are filled that one block reads together, and a page that is read alone, and good, is kept.
    filled = [6, 7, 8] if out == "out.npy" else [6, 7]
    whole[filled] = np.nan
    assert stored(out).tobytes() == whole.tobytes()
    assert [k for k, text in enumerate(index_of(out, "filled")) if text] == filled
    assert [f["item"] for f in ds.open(out).record["filled"]] == filled
    assert len(report.filled) == len(filled)


def test_a_block_of_several_files_fills_the_bad_ones_alone(frames: Path, expected: Array) -> None:
    with spoilt(2, 3):
        make("out.npy", files_per_block=5, on_error="fill")
    expected[2:4] = 0
    assert same(np.load("out.npy"), expected)


def test_nothing_filled_leaves_no_trace(frames: Path) -> None:
    make("out.npy", on_error="fill")
    make("raised.npy", files_per_block=1)
    assert index_of("out.npy", "checksum") == index_of("raised.npy", "checksum")
    assert "filled" not in Path("out.npy.index.csv").read_text().splitlines()[0]
    assert ds.open("out.npy").record["filled"] == []
    assert "fill_value" not in ds.open("out.npy").record
    assert make("out.npy", on_error="raise").was_there


def test_filled_items_are_told_on_the_command_line(frames: Path, expected: Array, daskstack: Run) -> None:
    (frames / "img_4.tif").write_bytes(b"")
    done = daskstack("build", "frames", "out.npy", "--on-error", "fill")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("done  out.npy (12, 5, 7) uint16, 840 B")
    assert lines[1:] == [
        "filled 1 item of bad files:",
        "      img_4.tif  empty file (0 bytes)",
        "      out.npy.index.csv (row to file)",
        "      out.npy.json (how it was made)",
        'read  np.load("out.npy", mmap_mode="r")',
    ]
    expected[4] = 0
    assert same(np.load("out.npy"), expected)
    assert ds.open("out.npy").record["fill_value"] == "0"
    again = daskstack("build", "frames", "out.npy", "--on-error", "fill")
    assert again.returncode == 0
    assert "filled 1 item of bad files:\n      img_4.tif  empty file (0 bytes)\n" in again.stdout
    refused = daskstack("build", "frames", "out.npy")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        "error: out.npy exists and holds the fill value in 1 item of bad files; it was not touched",
        "next  choose another OUT, or --overwrite it",
    ]


@EACH_TARGET
def test_from_raise_to_fill_keeps_the_receipts_and_the_finished_output_is_for_fill_alone(
    frames: Path, expected: Array, out: str
) -> None:
    with spoilt(2, 7):
        with pytest.raises(BadFilesError):
            make(out)
        with listening() as heard:
            report = make(out, on_error="fill")
        assert opened(heard) == {0, 2, 7}
        assert [text.partition("  ")[0] for text in report.filled] == ["img_2.tif", "img_7.tif"]
        with listening() as heard:
            again = make(out, on_error="fill")
        assert opened(heard) <= {0, 2, 7}  # those whose size looks wrong are looked at
        assert again.was_there
        assert again.filled == report.filled
        with pytest.raises(OutputExistsError) as caught:
            make(out, on_error="raise")
        assert str(caught.value) == (
            f"{out} exists and holds the fill value in 2 items of bad files; it was not touched\n"
            "next  choose another OUT, or --overwrite it"
        )
        with pytest.raises(BadFilesError):
            make(out, overwrite=True)
    filled = expected.copy()
    filled[[2, 7]] = 0
    assert same(stored(out), filled)  # a run that failed has replaced nothing
    for on_error in ("raise", "fill"):  # the files are good again, and the output is of the bad ones
        with pytest.raises(OutputExistsError) as caught:
            make(out, on_error=on_error)
        assert str(caught.value).splitlines()[0] == (
            f"{out} exists and was made before 2 files changed: frames/img_2.tif, frames/img_7.tif; it was not touched"
        )
    with listening() as heard:
        make(out, overwrite=True)  # what the failed run kept is not read again
    assert opened(heard) == {0, 2, 7}
    assert same(stored(out), expected)
    assert ds.open(out).record["filled"] == []
    assert sorted(os.listdir(frames.parent)) == sorted(["frames", *made_of(out)])


def made_of(out: str) -> list[str]:
    return [out] if out.endswith(".zarr") else [out, f"{out}.index.csv", f"{out}.json"]


@EACH_TARGET
@pytest.mark.parametrize("then", ["raise", "fill"])
def test_a_filled_file_that_was_mended_before_the_end_is_read(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, out: str, then: str
) -> None:
    with spoilt(2, 7), monkeypatch.context() as patch:
        fail_at_write(patch, out, 12, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(out, on_error="fill", scheduler="synchronous")
    lost = set(range(12)) - blocks_kept(out)
    with listening() as heard:
        make(out, on_error=then)
    assert opened(heard) == {0, 2, 7} | lost
    assert same(stored(out), expected)
    assert ds.open(out).record["filled"] == []


def test_a_filled_file_still_bad_is_an_error_for_raise(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with spoilt(2, 7):
        with monkeypatch.context() as patch:
            fail_at_write(patch, "out.npy", 12, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                make("out.npy", on_error="fill", scheduler="synchronous")
        with pytest.raises(BadFilesError) as caught:
            make("out.npy")
    assert [os.path.basename(bad.path) for bad in caught.value.files] == ["img_2.tif", "img_7.tif"]
    assert published(frames.parent) == ["frames"]


def test_on_error_must_be_one_of_two(frames: Path) -> None:
    with pytest.raises(UsageError) as caught:
        make("out.npy", on_error="skip")
    assert str(caught.value) == "on_error='skip'\nnext  choose raise or fill"


# -- parts ------------------------------------------------------------------------------------------------------


def part_done(out: str, done: int) -> str:
    return (
        f"part  done; {done} of 12 blocks are on disk, {out} is not complete yet\n"
        "next  the other parts, or the same command without --part"
    )


@EACH_TARGET
def test_parts_in_any_order_repeated_and_the_last_publishes(frames: Path, expected: Array, out: str) -> None:
    for part, done in (("3/4", 3), ("0/4", 6), ("3/4", 6), ((2, 4), 9)):
        report = make(out, part=part)
        assert str(report) == part_done(out, done)
        assert (report.blocks_done, report.blocks) == (done, 12)
        assert published(frames.parent) == ["frames"]
    report = make(out, part="1/4")
    assert str(report).startswith(f"done  {out} (12, 5, 7) uint16, 840 B in ")
    assert same(stored(out), expected)
    assert sorted(os.listdir(frames.parent)) == sorted(["frames", *made_of(out)])
    assert make(out, part="2/4").was_there
    assert make(out).was_there


@EACH_TARGET
def test_the_command_without_a_part_completes(frames: Path, expected: Array, out: str) -> None:
    make(out, part="1/3")
    with listening() as heard:
        make(out)
    assert opened(heard) == {k for k in range(12) if k % 3 != 1}
    assert same(stored(out), expected)
    assert not Path(f"{out}.part").exists()


def test_parts_complete_what_a_whole_run_began(frames: Path, expected: Array) -> None:
    stop("out.npy", 4, 7)
    assert str(make("out.npy", part="0/2")) == part_done("out.npy", 11)
    with listening() as heard:
        make("out.npy", part="1/2")
    assert opened(heard) == {0, 7}
    assert same(np.load("out.npy"), expected)


@NPY_AND_ZARR
def test_more_parts_than_blocks(frames: Path, expected: Array, out: str) -> None:
    for k in (31, 12, *range(11, -1, -1), 20):
        report = make(out, part=(k, 32))
    assert same(stored(out), expected)
    assert report.was_there
    assert not Path(f"{out}.part").exists()


def test_a_part_that_does_only_its_blocks(frames: Path) -> None:
    with listening() as heard:
        make("out.npy", part="2/5")
    assert opened(heard) == {0, 2, 7}
    assert blocks_kept("out.npy") == {2, 7}


@pytest.mark.parametrize(
    "part", ["16/16", "2/2", "17/16", "0/0", "a/b", "1", "-1/3", "1/-3", "1/2/3", "", "/", "1/", " 1/2", "1.0/2", "²/3"]
)
def test_what_is_no_part_is_refused(frames: Path, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        make("out.npy", part=part)
    assert str(caught.value) == (f"part={part!r}\nnext  write it as I/N, counted from 0: of 16 parts 0/16 to 15/16")
    assert os.listdir(frames.parent) == ["frames"]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ((2, 2), "2/2"),
        ((-1, 3), "-1/3"),
        ((1,), "1"),
        ((0, 1, 2), "0/1/2"),
        (5, "5"),
        (1.5, "1.5"),
        ((0.0, 2), "0.0/2"),
    ],
)
def test_what_is_no_part_in_python_is_refused(frames: Path, part: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        make("out.npy", part=part)
    assert caught.value.message == f"part={text!r}"


def test_parts_on_the_command_line(frames: Path, expected: Array, daskstack: Run) -> None:
    command = ["build", "frames", "out.npy", "--files-per-block", "1"]
    refused = daskstack(*command, "--part", "4/4")
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: part='4/4'",
        "next  write it as I/N, counted from 0: of 16 parts 0/16 to 15/16",
    ]
    both = daskstack(*command, "--part", "1/4", "--restart")
    assert both.returncode == 2
    assert both.stderr.splitlines() == [
        "error: restart with part",
        "next  each part would throw away what the others have done",
    ]
    first = daskstack(*command, "--part", "1/4")
    assert (first.returncode, first.stdout) == (0, part_done("out.npy", 3) + "\n")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "daskstack", *command, "--part", f"{k}/4"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for k in (0, 2, 3)
    ]  # fmt: skip
    results = [(*child.communicate(timeout=120), child.returncode) for child in started]
    assert [code for _, _, code in results] == [0, 0, 0], results
    assert sum(stdout.startswith("done  out.npy (12, 5, 7)") for stdout, _, _ in results) >= 1
    assert same(np.load("out.npy"), expected)
    assert sorted(os.listdir(frames.parent)) == sorted(["frames", *made_of("out.npy")])


class Looks:
    """How often each file is looked at (stat), and folders are listed, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.files: list[int] = []
        self.scans = 0
        stat, scandir = os.stat, os.scandir

        def counted(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            if f"{folder.name}/img_" in str(path):
                self.files.append(int(str(path).rpartition("_")[2].partition(".")[0]))
            return stat(path, *arguments, **options)

        def listed(path: Any = ".") -> Any:
            self.scans += str(path) == str(folder)
            return scandir(path)

        monkeypatch.setattr(os, "stat", counted)
        monkeypatch.setattr(os, "scandir", listed)

    def taken(self) -> tuple[set[int], int]:
        """Which files were looked at and how many scans there were since this was asked last."""
        found = set(self.files), self.scans
        self.files, self.scans = [], 0
        return found


@EACH_TARGET
def test_one_part_lists_and_the_others_look_at_their_own_files_alone(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    looks = Looks(monkeypatch, frames)
    make(out, part="0/4")
    assert looks.taken() == (set(range(12)), 1)
    shutil.copy(frames / "img_1.tif", frames / "img_1.5.tif")  # appears meanwhile, and is not taken
    shutil.copy(frames / "img_1.tif", frames / "img_99.tif")
    looks.taken()
    for k in (2, 1):
        make(out, part=(k, 4))
        assert looks.taken() == ({k, k + 4, k + 8}, 0)
    make(out, part="3/4")
    assert looks.taken()[1] == 0
    assert same(stored(out), expected)
    with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
        make(out)


@pytest.mark.filterwarnings("ignore:.*specification")  # zarr's; Python's switch for them is one for all threads
@NPY_AND_ZARR
def test_of_sixteen_parts_at_once_one_scans(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    looks = Looks(monkeypatch, frames)
    with ThreadPoolExecutor(16) as pool:
        reports = list(pool.map(lambda k: make(out, part=(k, 16), scheduler="synchronous"), range(16)))
    assert looks.taken()[1] == 1 or any(report.was_there for report in reports)  # who comes after the end looks anew
    assert any(report.blocks_done == 12 for report in reports)
    assert same(stored(out), expected)
    assert sorted(os.listdir(frames.parent)) == sorted(["frames", *made_of(out)])


def test_parts_with_a_reader_adopt_the_list_in_another_process(frames: Path, expected: Array) -> None:
    script = (
        "import sys\n"
        "from daskstack import build\n"
        "from reads import read\n"
        "from labels import label\n"
        "build('frames/*.tif', 'out.npy', reader=read, labels=label, files_per_block=1, part=sys.argv[1], progress=False)"
    )
    Path("reads.py").write_text("import tifffile\ndef read(path):\n    return tifffile.imread(path)\n")
    Path("labels.py").write_text("def label(path):\n    return {'n': len(path)}\n")
    for k in (1, 0):
        done = python("-c", script, f"{k}/2")
        assert done.returncode == 0, done.stderr
        shutil.copy(frames / "img_1.tif", frames / "img_99.tif")
    assert same(np.load("out.npy"), expected)


def test_parts_of_other_long_lists_do_not_adopt_each_other_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for k in range(1100):
        Path(f"in/img_{k}.npy").touch()
    np.save("in/img_0.npy", image(0))
    for k in (555, 600, 1099):
        np.save(f"in/img_{k}.npy", image(k))
    names: Any = np.array(["in/img_0.npy"] * 1100, "U20")  # NumPy shows the first and the last three of so many
    names[-1] = "in/img_1099.npy"
    others = names.copy()
    others[555] = "in/img_555.npy"
    build(names, "out.npy", part="0/2", progress=False)
    with pytest.raises(OutputError, match=r"the list has 1 file more \(in/img_555\.npy\)"):
        build(others, "out.npy", part="1/2", progress=False)


def test_a_part_with_a_reader_that_no_other_process_can_have_is_refused(frames: Path) -> None:
    with pytest.raises(UsageError) as caught:
        make("out.npy", "frames/*.tif", reader=lambda path: tifffile.imread(path, key=0), part="0/2")
    assert str(caught.value) == (
        "part with a reader that cannot be pickled\nnext  define it by def at the top of a module"
    )
    assert os.listdir(frames.parent) == ["frames"]


@EACH_TARGET
def test_a_file_that_is_mended_between_parts_is_taken_as_it_is_then(frames: Path, expected: Array, out: str) -> None:
    with spoilt(1):
        make(out, part="0/3")
        with pytest.raises(BadFilesError) as caught:
            make(out, part="1/3")
        assert caught.value.message == f"1 of 12 files is bad; {out} not made, 7 of 12 blocks kept"
    tifffile.imwrite(frames / "img_1.tif", image(77), photometric="minisblack", software="of another size")
    make(out, part="1/3")
    make(out, part="2/3")  # it has the old size and time from the list, and it is none of its files
    expected[1] = image(77)
    assert same(stored(out), expected)
    assert int(index_of(out, "size")[1]) == (frames / "img_1.tif").stat().st_size
    assert make(out).was_there


def test_a_file_of_a_part_that_changed_under_its_receipt_is_refused_for_that_part_and_for_the_whole(
    frames: Path,
) -> None:
    make("out.npy", part="0/3")
    make("out.npy", part="1/3")
    os.utime(frames / "img_3.tif", ns=(1, 1))
    before = kept_bytes("out.npy")
    for part in ("0/3", None):
        with pytest.raises(OutputError, match=r"^1 file changed since it was stored: img_3\.tif;"):
            make("out.npy", part=part)
    assert kept_bytes("out.npy") == before


@EACH_TARGET
def test_what_one_part_filled_is_not_published_by_one_that_raises(frames: Path, expected: Array, out: str) -> None:
    with spoilt(2):
        make(out, part="0/2", on_error="fill")
        assert str(make(out, part="1/2")) == part_done(out, 11)
        with pytest.raises(BadFilesError):
            make(out)
        assert len(make(out, part="1/2", on_error="fill").filled) == 1
    expected[2] = 0
    assert same(stored(out), expected)


def test_parts_of_unlike_builds_into_one_output_are_refused(frames: Path) -> None:
    make("out.npy", part="0/2")
    with pytest.raises(OutputError, match="holds 6 blocks of another build: blocks 12, now 6; options"):
        make("out.npy", part="1/2", files_per_block=2)


@EACH_TARGET
def test_parts_of_joined_files_do_not_read_all_headers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("frames").mkdir()
    for k in range(12):
        tifffile.imwrite(f"frames/img_{k}.tif", image(k, (2 + k % 2, 5, 7)), photometric="minisblack")
    options: dict[str, Any] = {"files_per_block": 1} if out == "out.npy" else {"chunks": (5, -1, -1)}
    options |= {"join": "concat", "shards": None if out != "out.zarr" else (5, -1, -1)}
    with listening() as heard:
        first = make(out, part="0/3", **options)
    assert opened(heard) == set(range(12))
    with listening() as heard:
        make(out, part="1/3", **options)
    own = {k for k in range(12) if k % 3 == 1} if out == "out.npy" else {2, 3, 8, 9}
    assert opened(heard) == {0} | own
    make(out, part="2/3", **options)
    assert same(stored(out), np.concatenate([image(k, (2 + k % 2, 5, 7)) for k in range(12)]))
    assert first.blocks == (12 if out == "out.npy" else 6)


def test_parts_with_a_limit_sorting_and_a_grid(frames: Path, expected: Array) -> None:
    for options in (
        {"limit": 7},
        {"labels": {"t": r"_(\d+)"}, "sort_by": "t"},
        {"labels": last_of, "sort_by": "k"},
        {"labels": last_of, "axes": "k", "limit": 5},
    ):
        for part in ("1/2", "0/2"):
            make("out.npy", part=part, **options)
        make("whole.npy", files_per_block=1, **options)
        assert Path("out.npy").read_bytes() == Path("whole.npy").read_bytes()
        assert index_of("out.npy", "file") == index_of("whole.npy", "file")
        for path in (*Path().glob("out.*"), *Path().glob("whole.*")):
            path.unlink()


# -- others at work ---------------------------------------------------------------------------------------------

_meanwhile: list[Callable[[], object]] = []


def read_meanwhile(path: str) -> Array:
    """A reader in which other things happen, once, while its run is alive."""
    if _meanwhile:
        _meanwhile.pop()()
    return tifffile.imread(path)


LIVE: dict[str, Any] = {"sources": "frames/*.tif", "reader": read_meanwhile, "scheduler": "synchronous"}


def meanwhile(act: Callable[[], object], out: str, **options: Any) -> ds.report.StoreReport:
    """Build, and do something once the staging folder is there."""
    _meanwhile.clear()
    with pytest.MonkeyPatch.context() as patch:
        real = staging.prepare

        def prepare(*arguments: Any, **more: Any) -> staging.Staging:
            held = real(*arguments, **more)
            if not _meanwhile and not getattr(prepare, "done", False):
                prepare.done = True  # type: ignore[attr-defined]
                _meanwhile.append(act)
            return held

        patch.setattr(staging, "prepare", prepare)
        return make(out, **LIVE, **options)


@EACH_TARGET
@pytest.mark.parametrize(("first", "second"), [(None, None), (None, "1/2"), ("0/2", None)], ids=str)
def test_beside_a_live_run_a_whole_one_is_refused_by_its_name(
    frames: Path, expected: Array, out: str, first: str | None, second: str | None
) -> None:
    messages: list[str] = []

    def refused() -> None:
        with pytest.raises(OutputError) as caught:
            make(out, **LIVE, part=second)
        messages.append(str(caught.value))

    meanwhile(refused, out, part=first)
    (message,) = messages
    host = os.uname().nodename
    assert message.startswith(f"{out}.part/")
    assert f" is held by another run of this build ({host}, pid {os.getpid()}, since 20" in message
    assert message.endswith(")\nnext  wait for it, or stop it")
    if first is not None:
        make(out, **LIVE)
    assert same(stored(out), expected)


@EACH_TARGET
def test_parts_beside_a_live_part(frames: Path, expected: Array, out: str) -> None:
    texts: list[str] = []
    done = meanwhile(lambda: texts.append(str(make(out, **LIVE, part="1/2"))), out, part="0/2")
    assert texts == [part_done(out, 6)]
    assert done.blocks_done == 12
    assert same(stored(out), expected)


@EACH_TARGET
def test_the_same_part_twice_at_once(frames: Path, expected: Array, out: str) -> None:
    make(out, **LIVE, part="1/2")
    reports: list[ds.report.StoreReport] = []
    last = meanwhile(lambda: reports.append(make(out, **LIVE, part="0/2")), out, part="0/2")
    assert [report.blocks_done for report in (*reports, last)] == [12, 12]  # the faster one took the folder away
    assert same(stored(out), expected)
    assert sorted(os.listdir(frames.parent)) == sorted(["frames", *made_of(out)])


def test_another_build_into_the_same_output_beside_a_live_one_is_refused(frames: Path) -> None:
    messages: list[str] = []

    def refused() -> None:
        for options in ({"limit": 5}, {"limit": 5, "restart": True}, {"restart": True}):
            with pytest.raises(OutputError) as caught:
                make("out.npy", **LIVE, **options)
            messages.append(caught.value.message)

    meanwhile(refused, "out.npy")
    assert len(messages) == 3
    assert all(f" is held by another run into the same output ({os.uname().nodename}, " in text for text in messages)


def test_two_outputs_of_one_stack_at_once_on_one_cluster(
    frames: Path, expected: Array, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from daskstack import run

    both, real = threading.Barrier(2, timeout=60), run._gather

    def gather(*arguments: Any) -> Any:
        both.wait()
        return real(*arguments)

    monkeypatch.setattr(run, "_gather", gather)
    with Client(cluster, set_as_default=False) as client, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda out: make(out, scheduler=client, files_per_block=1), ["out.npy", "other.npy"]))
    assert same(np.load("out.npy"), expected)
    assert same(np.load("other.npy"), expected)


# -- arrays of Dask ---------------------------------------------------------------------------------------------


def counted(expected: Array, *, fails: bool) -> da.Array:
    """The frames as a Dask array of twelve chunks; each that is computed leaves a line."""

    def compute(block: Array) -> Array:
        k = int(block[0, 0, 0]) // 100
        if fails and k == 3:
            raise RuntimeError("stopped")
        with Path("reads.log").open("a") as f:
            f.write(f"{k}\n")
        return block

    array: Any = da.from_array(expected, chunks=(1, 5, 7))
    lazy: da.Array = array.map_blocks(compute, dtype=expected.dtype, meta=np.empty((0, 0, 0), expected.dtype))
    return lazy


@EACH_TARGET
def test_a_resume_key_keeps_what_was_stored_under_it(frames: Path, expected: Array, out: str) -> None:
    options: dict[str, Any] = {name: value for name, value in TARGETS[out].items() if name != "files_per_block"}
    options |= {"progress": False, "scheduler": "synchronous"}
    with pytest.raises(RuntimeError) as caught:
        store(counted(expected, fails=True), out, resume_key="a", **options)
    first = logged()
    assert caught.value.__notes__ == [f"{len(first)} of 12 blocks are safe in {out}.part"]
    before = kept_bytes(out)
    for key in ("b", None):
        with pytest.raises(OutputError) as refused:
            store(counted(expected, fails=False), out, resume_key=key, **options)
        assert str(refused.value) == (
            f"{out}.part holds {len(first)} blocks of another build: resume_key a, now {key}\n"
            "next  give the command as it was, or --restart to throw them away"
        )
    assert kept_bytes(out) == before
    assert not Path("reads.log").exists()
    store(counted(expected, fails=False), out, resume_key="a", **options)
    assert logged() == sorted(set(range(12)) - set(first))
    assert same(stored(out), expected)
    assert store(counted(expected, fails=False), out, resume_key="a", **options).was_there
    with pytest.raises(OutputExistsError):
        store(counted(expected, fails=False), out, resume_key="b", **options)


@EACH_TARGET
def test_without_a_resume_key_nothing_is_kept_and_nothing_is_in_the_way(
    frames: Path, expected: Array, out: str
) -> None:
    options: dict[str, Any] = {name: value for name, value in TARGETS[out].items() if name != "files_per_block"}
    options |= {"progress": False, "scheduler": "synchronous"}
    with pytest.raises(RuntimeError) as caught:
        store(counted(expected, fails=True), out, **options)
    assert not hasattr(caught.value, "__notes__")
    assert sorted(os.listdir(frames.parent)) == ["frames", "reads.log"]
    logged()
    store(counted(expected, fails=False), out, **options)
    assert logged() == list(range(12))
    assert same(stored(out), expected)


def test_what_a_killed_run_without_a_resume_key_left_is_swept_away(frames: Path, expected: Array) -> None:
    script = (
        "import os, signal, daskstack\n"
        "from daskstack import receipts\n"
        "real = receipts.add\n"
        "def add(*arguments):\n"
        "    real(*arguments)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "receipts.add = add\n"
        "stack = daskstack.open_stack('frames', files_per_block=1)\n"
        "daskstack.store(stack.array, 'out.npy', progress=False)\n"
    )
    assert python("-c", script).returncode == -signal.SIGKILL
    assert len(blocks_kept("out.npy")) >= 1
    store(open_stack("frames").array, "out.npy", progress=False)
    assert same(np.load("out.npy"), expected)
    assert not Path("out.npy.part").exists()


def test_a_reader_that_cannot_be_pickled_is_never_in_its_own_way(frames: Path, expected: Array) -> None:
    with spoilt(3), pytest.raises(BadFilesError) as caught:
        make("out.npy", "frames/*.tif", reader=lambda path: tifffile.imread(path, key=0))
    assert caught.value.message == "1 of 12 files is bad; out.npy not made"
    assert caught.value.advice == "mend or leave out these files, then the same command"
    assert caught.value.listed_in == ""
    assert os.listdir(frames.parent) == ["frames"]
    make("out.npy", "frames/*.tif", reader=lambda path: tifffile.imread(path, key=0))
    assert same(np.load("out.npy"), expected)


# -- looking before ---------------------------------------------------------------------------------------------


def test_plan_check_names_every_bad_file_and_writes_nothing(frames: Path, daskstack: Run) -> None:
    ok = daskstack("plan", "frames", "out.npy", "--check")
    assert ok.returncode == 0, ok.stderr
    assert ok.stdout.splitlines()[-1] == "Nothing was written; every header is as due."
    (frames / "img_2.tif").write_bytes(b"")
    tifffile.imwrite(frames / "img_5.tif", image(5, (4, 7)), photometric="minisblack")
    tifffile.imwrite(frames / "img_9.tif", image(9, dtype="float32"), photometric="minisblack")
    bad = daskstack("plan", "frames", "out.npy", "--check")
    assert bad.returncode == 1
    assert bad.stderr.splitlines() == [
        "error: 3 of 12 files are bad; nothing was written",
        "  frames/img_2.tif  empty file (0 bytes)",
        "  frames/img_5.tif  found (4, 7) uint16, due (5, 7) uint16",
        "  frames/img_9.tif  found float32, due uint16; or cast all files by dtype=",
        "next  mend or leave out these files",
    ]
    assert os.listdir(frames.parent) == ["frames"]


def test_plan_check_names_a_bad_file_whose_header_is_good(frames: Path, daskstack: Run) -> None:
    for k in (4, 6):
        tifffile.imwrite(frames / f"img_{k}.tif", image(k), photometric="minisblack", compression="zlib")
    spoil_pixels(frames / "img_4.tif")
    done = daskstack("plan", "frames", "out.npy", "--check")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: 1 of 12 files is bad; nothing was written"
    assert done.stderr.splitlines()[1].startswith("  frames/img_4.tif  ")


def test_stack_check_in_python(frames: Path) -> None:
    stack = open_stack("frames")
    stack.check()
    (frames / "img_2.tif").write_bytes(b"")
    with pytest.raises(BadFilesError) as caught:
        stack.check()
    assert str(caught.value) == (
        "1 of 12 files is bad; nothing was written\n  frames/img_2.tif  empty file (0 bytes)\n"
        "next  mend or leave out these files"
    )
    assert os.listdir(frames.parent) == ["frames"]


# -- faults that people reported of other tools: the comment names the reports ----------------------------------

FORTY = [image(k) for k in range(40)]


@pytest.fixture
def forty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    """a00.npy to a39.npy in a folder ``in`` of the current one; what they become."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for k, item in enumerate(FORTY):
        np.save(f"in/a{k:02}.npy", item)
    return np.stack(FORTY)


# A build whose reader, which leaves a line for each read, sends its process a signal at the tenth.
INTERRUPTED = """
import os, signal, sys
import numpy as np
import daskstack
def read(path):
    with open("reads.log", "a") as f:
        f.write(path + "\\n")
    with open("reads.log") as f:
        enough = len(list(f)) > 10
    if enough and os.path.exists("interrupt"):
        try:
            os.rename("interrupt", "interrupted")  # one thread can, and only once
        except FileNotFoundError:
            return np.load(path)
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
    return np.load(path)
options = {"chunks": (1, -1, -1), "shards": (1, -1, -1)} if sys.argv[1].endswith(".zarr") else {"files_per_block": 1}
signal.signal(signal.SIGTERM, signal.default_int_handler)
daskstack.build("in/a*.npy", sys.argv[1], reader=read, progress=False, scheduler=sys.argv[3], **options)
"""


def interrupted(out: str, number: str, scheduler: str = "threads", *, again: bool = False) -> tuple[int, str, int]:
    """Exit status, last words and number of reads of such a build, the first header apart."""
    Path("script.py").write_text(INTERRUPTED)
    Path("reads.log").unlink(missing_ok=True)
    if again:
        Path("interrupt").unlink(missing_ok=True)
    else:
        Path("interrupt").touch()
    done = python("", "script.py", out, number, scheduler)
    return done.returncode, done.stderr, len(Path("reads.log").read_text().splitlines()) - 1


# M4i-Imaging-Mass-Spectrometry/thyra#245, webrecorder/warcit#28; ScrollPrize/villa#1342, czbiohub-sf/iohub#455
@pytest.mark.parametrize(
    ("out", "number", "scheduler"),
    [
        ("out.npy", "SIGINT", "threads"),
        ("out.zarr", "SIGTERM", "threads"),
        ("out.npy", "SIGKILL", "synchronous"),
    ],
)
def test_an_interrupt_in_the_middle_leaves_no_output_and_loses_little(
    forty: Array, out: str, number: str, scheduler: str
) -> None:
    code, words, reads = interrupted(out, number, scheduler)
    assert code == -(
        signal.SIGKILL if number == "SIGKILL" else signal.SIGINT
    )  # KeyboardInterrupt, as Python ends by it
    assert reads >= 10
    assert not Path(out).exists()
    kept = blocks_kept(out)
    assert len(kept) >= 8  # two were at work at most
    if number != "SIGKILL":
        assert f"{len(kept)} of 40 blocks are safe in {out}.part" in words
    code, words, reads = interrupted(out, number, scheduler, again=True)
    assert (code, reads) == (0, 40 - len(kept)), words
    assert same(stored(out), forty)
    assert not Path(f"{out}.part").exists()


# the same
def test_never_fewer_blocks_are_done_after_than_before(forty: Array) -> None:
    out = "out.zarr"
    reads = done = 0
    for _ in range(2):
        reads += interrupted(out, "SIGKILL", "synchronous")[2]
        assert len(blocks_kept(out)) > done
        done = len(blocks_kept(out))
    code, words, more = interrupted(out, "SIGKILL", again=True)
    assert code == 0, words
    assert more == 40 - done
    assert reads + more <= 40 + 2  # at each kill the block at work was lost
    assert same(stored(out), forty)


# JustVugg/colibri#404, WinetraubLab/myOCT#137
@pytest.mark.parametrize("what", ["into the middle", "at the end", "first", "gone", "renamed", "another shape"])
@NPY_AND_ZARR
def test_resumed_with_other_inputs_it_says_so_and_keeps_what_it_had(forty: Array, out: str, what: str) -> None:
    options = {**TARGETS[out], "progress": False}
    held = Path("in/a07.npy").read_bytes(), os.stat("in/a07.npy").st_mtime_ns
    Path("in/a07.npy").write_bytes(b"")
    with pytest.raises(BadFilesError):
        build("in", out, **options)
    Path("in/a07.npy").write_bytes(held[0])
    before = kept_bytes(out)
    name = {"into the middle": "a05b.npy", "at the end": "a99.npy", "first": "a-1.npy"}.get(what)
    if name is not None:
        np.save(f"in/{name}", image(99))
        message = f"the list has 1 file more (in/{name})"
    elif what == "gone":
        Path("in/a05.npy").unlink()
        message = "the list has 1 file fewer (in/a05.npy)"
    elif what == "renamed":
        Path("in/a05.npy").rename("in/a05x.npy")
        message = "the list has 1 file more (in/a05x.npy) and 1 file fewer (in/a05.npy)"
    else:
        for k in range(40):
            np.save(f"in/a{k:02}.npy", image(k, (5, 8)))
        message = "shape [40, 5, 7], now [40, 5, 8]"
        if out == "out.zarr":
            message = f"chunks [1, 5, 7], now [1, 5, 8]; shards [1, 5, 7], now [1, 5, 8]; {message}"
    with pytest.raises(OutputError) as caught:
        build("in", out, **options)
    assert caught.value.message == f"{out}.part holds 39 blocks of another build: {message}"
    assert kept_bytes(out) == before
    assert not Path(out).exists()


# ScrollPrize/villa#1695
@pytest.mark.parametrize("item", [0, 3, 4])
@NPY_AND_ZARR
def test_a_finished_output_with_a_byte_overwritten_is_not_taken_for_done(forty: Array, out: str, item: int) -> None:
    sources = [f"in/a{k:02}.npy" for k in range(5)]
    build(sources, out, progress=False, **TARGETS[out])
    path = Path(out) if out == "out.npy" else Path(f"out.zarr/data/c.{item}.0.0")
    data = bytearray(path.read_bytes())
    at = len(data) - (5 - item) * 70 if out == "out.npy" else len(data) // 2
    data[at] ^= 1
    path.write_bytes(data)
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError) as caught:
            build(sources, out, progress=False, overwrite=overwrite, **TARGETS[out])
        assert str(caught.value) == (
            f"{out} exists and was changed since daskstack made it; it was not touched\n"
            "next  move it away, or choose another OUT"
        )
    assert path.read_bytes() == data
    report = ds.verify(out, data=True, progress=False)
    assert (report.status, [(p.item, p.file) for p in report.problems]) == (1, [(item, f"a{item:02}.npy")])
    if out == "out.npy":  # the index tells which item it is, and of which file
        found = [f"{ds.targets.crc32c(part):08x}" for part in np.load(out)]
        differ = [k for k, (a, b) in enumerate(zip(found, index_of(out, "checksum"), strict=True)) if a != b]
        assert [index_of(out, "file")[k] for k in differ] == [f"a{item:02}.npy"]
    else:  # as does each chunk's own checksum
        with pytest.raises(ValueError, match=r"(?i)checksum|crc32c"):
            stored(out)


# -- what reviews found -----------------------------------------------------------------------------------------


def test_the_names_of_very_many_sources_are_not_all_on_record(frames: Path) -> None:
    names = [frames / f"img_{k % 12}.tif" for k in range(25)]
    make("out.npy", names)
    found = ds.open("out.npy")
    assert len(found.record["sources"]) == 21
    assert found.record["sources"][-1] == "5 more"
    assert len(found.files) == 25
    assert make("out.npy", names).was_there


@pytest.mark.parametrize("out", ["nowhere/out.npy", "s3://bucket/out.npy", "out.hdf5"])
def test_a_part_of_what_cannot_be_is_refused_at_once(frames: Path, daskstack: Run, out: str) -> None:
    done = daskstack("build", "frames", out, "--part", "0/2")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert os.listdir(frames.parent) == ["frames"]


@pytest.mark.parametrize("out", ["out.zarr", "two.zarr"])
def test_columns_of_a_killed_publication_are_not_published(frames: Path, expected: Array, out: str) -> None:
    target = ds.targets.ZarrTarget
    real = target.finish

    def killed(self: Any, folder: str, name: str, index: Any) -> Any:
        real(self, folder, name, index)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, spoilt(3):
        patch.setattr(target, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            make(out, on_error="fill")
    make(out)
    assert same(stored(out), expected)
    assert not Path(out, "filled").exists()
    assert make(out).was_there


def test_a_resume_key_holds_for_the_items_that_like_names(frames: Path) -> None:
    stack = open_stack("frames")

    def derive(of: Any, **options: Any) -> ds.report.StoreReport:
        return store(of.array + 1, "out.npy", like=of, resume_key="a", progress=False, **options)

    derive(stack[:6])
    with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
        derive(stack[6:])
    with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
        store(stack[:6].array + 1, "out.npy", resume_key="a", progress=False)
    assert derive(stack[:6]).was_there


def test_what_a_killed_run_left_while_it_threw_its_folder_away_goes(frames: Path) -> None:
    make("out.npy")
    private = Path("out.npy.part", f".{'0' * 32}")
    private.mkdir(parents=True)
    (private / "manifest.json").write_bytes(b"{}")
    (private / "lock").touch()
    assert make("out.npy").was_there
    assert not Path("out.npy.part").exists()


def test_a_signal_while_it_publishes_finds_the_work_done(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = publication.publish

    def publish(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("daskstack.run.publish", publish)
    assert make("out.npy").blocks_done == 12
    assert same(np.load("out.npy"), expected)
    assert sorted(os.listdir(frames.parent)) == ["frames", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_what_is_kept_is_told_with_any_error(frames: Path, daskstack: Run) -> None:
    script = (
        "import os, sys\n"
        "from daskstack.targets import NpyTarget\n"
        "real = NpyTarget.write\n"
        "def write(self, folder, start, block):\n"
        "    if start == 5:\n"
        "        raise OSError(5, 'Input/output error')\n"
        "    real(self, folder, start, block)\n"
        "NpyTarget.write = write\n"
        "from daskstack.cli import main\n"
        "main(sys.argv[1:])"
    )
    done = python("-c", script, "build", "frames", "out.npy", "-q", "--scheduler", "synchronous")
    assert done.returncode == 1
    assert "kept  5 of 12 blocks are safe in out.npy.part" in done.stderr


def test_the_speed_of_a_resumed_run_is_that_of_what_it_read(frames: Path) -> None:
    stop("out.npy", 3, 7)
    report = make("out.npy")
    assert (report.files, report.read) == (12, 2)
    assert f", {round(2 / report.seconds):,} files/s" in str(report)


def test_a_replacement_that_a_part_began_is_finished_by_another(frames: Path, expected: Array) -> None:
    make("out.npy", limit=5)
    script = (
        "import os, daskstack\n"
        "from daskstack import files\n"
        "real = files.move_new\n"
        "def killed(source, target):\n"
        "    if target.endswith('out.npy.json'):\n"
        "        os._exit(9)\n"
        "    real(source, target)\n"
        "files.move_new = killed\n"
        "daskstack.build('frames', 'out.npy', files_per_block=1, progress=False, overwrite=True, part='0/1')"
    )
    assert python("-c", script).returncode == 9
    assert list(Path("out.npy.part").glob("*/replaced/out.npy"))
    make("out.npy", overwrite=True, part="0/1")
    assert same(np.load("out.npy"), expected)
    assert not Path("out.npy.part").exists()
