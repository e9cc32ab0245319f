"""Faults that people reported of other tools: each as small inputs, siblings of its kind, and what must come of it.

The comment above a test names the public reports (``owner/repository#number``) that it stands for; "the
same" goes on with that of the test before.  ``gives`` is for inputs that make an array, ``refuses`` for
those that must not: both build with each scheduler and look at what the inputs are afterwards.
"""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import dask.array as da
import imagecodecs
import numpy as np
import pytest
import tensorstore
import tifffile
import zarr
from conftest import published
from distributed import Client
from forkserver import python
from numpy.typing import NDArray

import daskstack
from daskstack.errors import (
    BadFilesError,
    DaskstackError,
    NoSpaceError,
    OutputExistsError,
    SourceError,
    StackWarning,
    UsageError,
)

Array: TypeAlias = NDArray[Any]

SCHEDULERS = ("threads", "synchronous")
SHAPE = (5, 7)  # not square, so that axes that change places show
JOINS = pytest.mark.parametrize("join", ["stack", "concat"])


def frame(seed: int, shape: tuple[int, ...] = SHAPE, dtype: Any = "uint16") -> Array:
    """Noise: no two images are alike."""
    return np.random.default_rng(seed).integers(0, 50_000, shape).astype(dtype)


def frames(count: int, shape: tuple[int, ...] = SHAPE, dtype: Any = "uint16") -> Array:
    return np.stack([frame(k, shape, dtype) for k in range(count)])


def npy(path: Path, array: Any) -> str:
    with path.open("wb") as f:  # given a name, numpy.save makes x.NPY.npy of x.NPY
        np.save(f, array)
    return str(path)


def tiff(path: Path, array: Any, **options: Any) -> str:
    tifffile.imwrite(path, array, **{"photometric": "minisblack", **options})
    return str(path)


def paged(path: Path, pages: Sequence[Array] | Array, **options: Any) -> str:
    """A TIFF file written page by page, without a description that says what they are together."""
    with tifffile.TiffWriter(path) as writer:
        for page in pages:
            writer.write(page, **{"metadata": None, "contiguous": False, "photometric": "minisblack", **options})
    return str(path)


SAVE: dict[str, Callable[..., str]] = {"npy": npy, "tif": tiff}


def patch(path: str | Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def cut(path: str | Path, size: int) -> None:
    """Shorten a file to its first bytes, or by its last ones where ``size`` is negative."""
    os.truncate(path, size if size >= 0 else os.path.getsize(path) + size)


def link_directory(path: str | Path, page: int, target: int) -> None:
    """Let the directory of a page be followed by the one at ``target``; 0 is none."""
    with tifffile.TiffFile(path) as tif:
        found: Any = tif.pages[page]
        at, order = found.offset + 2 + 12 * len(found.tags), tif.byteorder
    patch(path, at, target.to_bytes(4, "little" if order == "<" else "big"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the inputs of a test lie; outputs go beside it."""
    path = tmp_path / "in"
    path.mkdir()
    return path


@dataclass(frozen=True)
class Way:
    """A kind of output, and who makes it."""

    kind: str
    scheduler: Any
    threads: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"scheduler": self.scheduler, "threads": self.threads, "progress": False}
        return options | ({"zarr_format": 2} if self.kind == "zarr 2" else {})

    def name(self, stem: str = "out") -> str:
        return f"{stem}.{self.kind[:4].strip()}"

    def read(self, out: Path, label: str | None = None) -> Array:
        """The array of an output, or one of its labels, with nothing of daskstack."""
        if self.kind == "npy":
            return np.asarray(np.load(out.with_suffix(f".{label}.npy") if label else out, max_header_size=1 << 20))
        group = zarr.open_group(str(out), mode="r", zarr_format=2 if self.kind == "zarr 2" else 3)
        return np.asarray(group[label or "data"][...])  # type: ignore[index]


PLAIN = (Way("npy", "threads"), Way("npy", "synchronous"))
EVERYWHERE = tuple(Way(kind, s, 2) for s in ("synchronous", "threads", "processes") for kind in ("npy", "zarr"))
OUTPUTS = ("npy", "zarr", "zarr 2")
EVERY_SCHEDULER = ("synchronous", "threads", "processes", "client")
EVERY_WAY = pytest.mark.parametrize(
    "way", [(k, s) for k in OUTPUTS for s in EVERY_SCHEDULER], indirect=True, ids=" by ".join
)
# each kind of output and each scheduler once at least, where a test is about neither
SOME = [("npy", "client"), ("zarr", "processes"), ("zarr", "synchronous"), ("zarr 2", "threads")]
SOME_WAYS = pytest.mark.parametrize("way", SOME, indirect=True, ids=" by ".join)


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Of three axes, the longest first, as few choices as hold each pair of values of any two of them."""
    first, second, third = map(list, axes)
    assert len(first) >= len(second) >= len(third)
    return [(one, two, third[(i + j) % len(third)]) for i, one in enumerate(first) for j, two in enumerate(second)]


# where tasks are at work at the same time
RACING = [*((kind, "threads") for kind in OUTPUTS), ("zarr", "client"), ("zarr 2", "processes")]
RACING_WAYS = pytest.mark.parametrize("way", RACING, indirect=True, ids=" by ".join)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    kind, scheduler = request.param
    threads = 8 if scheduler == "threads" else None
    if scheduler == "client":
        yield Way(kind, request.getfixturevalue("client"))
    elif scheduler == "processes":
        request.getfixturevalue("pool")  # processes that stay: no test starts its own
        yield Way(kind, scheduler, 2)
    else:
        yield Way(kind, scheduler, threads)


usual = PLAIN


@pytest.fixture(autouse=True)
def usual_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first inputs of each test, and those next to them, become every output by every scheduler."""
    spec = getattr(request.node, "callspec", None)
    first = spec is None or sum(spec.indices.values()) <= 2
    # a cluster's workers, when they are started again, get Dask's configuration, and cannot get a pool
    if first and "folder" in request.fixturenames and not {"way", "client"} & set(request.fixturenames):
        request.getfixturevalue("pool")
        monkeypatch.setattr(sys.modules[__name__], "usual", EVERYWHERE)


def contents(folder: Path) -> dict[str, object]:
    """All that lies in a folder: targets of links, bytes and times of files."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes(), path.stat().st_mtime_ns
    return found


def base(paths: Sequence[Any]) -> list[str]:
    return [os.path.basename(p) for p in paths]


def assert_same(found: Array, due: Array) -> None:
    assert found.dtype == due.dtype.newbyteorder("=")
    assert found.shape == due.shape
    assert found.flags.c_contiguous
    if found.dtype.names is None:  # bytes: the sign of zero and the kind of NaN count
        assert found.tobytes() == due.astype(found.dtype).tobytes()
    else:
        assert np.array_equal(found, due)


def gives(
    folder: Path,
    sources: Any,
    due: Array,
    *,
    ways: Sequence[Way] | None = None,
    labelled: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> None:
    """Hold array and labels that the sources make against those that are due."""
    before = contents(folder)
    for way in usual if ways is None else ways:
        out = folder.parent / way.name(str(len(os.listdir(folder.parent))))
        stack = daskstack.open_stack(sources, **options)
        daskstack.build(sources, out, **options, **way.options)
        assert_same(way.read(out), due)
        assert labelled is None or set(stack.labels) == set(labelled)
        for name, values in (labelled or {}).items():
            assert stack.labels[name].tolist() == list(values)
            assert way.read(out, name).tolist() == list(values)
        assert not os.path.lexists(f"{out}.part")
    assert contents(folder) == before


def refuses(
    folder: Path,
    sources: Any,
    *bad: str,
    ways: Sequence[Way] | None = None,
    error: type[DaskstackError] = BadFilesError,
    says: Sequence[str] = (),
    **options: Any,
) -> str:
    """Hold the report of a build that must fail against the bad files' names, and look for what it left behind."""
    before, beside = contents(folder), published(folder.parent)
    for way in usual if ways is None else ways:
        out = folder.parent / way.name()
        with pytest.raises(error) as caught:
            daskstack.build(sources, out, restart=True, **options, **way.options)
        report = str(caught.value)
        assert [text for text in (*bad, *says) if text not in report] == []
        if isinstance(caught.value, BadFilesError):
            assert base([f.path for f in caught.value.files]) == list(bad)
        assert published(folder.parent) == beside
    assert contents(folder) == before
    return report


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "daskstack", *arguments, **options)


def command_refuses(folder: Path, *arguments: object, says: Sequence[str], status: int = 1) -> str:
    """The same for ``daskstack build``: exit status, message on stderr, no traceback, nothing left behind."""
    before, beside = contents(folder), published(folder.parent)
    done = command("build", *arguments)
    assert done.returncode == status, done.stderr
    assert [text for text in says if text not in done.stderr] == []
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert published(folder.parent) == beside
    assert contents(folder) == before
    return done.stderr


def script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a few lines of Python by themselves, as limits of a process need it."""
    words = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


# ---------------------------------------------------------------------------------------- discovery


NATURAL = [
    ["img_1", "img_2", "img_3", "img_9", "img_10", "img_100"],
    ["img1", "img2", "img10"],
    ["1", "2", "10", "100"],
    ["x 1", "x 2", "x 10"],
    ["x.1", "x.2", "x.10"],
    ["x(1)", "x(2)", "x(10)"],
    ["t1_z2", "t1_z10", "t2_z1", "t10_z1"],
    ["v1.2", "v1.10", "v2.1"],
    ["img_1", "img_02", "img_3", "img_010"],
    ["T1", "t2", "T10"],
    ["n18446744073709551617", "n28446744073709551616", "n118446744073709551616"],
    ["img_１", "img_２", "img_１０"],  # full-width digits
    ["img_१", "img_२", "img_१०"],  # Devanagari
    ["run-1", "run-2", "run-3", "run-10", "run-20"],
    ["-1", "-2", "-10"],
    ["a--1", "a--2", "a--10"],
    ["1-1", "1-2", "1-10", "2-1"],
    ["run_2/a", "run_10/a", "run_10/b"],
]


# dask/dask-image#265, soft-matter/pims#42: numbers without padding
# nwoltman/string-natural-compare#1, litejs/natural-compare-lite#3: a hyphen is not a minus
@pytest.mark.parametrize("names", NATURAL, ids=lambda names: names[-1])
def test_natural_order(folder: Path, names: list[str]) -> None:
    due = frames(len(names))
    for k in reversed(range(len(names))):
        path = folder / f"{names[k]}.npy"
        path.parent.mkdir(exist_ok=True)
        npy(path, due[k])
    gives(folder, folder, due, labels={"name": str}, labelled={"name": [f"{n}.npy" for n in names]})


# HEXRD/hexrd#263: the order in which a file system lists names does not matter
@pytest.mark.parametrize("source", ["", "test_0*.npy", "**/*.npy"])
@pytest.mark.parametrize("order", ["reversed", "shuffled", "turned"])
def test_order_of_the_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch, order: str, source: str) -> None:
    due = frames(12)
    for k in range(12):
        npy(folder / f"test_{k:05}.npy", due[k])
    real = os.scandir

    class Entries:
        def __init__(self, entries: list[Any]) -> None:
            self.left = iter(entries)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return next(self.left)

    def scandir(path: Any) -> Any:
        with real(path) as entries:
            names = sorted(entries, key=lambda e: e.name)
        shuffled = random.Random(0).sample(names, len(names))
        turned = {"reversed": names[::-1], "shuffled": shuffled, "turned": [*names[5:], *names[:5]]}[order]
        return Entries(turned)

    monkeypatch.setattr(os, "scandir", scandir)
    gives(folder, str(folder / source), due, labels=r"test_(?P<k>\d+)", labelled={"k": range(12)})


# BodenmillerGroup/steinbock#133, scverse/spatialdata-io#260, weigertlab/spotiflow#12: AppleDouble files
@pytest.mark.parametrize("kind", ["npy", "tif"])
@pytest.mark.parametrize("where", ["._{}", "__MACOSX/{}", "__MACOSX/._{}", ".AppleDouble/{}"])
def test_apple_double(folder: Path, kind: str, where: str) -> None:
    due = frames(3)
    for k in range(3):
        SAVE[kind](folder / f"a_{k}.{kind}", due[k])
        hidden = folder / where.format(f"a_{k}.{kind}")
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_bytes(b"\x00\x05\x16\x07\x00\x02\x00\x00" + bytes(90))
    gives(folder, folder, due, labels=r"a_(?P<k>\d)", labelled={"k": range(3)})
    gives(folder, str(folder / "*"), due)
    assert "left out: " in repr(daskstack.open_stack(folder))


# the same: how many were left out is on record; one that is named is an error
def test_apple_double_is_told(folder: Path) -> None:
    for k in range(3):
        npy(folder / f"a_{k}.npy", frame(k))
        (folder / f"._a_{k}.npy").write_bytes(b"\x00\x05\x16\x07" + bytes(90))
    refuses(folder, [folder / "a_0.npy", folder / "._a_1.npy"], "._a_1.npy", says=["AppleDouble"])
    done = command("build", "--verbose", "--restart", folder, folder.parent / "out.npy")
    assert done.returncode == 0
    assert re.search(r"left out.*\b3\b|\b3\b.*left out", done.stdout + done.stderr)


LITTER = {
    "system": ["Thumbs.db", ".DS_Store", "desktop.ini", "ehthumbs.db", "Icon\r", ".directory"],
    "unfinished": ["f1.npy.tmp", "f2.npy~", "f0.npy.part", "f1.npy.crdownload", ".f1.npy.swp", "#f1.npy#", "~$f1.npy"],
    "others": ["notes.txt", "README", "f1.npy.md5", "table.csv", "f1.json"],
    "hidden": [".f9.npy", "._f0.npy", ".nfs00001.npy"],
    "folders": [
        "sub.npy/x.txt",
        "@eaDir/f1.npy",
        ".git/f1.npy",
        "$RECYCLE.BIN/f1.npy",
        "#recycle/f1.npy",
        "old.zarr/f1.npy",
    ],
}


# soft-matter/trackpy#87, brainglobe/cellfinder-napari#88, apple/turicreate#644: Thumbs.db and .DS_Store
@pytest.mark.parametrize("source", ["", "*", "**"])
@pytest.mark.parametrize("litter", LITTER.values(), ids=LITTER)
def test_litter(folder: Path, litter: list[str], source: str) -> None:
    due = frames(3)
    for k in range(3):
        npy(folder / f"f{k}.npy", due[k])
    for name in litter:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x00\x00\x00\x01Bud1 not an array")
    gives(folder, str(folder / source), due)


SUFFIXES = {
    "tif": ("", [".tif", ".TIF", ".tiff", ".TIFF", ".Tif", ".tIFF"], 6),
    "npy": ("", [".npy", ".NPY", ".Npy"], 3),
    "pattern": ("scan?.tif", [".tif", ".TIF", ".Tif", ".tiff"], 3),
    "PATTERN": ("*.TIFF", [".tiff", ".TIFF", ".tif"], 2),
}


# MouseLand/suite2p#502, mikrosimage/duke#16: suffixes in any case
@pytest.mark.parametrize(("source", "suffixes", "taken"), SUFFIXES.values(), ids=SUFFIXES)
def test_suffix_in_any_case(folder: Path, source: str, suffixes: list[str], taken: int) -> None:
    due = frames(len(suffixes))
    for k, suffix in enumerate(suffixes):
        SAVE["npy" if ".npy" in suffixes else "tif"](folder / f"scan{k}{suffix}", due[k])
    gives(folder, str(folder / source), due[:taken], labels=r"scan(?P<k>\d)", labelled={"k": range(taken)})


# datalad/datalad#3513, dandi/dandisets#175: dangling links
@pytest.mark.parametrize("source", ["", "z*.tif", "list"])
@pytest.mark.parametrize("target", ["annex/none.tif", "hop", "{}"], ids=["missing", "chain", "loop"])
@pytest.mark.parametrize("bad", [[1], [0], [0, 2, 3], [0, 1, 2, 3]], ids=str)
def test_dangling_link(folder: Path, bad: list[int], target: str, source: str) -> None:
    names = [f"z{k}.tif" for k in range(4)]
    (folder / "hop").symlink_to("annex/none.tif")
    for k, name in enumerate(names):
        if k in bad:
            (folder / name).symlink_to(target.format(name))
        else:
            tiff(folder / name, frame(k))
    sources: Any = [folder / name for name in names] if source == "list" else str(folder / source)
    refuses(folder, sources, *(names[k] for k in bad), error=SourceError, says=["link"])


# the same: links that lead somewhere are files like others, by the links' names and in their order
@pytest.mark.parametrize("source", ["", "*.npy"])
def test_living_link(folder: Path, source: str) -> None:
    due = frames(4)
    for k in range(4):
        npy(folder.parent / f"object_{9 - k}", due[k])
        (folder / f"z{k}.npy").symlink_to(f"../object_{9 - k}")
    gives(folder, str(folder / source), due, labels=r"^z(?P<k>\d)", labelled={"k": range(4)})


TREES = [
    ["dogs/1", "dogs/2", "wolves/1", "wolves/2"],
    ["0", "a/0", "a/a/0", "a/b/0", "b/a/0"],
    ["day 2/img", "day 10/img"],
]


# rom1504/clip-retrieval#321, ultralytics/ultralytics#20440: the same names in several folders
@pytest.mark.parametrize("source", ["", "**/*.tif", "list"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree[-1])
def test_same_names_in_folders(folder: Path, tree: list[str], source: str) -> None:
    due = frames(len(tree))
    names = [f"{name}.tif" for name in tree]
    for k in reversed(range(len(tree))):
        (folder / names[k]).parent.mkdir(parents=True, exist_ok=True)
        tiff(folder / names[k], due[k])
    sources: Any = [folder / name for name in names] if source == "list" else str(folder / source)
    gives(folder, sources, due, labels={"name": str}, labelled={"name": names})
    for index in folder.parent.glob("*.index.csv"):
        with index.open(newline="") as f:
            assert [row["file"] for row in csv.DictReader(f)] == names


# blink1073/tifffile#53, scikit-image/scikit-image#4272: letters and digits in names are no axes
@pytest.mark.parametrize("inner", ["2018_11_12-L2_T7_C3", "S1_T2_C3", "t=2, z=[4]"])
@pytest.mark.parametrize("name", ["test_p{}.tif", "img_T0_Z{}_C1.tif", "x{}y0.tif"])
def test_no_axes_from_names(folder: Path, inner: str, name: str) -> None:
    due = frames(3)
    (folder / inner).mkdir()
    for k in range(3):
        tiff(folder / inner / name.format(k), due[k])
    gives(folder, str(folder / inner / "*.tif"), due, labelled={})


NO_MATCH = [["A001.*.tif"], ["*.npy"], ["A001_[0-8]*.tif"], ["**/*.nosuch"], ["none/*.tif"], ["empty"], ["none.tif"]]


# justinfx/fileseq#110, MouseLand/suite2p#502: what matches nothing is told at once, with the pattern
@pytest.mark.parametrize("patterns", [*NO_MATCH, ["A001.*", "B*.tif"], ["*.tif", "C?.tif"]], ids=str)
def test_nothing_matches(folder: Path, patterns: list[str]) -> None:
    tiff(folder / "A001_924360.tif", frame(0))
    (folder / "empty").mkdir()
    sources = [os.path.join(folder, p) for p in patterns]
    unmet = [p for p in patterns if p != "*.tif"]
    refuses(folder, sources if len(sources) > 1 else sources[0], error=SourceError, says=unmet)


def test_nothing_matches_on_the_command_line(folder: Path) -> None:
    tiff(folder / "A001_924360.tif", frame(0))
    command_refuses(folder, folder / "A001.*.tif", folder.parent / "out.npy", says=["error: ", "A001.*.tif", "next "])


# NVlabs/STEP#6, czbiohub-sf/iohub#97: a number is missing
@pytest.mark.parametrize(
    ("numbers", "missing"),
    [([0, 1, 3], "without 2$"), ([0, 2, 4, 8], "without 6$"), ([1, 2, 5, 6, 7], "without 3, 4$"), ([7, 8, 9], "")],
    ids=str,
)
def test_missing_number(folder: Path, numbers: list[int], missing: str) -> None:
    due = frames(len(numbers))
    for k, number in enumerate(numbers):
        npy(folder / f"t{number:03}.npy", due[k])
    asked: dict[str, Any] = {"labels": r"t(?P<t>\d+)", "labelled": {"t": numbers}}
    if missing:
        with pytest.warns(StackWarning, match=missing):
            gives(folder, folder, due, **asked)
    else:  # a warning would be an error
        gives(folder, folder, due, **asked)


def test_missing_number_on_the_command_line(folder: Path) -> None:
    for k in (0, 1, 3):
        npy(folder / f"t{k}.npy", frame(k))
    out = folder.parent / "out.npy"
    done = command("build", folder, out, "--labels", r"t(?P<t>\d+)")
    assert done.returncode == 0
    assert re.search(r"^warning: .*\b2$", done.stderr, re.MULTILINE)
    assert_same(np.load(out), frames(4)[[0, 1, 3]])
    assert np.load(folder.parent / "out.t.npy").tolist() == [0, 1, 3]


# Deltares/imod-python#48: another current folder between opening and computing
@pytest.mark.parametrize("source", [".", "r*.npy", "../in", "../*/r?.npy", ["r0.npy", "r1.npy", "./r2.npy"]], ids=str)
def test_change_of_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    due = frames(3)
    for k in range(3):
        npy(folder / f"r{k}.npy", due[k])
    for number, way in enumerate(usual):
        monkeypatch.chdir(folder)
        stack = daskstack.open_stack(source)
        lazy, out = stack.array, folder.parent / way.name(str(number))
        monkeypatch.chdir("/")
        (stack.to_npy if way.kind == "npy" else stack.to_zarr)(out, **way.options)
        assert_same(way.read(out), due)
        assert_same(lazy.compute(scheduler=way.scheduler), due)
        assert_same(stack[1], due[1])


# visit-dav/visit#19473, milesial/Pytorch-UNet#449, ubccr/supremm#30: very many files
@pytest.mark.parametrize("kind", ["folder", "folders", "list"])
def test_very_many_files(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    count = 1500
    due = np.stack([np.arange(count), np.full(count, 7)], axis=1).astype("uint32")
    stream = io.BytesIO()
    np.save(stream, due[0])
    for k in range(4):
        (folder / str(k)).mkdir()
    paths = [folder / (f"{4 * k // count}/{k}.npy" if kind == "folders" else f"{k}.npy") for k in range(count)]
    for path, pair in zip(paths, due, strict=True):
        path.write_bytes(stream.getvalue()[:-8] + pair.tobytes())
    sources: Any = paths if kind == "list" else folder
    ways = None if kind == "folder" else PLAIN
    gives(folder, sources, due, labels=r"(?P<k>\d+)\.npy", labelled={"k": range(count)}, ways=ways)

    calls = dict.fromkeys(("scandir", "open", "stat"), 0)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    daskstack.open_stack(sources)
    assert calls["scandir"] == (0 if kind == "list" else 5)  # each folder once
    assert calls["open"] <= 2  # one header
    assert calls["stat"] < 2.1 * count  # size and time of each, and whether a name that is given is a folder


# dask/dask-image#191, dask/dask#7257: a list keeps its order, repeats included
@pytest.mark.parametrize("order", [[2, 0, 3, 3, 1], [3, 2, 1, 0], [1], [0, 0, 0], [1, 0, 1, 0, 1]], ids=str)
@pytest.mark.parametrize("kind", [list, tuple])
def test_list_keeps_its_order(folder: Path, order: list[int], kind: Callable[[Any], Any]) -> None:
    paths = [Path(npy(folder / f"{k}.npy", frame(k))) for k in range(4)]
    sources = kind(paths[k] for k in order)
    due = frames(4)[order]
    gives(folder, sources, due, labels=r"(?P<k>\d)\.npy", labelled={"k": order})
    gives(folder, sources, np.concatenate(due), join="concat")


@pytest.mark.parametrize("given", ["file", "stdin"])
def test_list_on_the_command_line(folder: Path, given: str) -> None:
    order = [2, 0, 3, 3, 1]
    for k in range(4):
        npy(folder / f"{k}.npy", frame(k))
    names = "".join(f"{folder}/{k}.npy\n" for k in order)
    listed, out = folder.parent / "list.txt", folder.parent / "out.npy"
    listed.write_text(names)
    done = command("build", "--files-from", listed if given == "file" else "-", out, stdin=names)
    assert done.returncode == 0, done.stderr
    assert_same(np.load(out), frames(4)[order])


# -------------------------------------------------------------------------- reading: damaged files


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 198\n"
FOREIGN = {
    "git-annex": (b"/annex/objects/SHA256E-s198--4d4d.tif\n", "git annex get"),
    "DVC": (b"outs:\n- md5: 4d4d4d4d\n  size: 198\n  path: a1.tif\n", "dvc pull"),
    "JSON": (b'{"message": "Not Found"}', "JSON"),
    "pointer, CRLF": (POINTER.replace(b"\n", b"\r\n"), "Git LFS pointer"),
    "page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "error": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
    "gzip": (gzip.compress(b"II*\x00" + bytes(60)), "gzip"),
    "bzip2": (bz2.compress(bytes(198)), "bzip2"),
    "zeros": (bytes(198), "zeros"),
    "text": (b"1 2 3\n4 5 6\n", "1 2 3"),
}


# micasense/imageprocessing#193, iksungk/CoCoA#1: Git LFS pointers
@pytest.mark.parametrize("kind", ["npy", "tif"])
@pytest.mark.parametrize("bad", [[1], [0], [0, 2], [0, 1, 2]], ids=str)
def test_git_lfs_pointer(folder: Path, kind: str, bad: list[int]) -> None:
    paths = [SAVE[kind](folder / f"a{k}.{kind}", frame(k)) for k in range(3)]
    for k in bad:
        Path(paths[k]).write_bytes(POINTER)
    report = refuses(folder, folder, *base([paths[k] for k in bad]))
    assert report.count("Git LFS pointer") == len(bad)
    assert "allow_pickle" not in report


# the same: other things that are no data
@pytest.mark.parametrize("kind", ["npy", "tif"])
@pytest.mark.parametrize(("data", "word"), FOREIGN.values(), ids=FOREIGN)
def test_no_data_but_something_else(folder: Path, kind: str, data: bytes, word: str) -> None:
    for k in range(3):
        SAVE[kind](folder / f"a{k}.{kind}", frame(k))
    (folder / f"a1.{kind}").write_bytes(data)
    assert "allow_pickle" not in refuses(folder, folder, f"a1.{kind}", says=[word])


# kamilburda/batcher#65, alexeygrigorev/clothing-dataset#1, terraref/computing-pipeline#469: files of zero bytes
@pytest.mark.parametrize("kind", ["npy", "tif"])
@JOINS
@pytest.mark.parametrize("bad", [[1, 3], [0], [4], [0, 1, 4], [0, 1, 2, 3, 4]], ids=str)
def test_zero_bytes(folder: Path, kind: str, join: str, bad: list[int]) -> None:
    paths = [SAVE[kind](folder / f"q{k}.{kind}", frame(k)) for k in range(5)]
    for k in bad:
        cut(paths[k], 0)
    names = base([paths[k] for k in bad])
    refuses(folder, paths, *names, says=["0 bytes"], join=join)
    if join == "stack" and len(bad) < 5:  # and it is known before any pixel is read
        assert base([e.path for e in daskstack.open_stack(paths).condemned()]) == names


def test_zero_bytes_on_the_command_line(folder: Path) -> None:
    for k in range(4):
        tiff(folder / f"q{k}.tif", frame(k))
    for k in (1, 3):
        cut(folder / f"q{k}.tif", 0)
    says = ["error: 2 of 4 files are bad", "q1.tif", "q3.tif", "0 bytes", "next "]
    text = command_refuses(folder, folder, folder.parent / "out.npy", says=says)
    assert "q0.tif" not in text
    plan = command("plan", folder, folder.parent / "out.npy")
    assert re.findall(r"^  .*(q\d\.tif)  empty", plan.stderr, re.MULTILINE) == ["q1.tif", "q3.tif"]


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strips": {"rowsperstrip": 8},
    "zlib": {"rowsperstrip": 8, "compression": "zlib"},
    "lzw": {"compression": "lzw"},
    "tiles": {"tile": (16, 16)},
    "big-endian": {"byteorder": ">"},
    "BigTIFF": {"bigtiff": True},
    "ImageJ": {"imagej": True},
}


# mantidproject/mantidimaging#1875, mantidproject/mantidimaging#1892: a file that is still being copied
@pytest.mark.parametrize(("share", "bad"), [(0.5, 2), (0.99, 0)])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_unfinished_copy(folder: Path, options: dict[str, Any], share: float, bad: int) -> None:
    paths = [Path(tiff(folder / f"live_{k}.tif", frame(k, (40, 50)), **options)) for k in range(3)]
    whole = paths[bad].read_bytes()
    cut(paths[bad], int(share * len(whole)))
    refuses(folder, folder, f"live_{bad}.tif")
    paths[bad].write_bytes(whole)  # its copy is there now: the same command again reads what it lacked
    for way in usual:
        out = folder.parent / way.name()
        daskstack.build(folder, out, overwrite=True, **way.options)
        assert_same(way.read(out), frames(3, (40, 50)))


@pytest.mark.parametrize("lost", [60, 300, 2000, 6000])
@JOINS
def test_unfinished_copy_of_pages(folder: Path, lost: int, join: str) -> None:
    paths = [tiff(folder / f"live_{k}.tif", frames(3, (20, 50)), metadata=None) for k in range(3)]
    cut(paths[1], -lost)
    refuses(folder, paths, "live_1.tif", join=join)


NO_DIRECTORY = {
    "beyond": b"II*\x00" + (99_999).to_bytes(4, "little") + bytes(60),
    "big-endian": b"MM\x00*" + (99_999).to_bytes(4, "big") + bytes(60),
    "none": b"II*\x00" + bytes(64),
    "at the end": b"II*\x00" + (68).to_bytes(4, "little") + bytes(60),
    "cut off": b"II*\x00" + (60).to_bytes(4, "little") + bytes(52) + b"\x0c\x00\x00\x01\x03\x00",
    "BigTIFF": b"II+\x00\x08\x00\x00\x00" + (1 << 40).to_bytes(8, "little") + bytes(60),
    "no entries": b"II*\x00" + (8).to_bytes(4, "little") + bytes(60),
}


# ome/bioformats#4192, erturklab/delivr_cfos#3: the first directory lies beyond the end
@pytest.mark.parametrize(("bad", "join"), [([1], "stack"), ([0], "stack"), ([0, 2], "concat")], ids=str)
@pytest.mark.parametrize("data", NO_DIRECTORY.values(), ids=NO_DIRECTORY)
def test_no_directory(folder: Path, data: bytes, bad: list[int], join: str) -> None:
    paths = [tiff(folder / f"c{k}.tif", frame(k)) for k in range(3)]
    for k in bad:
        Path(paths[k]).write_bytes(data)
    refuses(folder, paths, *base([paths[k] for k in bad]), join=join)


# the same further on: the next directory lies beyond the end, or is one that was met before
@pytest.mark.parametrize("target", [99_999, 8])
@JOINS
def test_chain_of_directories_is_broken(folder: Path, target: int, join: str) -> None:
    paths = [paged(folder / f"c{k}.tif", frames(3)) for k in range(2)]
    link_directory(paths[1], 1, target)
    refuses(folder, paths, "c1.tif", join=join)


# ----------------------------------------------------------------------- reading: kinds of TIFF


def ome(names: Sequence[str], planes: int) -> str:
    """The description of a series whose planes lie in several files, as each of them has it."""
    where = "".join(
        f'<TiffData FirstT="{planes * k + i}" IFD="{i}" PlaneCount="1">'
        f'<UUID FileName="{name}">urn:uuid:00000000-0000-0000-0000-{k:012}</UUID></TiffData>'
        for k, name in enumerate(names)
        for i in range(planes)
    )
    return (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        f'<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="{SHAPE[1]}" SizeY="{SHAPE[0]}" '
        f'SizeZ="1" SizeC="1" SizeT="{planes * len(names)}">'
        f'<Channel ID="Channel:0:0" SamplesPerPixel="1"/>{where}</Pixels></Image></OME>'
    )


# cgohlke/tifffile#72, arjunrajlaboratory/NimbusImage#621: an OME series over several files
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("gone", [[], [1], [0]], ids=str)
@JOINS
def test_ome_series_over_files(folder: Path, planes: int, gone: list[int], join: str) -> None:
    names = [f"s_{k}.ome.tif" for k in range(3)]
    due = frames(3 * planes).reshape(3, planes, *SHAPE)
    for name, data in zip(names, due, strict=True):
        tiff(folder / name, data.squeeze(), metadata=None, description=ome(names, planes))
    for k in gone:
        (folder / names[k]).unlink()
    left = np.delete(due, gone, axis=0)
    if join == "concat":
        gives(folder, folder, left.reshape(-1, *SHAPE), join=join)
    else:
        gives(folder, folder, left[:, 0] if planes == 1 else left)


# MouseLand/suite2p#135, DylanMuir/TIFFStack#7, dask/dask-image#340, luispedro/imread#19: ImageJ, one directory
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize(("axes", "shape"), [("TYX", (4,)), ("ZCYX", (2, 3)), ("TZYX", (3, 2))])
@JOINS
def test_imagej_one_directory(folder: Path, byteorder: str, axes: str, shape: tuple[int, ...], join: str) -> None:
    due = frames(2 * math.prod(shape)).reshape(2, *shape, *SHAPE)
    for k in range(2):
        path = tiff(folder / f"ij{k}.tif", due[k], imagej=True, byteorder=byteorder, metadata={"axes": axes})
        link_directory(path, 0, 0)
        with tifffile.TiffFile(path) as tif:
            assert len(tif.pages) == 1
    gives(folder, folder, due if join == "stack" else due.reshape(-1, *SHAPE), join=join)


@pytest.mark.parametrize("lost", [1, 70, 200])
@JOINS
def test_imagej_one_directory_cut(folder: Path, lost: int, join: str) -> None:
    for k in range(2):
        path = tiff(folder / f"ij{k}.tif", frames(4), imagej=True, metadata={"axes": "TYX"})
        with tifffile.TiffFile(path) as tif:
            first = tif.pages.first
            end = first.dataoffsets[0] + 4 * first.nbytes
        link_directory(path, 0, 0)
        cut(path, end - (lost if k else 0))
    refuses(folder, folder, "ij1.tif", join=join)


WRONG_SHAPES = {
    "more pages": (1, '{"shape": [3, 5, 7]}'),
    "fewer pages": (3, '{"shape": [2, 5, 7]}'),
    "one page too many": (2, '{"shape": [3, 5, 7]}'),
    "other axes": (1, '{"shape": [7, 5]}'),
    "one axis": (1, '{"shape": [35]}'),
    "pages turned": (3, '{"shape": [3, 7, 5]}'),
    "pages mixed": (2, '{"shape": [5, 2, 7]}'),
    "ImageJ": (1, "ImageJ=1.53t\nimages=3\nframes=3\n"),
    "ImageJ, fewer": (3, "ImageJ=1.53t\nimages=2\nframes=2\n"),
}


# cgohlke/tifffile#21, girder/large_image#1273: the description gives a shape that the pages do not have
@pytest.mark.parametrize(("bad", "join"), [("m1.tif", "concat"), ("m1.tif", "stack"), ("m0.tif", "concat")])
@pytest.mark.parametrize(("pages", "description"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_wrong_shape_in_description(folder: Path, pages: int, description: str, bad: str, join: str) -> None:
    for k in range(3):
        wrong = {"description": description} if bad == f"m{k}.tif" else {}
        tiff(folder / f"m{k}.tif", frames(pages).squeeze(), metadata=None, **wrong)
    refuses(folder, folder, bad, join=join)


ODD = {
    "larger": frame(9, (6, 7)),
    "smaller": frame(9, (4, 7)),
    "turned": frame(9, (7, 5)),
    "bytes": frame(9, dtype="uint8"),
}


# scikit-image/scikit-image#5242, libvips/libvips#1800: one page is unlike the others; file and page are named
@pytest.mark.parametrize(("place", "join"), [(1, "concat"), (0, "concat"), (3, "stack")])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_page_of_another_size(folder: Path, odd: Array, place: int, join: str) -> None:
    pages = list(frames(4))
    paged(folder / "l0.tif", pages)
    pages[place] = odd
    paged(folder / "l1.tif", pages)
    report = refuses(folder, folder, "l1.tif", join=join)
    assert re.search(r"\bpage \d", report)


# girder/large_image#469, cgohlke/tifffile#140: a pyramid in sub-directories
@pytest.mark.parametrize(("levels", "pages"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("options", [{"tile": (16, 16)}, {"compression": "zlib"}, {"photometric": "rgb"}], ids=str)
@JOINS
def test_pyramid(folder: Path, levels: int, pages: int, options: dict[str, Any], join: str) -> None:
    shape = (32, 48, 3) if "photometric" in options else (32, 48)
    due = frames(2 * pages, shape, "uint8").reshape(2, pages, *shape)
    written: dict[str, Any] = {"photometric": "minisblack", "metadata": None, **options}
    for k in range(2):
        with tifffile.TiffWriter(folder / f"p{k}.tif") as writer:
            for page in due[k]:
                writer.write(page, subifds=levels, **written)
                for step in (2, 4)[:levels]:
                    writer.write(page[::step, ::step], subfiletype=1, **written)
    if join == "concat":
        gives(folder, folder, due.reshape(-1, *shape), join=join)
    else:
        gives(folder, folder, due[:, 0] if pages == 1 else due)


def with_thumbnails(path: Path, pages: Array, thumbnail: Array, after: Sequence[int], flag: int) -> None:
    colour = "rgb" if thumbnail.ndim == 3 else "minisblack"
    with tifffile.TiffWriter(path) as writer:
        for k, page in enumerate(pages):
            writer.write(page, photometric="minisblack", metadata=None)
            if k in after:
                writer.write(thumbnail, photometric=colour, subfiletype=flag, metadata=None)


# soft-matter/pims#88, DigitalSlideArchive/ImageDePHI#149: thumbnails between the pages
@JOINS
def test_thumbnail_after_each_page(folder: Path, join: str) -> None:
    due = frames(6, (8, 12)).reshape(2, 3, 8, 12)
    for k in range(2):
        with_thumbnails(folder / f"lsm{k}.tif", due[k], frame(8, (4, 6)), [0, 1, 2], 1)
    gives(folder, folder, due if join == "stack" else due.reshape(-1, 8, 12), join=join)


# the same: where it is less plain what they are, the file is refused, never shortened
@pytest.mark.parametrize("thumbnail", [frame(8, (4, 6)), frame(8, (4, 6, 3), "uint8")], ids=["grey", "rgb"])
@pytest.mark.parametrize("after", [[0], [2]], ids=str)
@JOINS
def test_some_thumbnails(folder: Path, thumbnail: Array, after: list[int], join: str) -> None:
    for k in range(2):
        with_thumbnails(folder / f"lsm{k}.tif", frames(3, (8, 12)), thumbnail, after if k else [], 1)
    refuses(folder, folder, "lsm1.tif", join=join)


# the same: a page that is half as large, and not marked as a reduced image, is a page
@pytest.mark.parametrize("shape", [(4, 6), (2, 3), (4, 5)], ids=str)
@pytest.mark.parametrize("pages", [1, 3])
@JOINS
def test_smaller_page_that_is_no_thumbnail(folder: Path, shape: tuple[int, ...], pages: int, join: str) -> None:
    for k in range(2):
        after = range(pages) if k else []
        with_thumbnails(folder / f"lsm{k}.tif", frames(pages, (8, 12)), frame(8, shape), after, 0)
    refuses(folder, folder, "lsm1.tif", join=join)


ORDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zlib": {"compression": "zlib"},
    "predictor": {"compression": "lzw", "predictor": True},
    "tiles": {"tile": (16, 16)},
    "ImageJ": {"imagej": True},
}


# numba/numba#2243, silx-kit/pymca#82, pearu/pylibtiff#29: big-endian TIFF
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("order", ["><>", "<>>"])
@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_big_endian_tiff(folder: Path, dtype: str, order: str, options: dict[str, Any]) -> None:
    due = frames(3, dtype=dtype)
    if "predictor" in options and dtype == "float32":
        options = {**options, "predictor": 3}
    paths = [tiff(folder / f"b{k}.tif", due[k], byteorder=o, **options) for k, o in enumerate(order)]
    gives(folder, paths, due)


@pytest.mark.parametrize("dtype", ["u2", "i4", "f8", "c8", "M8[s]"])
@pytest.mark.parametrize("order", ["><>", ">>>"])
def test_big_endian_npy(folder: Path, dtype: str, order: str) -> None:
    due = frames(3, dtype="int64").astype(dtype)
    paths = [npy(folder / f"b{k}.npy", due[k].astype(f"{o}{dtype}")) for k, o in enumerate(order)]
    gives(folder, paths, due)
    gives(folder, paths, np.concatenate(due), join="concat")


def coloured(path: Path, pixels: Array, *, planar: bool) -> str:
    data = np.moveaxis(pixels, -1, 0).copy() if planar else pixels
    return tiff(path, data, photometric="rgb", planarconfig="separate" if planar else "contig", metadata=None)


# cgohlke/tifffile#87, pearu/pylibtiff#25: planar and interleaved colour in one set
@pytest.mark.parametrize("samples", [3, 4])
@pytest.mark.parametrize(("planar", "odd"), [([1], [1]), ([0, 2, 3], [1]), ([0], [1, 2, 3])], ids=str)
def test_planar_and_interleaved(folder: Path, samples: int, planar: list[int], odd: list[int]) -> None:
    for k in range(4):
        coloured(folder / f"c{k}.tif", frame(k, (*SHAPE, samples), "uint8"), planar=k in planar)
    shapes = [f"({samples}, 5, 7)", f"(5, 7, {samples})"]
    refuses(folder, folder, *(f"c{k}.tif" for k in odd), says=shapes)  # the first file says what is due


@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize("samples", [3, 4])
@JOINS
def test_colour_of_one_layout(folder: Path, samples: int, planar: bool, join: str) -> None:
    due = frames(3, (*SHAPE, samples), "uint8")
    for k in range(3):
        coloured(folder / f"c{k}.tif", due[k], planar=planar)
    gives(folder, folder, np.moveaxis(due, -1, 1) if planar else due, join=join)


# the same where the shapes happen to be equal: an image as wide and as high as it has colours
@pytest.mark.parametrize("samples", [3, 4])
@JOINS
def test_planar_and_interleaved_of_equal_shape(folder: Path, samples: int, join: str) -> None:
    for k in range(2):
        coloured(folder / f"c{k}.tif", frame(k, (samples, samples, samples), "uint8"), planar=k == 1)
    refuses(folder, folder, "c1.tif", join=join)


# dask/dask-image#341, cgohlke/tifffile#235, cgohlke/tifffile#196: three or four planes are not colour
@pytest.mark.parametrize("planes", [3, 4, 5])
@pytest.mark.parametrize("kind", ["CYX", "ZYX", "pages", "one by one", "npy"])
def test_planes_are_not_colour(folder: Path, planes: int, kind: str) -> None:
    due = frames(2, (planes, 6, 8), "uint8")
    for k in range(2):
        if kind == "npy":
            npy(folder / f"zs{k}.npy", due[k])
        elif kind == "one by one":
            paged(folder / f"zs{k}.tif", due[k])
        elif kind == "pages":
            tiff(folder / f"zs{k}.tif", due[k])
        else:
            tiff(folder / f"zs{k}.tif", due[k], imagej=True, metadata={"axes": kind})
    gives(folder, folder, due)


# imageio/imageio#355, pearu/pylibtiff#82, image-rs/image-tiff#296: one bit a pixel, and min-is-white
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
@pytest.mark.parametrize("compression", [None, "zlib", "lzw", "packbits"])
@pytest.mark.parametrize("width", [9, 16])
def test_one_bit(folder: Path, photometric: str, compression: str | None, width: int) -> None:
    due = frames(3, (5, width)) % 2 == 0
    for k in range(3):
        tiff(folder / f"bw{k}.tif", due[k], photometric=photometric, compression=compression)
    gives(folder, folder, due)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16"])
def test_min_is_white_is_not_turned(folder: Path, dtype: str) -> None:
    due = frames(4) % 2 == 0 if dtype == "bool" else frames(4, dtype=dtype)
    kinds = [("minisblack", None), ("miniswhite", None), ("minisblack", "zlib"), ("miniswhite", "lzw")]
    for k, (photometric, compression) in enumerate(kinds):
        tiff(folder / f"bw{k}.tif", due[k], photometric=photometric, compression=compression)
    gives(folder, folder, due)


# sony/nnabla#583: palette images are indices
@pytest.mark.parametrize(("dtype", "shape"), [("uint8", SHAPE), ("uint16", SHAPE), ("uint8", (3, *SHAPE))])
@pytest.mark.parametrize("options", [{}, {"compression": "lzw"}, {"tile": (16, 16)}, {"byteorder": ">"}], ids=str)
def test_palette(folder: Path, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    due = frames(2, shape, dtype)
    colours = frame(5, (3, 256 if dtype == "uint8" else 65536))
    for k in range(2):
        tiff(folder / f"lab{k}.tif", due[k], photometric="palette", colormap=colours, **options)
    gives(folder, folder, due)


# python-pillow/Pillow#3796, imageio/imageio#982: grey of 16 bits became int32, and twice as large
@pytest.mark.parametrize("samples", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("kind", ["png", "jpeg2k", "jpegxl"])
@JOINS
def test_depth_of_images(folder: Path, samples: int, dtype: str, kind: str, join: str) -> None:
    due = frames(3, SHAPE if samples == 1 else (*SHAPE, samples), dtype)
    suffix = {"png": ".png", "jpeg2k": ".jp2", "jpegxl": ".JXL"}[kind]
    lossless: dict[str, dict[str, Any]] = {"png": {}, "jpeg2k": {"level": 0}, "jpegxl": {"lossless": True}}
    for k in range(3):
        (folder / f"{k}{suffix}").write_bytes(getattr(imagecodecs, f"{kind}_encode")(due[k], **lossless[kind]))
    gives(folder, folder, due, join=join)


# the same: one file of another depth among many
@pytest.mark.parametrize(("first", "later"), [("uint16", "uint8"), ("uint8", "uint16")])
@pytest.mark.parametrize("bad", [[1], [2, 3]])
def test_another_depth_of_png(folder: Path, first: str, later: str, bad: list[int]) -> None:
    for k in range(4):
        png = imagecodecs.png_encode(frame(k, dtype=later if k in bad else first))
        (folder / f"{k}.png").write_bytes(png)
    refuses(folder, folder, *(f"{k}.png" for k in bad), says=[f"found {later}, due {first}"])


STORED: list[dict[str, Any]] = [
    {},
    {"compression": "lzw"},
    {"compression": "zlib"},
    {"compression": "zlib", "predictor": True},
    {"tile": (16, 16)},
    {"tile": (16, 16), "compression": "lzw", "predictor": True},
    {"compression": "zstd"},
    {"bigtiff": True},
    {"compression": "packbits"},
    {"compression": "lzma"},
    {"compression": "deflate"},
    {"rowsperstrip": 3, "compression": "zlib"},
    {"byteorder": ">", "compression": "lzw"},
]


# blink1073/tifffile#63, ESA-PhiLab/iris#64, juglab/n2v#44: files compressed in many ways
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("shape", [(20, 30), (2, 20, 30)], ids=str)
@JOINS
def test_mixed_compression(folder: Path, dtype: str, shape: tuple[int, ...], join: str) -> None:
    due = frames(len(STORED), shape, dtype)
    paths = []
    for k, options in enumerate(STORED):
        given = {**options, "predictor": 3} if "predictor" in options and dtype == "float32" else options
        paths.append(tiff(folder / f"z{k}.tif", due[k], **given))
    gives(folder, paths, due if join == "stack" else due.reshape(-1, 20, 30), join=join)


WITHOUT_CODECS = """
import sys
sys.modules["imagecodecs"] = None
import daskstack
try:
    daskstack.build(sys.argv[2:], sys.argv[1], progress=False)
except daskstack.errors.BadFilesError as exc:
    print(*(f.message for f in exc.files), sep="\\n")
"""
CODECS = ["lzw", "jpeg", *(["zstd"] if sys.version_info < (3, 14) else [])]  # Python 3.14 decodes zstd itself


# the same: where no codec is installed, file and package are named
def test_missing_codec(folder: Path) -> None:
    paths = [tiff(folder / "plain.tif", frame(0, (16, 16), "uint8"))]
    paths += [tiff(folder / f"{codec}.tif", frame(1, (16, 16), "uint8"), compression=codec) for codec in CODECS]
    done = script(WITHOUT_CODECS, folder.parent / "out.npy", *paths)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert base([line.split()[0] for line in lines]) == [f"{codec}.tif" for codec in CODECS]
    assert [line for line in lines if "imagecodecs" not in line] == []
    assert published(folder.parent) == ["in"]


JPEG: dict[str, dict[str, Any]] = {
    "tiles": {"photometric": "rgb", "tile": (16, 16)},
    "strips": {"photometric": "rgb", "rowsperstrip": 16},
    "one strip": {"photometric": "rgb"},
    "grey": {"photometric": "minisblack", "tile": (16, 16)},
}


# python-pillow/Pillow#3227, xarray-contrib/xarray-spatial#1502, girder/large_image#627: JPEG inside TIFF
@pytest.mark.parametrize("options", JPEG.values(), ids=JPEG)
@JOINS
def test_jpeg_inside(folder: Path, options: dict[str, Any], join: str) -> None:
    slope = np.add.outer(2 * np.arange(32), np.arange(48))
    source = np.stack([slope + 20 * k for k in range(2)]).astype("uint8")
    if options["photometric"] == "rgb":
        source = np.stack([source, source + 30, 200 - source], axis=-1)
    level = {"compression": "jpeg", "compressionargs": {"level": 95}, "metadata": None}
    paths = [tiff(folder / f"j{k}.tif", source[k], **level, **options) for k in range(2)]
    due = np.stack([tifffile.imread(p) for p in paths])  # the codec loses something: what is left is due
    assert due.shape == source.shape
    assert np.abs(due.astype(int) - source).max() <= 8
    gives(folder, paths, due, join=join)


def leave_out(path: str, page: int, *segments: int) -> None:
    """Take tiles or strips out of a page: their offsets and byte counts become 0."""
    with tifffile.TiffFile(path) as tif:
        found: Any = tif.pages[page]
        tags = [found.tags[code] for code in ((324, 325) if found.is_tiled else (273, 279))]
        places = [(t.valueoffset, {3: 2, 4: 4, 16: 8}[int(t.dtype)]) for t in tags]
    for offset, size in places:
        for k in segments:
            patch(path, offset + size * k, bytes(size))


SPARSE: list[tuple[str | None, list[int], dict[str, Any]]] = [
    ("7", [3], {}),
    ("7", [0], {"compression": "zlib"}),
    ("7", [0, 1, 2, 3], {"byteorder": ">"}),
    (None, [3], {"compression": "zlib"}),
    (None, [0, 1, 2, 3], {}),
    (None, [1, 2], {"byteorder": ">", "compression": "lzw"}),
    ("0", [3], {}),
]


# geotiffjs/geotiff.js#304, virtual-zarr/virtual-tiff#108, girder/large_image#627: tiles that are not stored
@pytest.mark.parametrize(("nodata", "missing", "options"), SPARSE, ids=str)
@JOINS
def test_tiles_left_out(
    folder: Path, nodata: str | None, missing: list[int], options: dict[str, Any], join: str
) -> None:
    due = frames(3, (32, 32))
    options = {"tile": (16, 16), "metadata": None, **options}
    if nodata:
        options["extratags"] = [(42113, "s", 0, nodata, True)]
    paths = [tiff(folder / f"sp{k}.tif", due[k], **options) for k in range(3)]
    leave_out(paths[1], 0, *missing)
    for k in missing:
        due[1, 16 * (k // 2) :, 16 * (k % 2) :][:16, :16] = int(nodata or 0)
    gives(folder, paths, due, join=join)


@pytest.mark.parametrize(("nodata", "value"), [("nan", np.nan), ("-9999", -9999), ("1e30", 1e30)])
def test_tiles_left_out_of_floats(folder: Path, nodata: str, value: float) -> None:
    due = frames(2, (2, 32, 32), "float32")
    for k in range(2):
        paged(folder / f"sp{k}.tif", due[k], tile=(16, 16), extratags=[(42113, "s", 0, nodata, True)])
    leave_out(str(folder / "sp0.tif"), 1, 2)
    due[0, 1, 16:, :16] = value
    gives(folder, folder, due)


# the same where the value that is given is none of the dtype: it matters only where it is needed
@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint16", "70000"), ("uint16", "-9999"), ("uint8", "nan"), ("float32", "1e300")]
)
@pytest.mark.parametrize("missing", [[], [3]], ids=str)
def test_tiles_left_out_of_no_value(folder: Path, dtype: str, nodata: str, missing: list[int]) -> None:
    due = frames(2, (32, 32), dtype)
    options: dict[str, Any] = {"tile": (16, 16), "metadata": None, "extratags": [(42113, "s", 0, nodata, True)]}
    paths = [tiff(folder / f"sp{k}.tif", due[k], **options) for k in range(2)]
    if missing:
        leave_out(paths[1], 0, *missing)
        refuses(folder, folder, "sp1.tif", says=[f"of value {nodata}, which is no {dtype}"])
    else:
        gives(folder, folder, due)


# the same for strips, which nobody leaves out on purpose
@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}], ids=str)
@JOINS
def test_strips_left_out(folder: Path, options: dict[str, Any], join: str) -> None:
    paths = [tiff(folder / f"sp{k}.tif", frame(k, (32, 32)), rowsperstrip=8, **options) for k in range(3)]
    leave_out(paths[1], 0, 2)
    refuses(folder, paths, "sp1.tif", join=join)


# cgohlke/tifffile#29, cgohlke/tifffile#46: frames that do not lie evenly in the file
@pytest.mark.parametrize("software", ["SI.LINE_FORMAT_VERSION=1", "other"])
@pytest.mark.parametrize("gaps", [[0, 37, 74, 5, 11], [0, 0, 900, 0, 0], [50, 40, 30, 20, 10]], ids=str)
@JOINS
def test_uneven_frames(folder: Path, software: str, gaps: list[int], join: str) -> None:
    due = frames(10, (8, 8)).reshape(2, 5, 8, 8)
    options: dict[str, Any] = {"photometric": "minisblack", "metadata": None, "contiguous": False}
    for f in range(2):
        with tifffile.TiffWriter(folder / f"si{f}.tif") as writer:
            for page, gap in zip(due[f], gaps, strict=True):
                writer.write(page, software=software, description="frame " + "x" * gap, **options)
    gives(folder, folder, due if join == "stack" else due.reshape(-1, 8, 8), join=join)


# --------------------------------------------------------------------------- reading: kinds of .npy


# rogersce/cnpy#7, marian-nmt/marian-dev#911, sonos/tract#655: Fortran order
@pytest.mark.parametrize(("turned", "dtype"), [([1, 3], "<u2"), ([0], ">f4"), ([0, 1, 2, 3], "<c8")], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 5), (6,), (2, 1, 3, 2)], ids=str)
def test_fortran_order(folder: Path, turned: list[int], dtype: str, shape: tuple[int, ...]) -> None:
    due = frames(4, shape).astype(dtype)
    for k in range(4):
        npy(folder / f"o{k}.npy", np.asfortranarray(due[k]) if k in turned else due[k])
    gives(folder, folder, due)
    gives(folder, folder, np.concatenate(due), join="concat")


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def trapped(kind: str, path: Path, trap: Path) -> None:
    if kind == "array":
        np.save(path, np.array([Trap(trap)], dtype=object), allow_pickle=True)
    elif kind == "field":
        record = np.zeros(2, [("x", "f4"), ("y", object)])
        record["y"] = Trap(trap)
        np.save(path, record, allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Trap(trap), protocol=int(kind)))


# yangxue0827/RCNN#6, ZZUTK/SRNTT#9, sentinel-hub/eo-learn#478: pickles are not loaded
@pytest.mark.parametrize("kind", ["array", "field", "0", "2", "5"])
@pytest.mark.parametrize(("bad", "join"), [([1], "stack"), ([0], "concat"), ([0, 2], "stack")], ids=str)
def test_pickle(folder: Path, kind: str, bad: list[int], join: str) -> None:
    trap = folder.parent / "unpickled"
    for k in range(3):
        if k in bad:
            trapped(kind, folder / f"k{k}.npy", trap)
        else:
            npy(folder / f"k{k}.npy", frame(k))
    report = refuses(folder, folder, *(f"k{k}.npy" for k in bad), join=join)
    assert not trap.exists()
    assert "allow_pickle" not in report


RECORDS: dict[str, Any] = {
    "plain": [("x", "<f4"), ("flag", "?"), ("id", "<i8", (2,))],
    "big-endian": [("x", ">f4"), ("y", "<i2"), ("z", ">u8")],
    "nested": [("p", [("x", "<f4"), ("y", ">f8")]), ("name", "S5"), ("text", "<U3")],
    "padded": np.dtype([("a", "u1"), ("b", "<f8")], align=True),
    "unicode": [("größe", "<f4"), ("λ", "<u2")],
    "long header": [(f"a_rather_long_name_of_a_field_{k}", "<f4") for k in range(500)],
    "very long header": [("so_long_a_name_" * 7 + str(k), "<u1") for k in range(700)],
}


# ml-struct-bio/cryodrgn#418, asarnow/pyem#131, bluesky/tiled#514: records, long headers
@pytest.mark.filterwarnings("ignore:Stored array in format:UserWarning")  # numpy.save, which wrote the input
@pytest.mark.parametrize("dtype", RECORDS.values(), ids=RECORDS)
@JOINS
def test_records(folder: Path, dtype: Any, join: str) -> None:
    due = np.zeros((3, 4), dtype)
    for k, name in enumerate(due.dtype.names or ()):
        if due.dtype[name].kind in "fiu":
            due[name] = frame(k, (3, 4), "uint8")
    for k in range(3):
        npy(folder / f"r{k}.npy", due[k])
    gives(
        folder,
        folder,
        due if join == "stack" else due.reshape(-1),
        join=join,
        ways=[w for w in usual if w.kind == "npy"],
    )
    says = ["Zarr 3 has no specification for records", "let the output end in .npy, or zarr_format=2"]
    refuses(folder, folder, error=UsageError, says=says, join=join, ways=[Way("zarr", "synchronous")])


# the same: a field of another name, type or place makes another record
@pytest.mark.parametrize("other", [[("x", "f4"), ("z", "i4")], [("x", "f4"), ("y", "u4")], [("y", "i4"), ("x", "f4")]])
@JOINS
def test_records_differ(folder: Path, other: Any, join: str) -> None:
    npy(folder / "r0.npy", np.zeros(4, [("x", "f4"), ("y", "i4")]))
    npy(folder / "r1.npy", np.zeros(4, other))
    refuses(folder, folder, "r1.npy", join=join, ways=[w for w in usual if w.kind == "npy"])


# issp-center-dev/H-wave#165, numpy/numpy#4765, numpy/numpy#5713: header versions 1, 2 and 3
@pytest.mark.parametrize("versions", [[1, 2, 3], [3, 1, 2], [2, 2, 2], [3, 3, 3]], ids=str)
@pytest.mark.parametrize(("order", "join"), [("C", "stack"), ("C", "concat"), ("F", "stack")])
def test_header_versions(folder: Path, versions: list[int], order: str, join: str) -> None:
    due = frames(3)
    for k, version in enumerate(versions):
        with (folder / f"v{k}.npy").open("wb") as f:
            np.lib.format.write_array(f, np.array(due[k], order=order), version=(version, 0))  # type: ignore[call-overload]
    gives(folder, folder, due if join == "stack" else np.concatenate(due), join=join)


def with_header(path: Path, header: str, data: bytes) -> None:
    text = header.encode("latin-1") + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


HEADERS = {
    "dense": "{'descr':'<u2','fortran_order':False,'shape':(5,7)}",
    "double quotes": '{"shape": (5, 7), "fortran_order": False, "descr": "<u2"}',
    "Python 2": "{'descr': '<u2', 'fortran_order': False, 'shape': (5L, 7L), }",
    "much room": "{'descr': '<u2', 'fortran_order': False, 'shape': (5, 7), }" + 9000 * " ",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_header_of_another_writer(folder: Path, header: str) -> None:
    due = frames(2)
    npy(folder / "v0.npy", due[0])
    with_header(folder / "v1.npy", header, due[1].tobytes())
    gives(folder, folder, due)


# numpy/numpy#28330, MIC-DKFZ/nnUNet#2388: cut files
@pytest.mark.parametrize("size", [1000, -1, 128, 127, 60, 9, 3])
@pytest.mark.parametrize(("bad", "join"), [([2], "stack"), ([0], "concat"), ([0, 1], "stack")], ids=str)
def test_cut_npy(folder: Path, size: int, bad: list[int], join: str) -> None:
    paths = [npy(folder / f"n{k}.npy", frame(k, (50, 40))) for k in range(3)]
    for k in bad:
        cut(paths[k], size)
    names = base([paths[k] for k in bad])
    whole_header = size < 0 or size >= 128
    refuses(folder, paths, *names, says=[f"{size % 4128} bytes", "4128"] if whole_header else [], join=join)
    if join == "stack":  # and it is known before any pixel is read
        assert base([e.path for e in daskstack.open_stack(paths).condemned()]) == names


@pytest.mark.parametrize("more", [1, 4000])
def test_npy_with_more_than_its_header_says(folder: Path, more: int) -> None:
    paths = [npy(folder / f"n{k}.npy", frame(k, (50, 40))) for k in range(3)]
    with open(paths[1], "ab") as f:
        f.write(bytes(more))
    refuses(folder, paths, "n1.npy", says=[f"{4128 + more} bytes", "4128"])


NO_LITERALS = {
    "numpy": "{'descr': '<u2', 'fortran_order': False, 'shape': (np.int64(5), 7)}",
    "numpy, truth": "{'descr': '<u2', 'fortran_order': np.False_, 'shape': (5, 7)}",
    "floats": "{'descr': '<u2', 'fortran_order': False, 'shape': (5.0, 7)}",
    "truth": "{'descr': '<u2', 'fortran_order': False, 'shape': (True, 35)}",
    "negative": "{'descr': '<u2', 'fortran_order': False, 'shape': (-5, -7)}",
    "list": "{'descr': '<u2', 'fortran_order': False, 'shape': [5, 7]}",
    "code": "{'descr': '<u2', 'fortran_order': False, 'shape': __import__('os').getcwd()}",
    "no dictionary": "('<u2', False, (5, 7))",
    "unknown type": "{'descr': '<q9', 'fortran_order': False, 'shape': (5, 7)}",
}


# numpy/numpy#28334, numpy/numpy#9659, numpy/numpy#13719: headers that are no literals
@pytest.mark.parametrize("bad", [1, 0])
@pytest.mark.parametrize("header", NO_LITERALS.values(), ids=NO_LITERALS)
def test_header_that_is_no_literal(folder: Path, header: str, bad: int) -> None:
    npy(folder / f"h{1 - bad}.npy", frame(0))
    with_header(folder / f"h{bad}.npy", header, frame(1).tobytes())
    report = refuses(folder, folder, f"h{bad}.npy")
    assert "object at 0x" not in report  # words for people, the same each time


# the same for what is written: numbers of NumPy's own kind do not get into a header
@pytest.mark.parametrize("kind", [np.int64, np.uint8, int])
def test_header_of_the_output(folder: Path, kind: Callable[[int], Any]) -> None:
    due = frames(6)
    for k in range(6):
        npy(folder / f"h{k}.npy", due[k])
    one, two = folder.parent / "one.npy", folder.parent / "two.npy"
    daskstack.open_stack(folder)[kind(0) : kind(4)].to_npy(one, progress=False)
    assert_same(np.load(one), due[:4])
    assert b"'shape': (4, 5, 7)" in one.read_bytes()[:128]
    daskstack.build(folder, two, limit=kind(2), progress=False)
    assert_same(np.load(two), due[:2])


# numpy/numpy#28795: an archive under the name of .npy
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(("bad", "join"), [([1], "stack"), ([0], "concat"), ([0, 1, 2], "stack")], ids=str)
def test_archive(folder: Path, save: Callable[..., None], bad: list[int], join: str) -> None:
    for k in range(3):
        npy(folder / f"a{k}.npy", frame(k))
    for k in bad:
        with (folder / f"a{k}.npy").open("wb") as f:
            save(f, frame(k))
    refuses(folder, folder, *(f"a{k}.npy" for k in bad), says=["npz"], join=join)


def test_archive_by_its_own_name(folder: Path) -> None:
    np.savez(folder / "a.npz", frame(0))
    refuses(folder, [folder / "a.npz"], error=UsageError, says=["a.npz", ".npz"])
    command_refuses(folder, folder / "a.npz", folder.parent / "out.npy", says=["a.npz"], status=2)


DTYPES = ["?", "i1", "f2", "f4", "c8", "c16", "M8[s]", "M8[D]", "m8[ms]", "S3", "U4", "u8", "longdouble", "V3"]


# google/neuroglancer#647, bluesky/tiled#514, zarr-developers/zarr-python#2874: less common dtypes
@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")  # of dates in Zarr 3
@pytest.mark.parametrize("dtype", DTYPES)
def test_less_common_dtypes(folder: Path, pool: None, dtype: str) -> None:
    if dtype in {"?", "U4", "longdouble"}:
        due = (frames(3) % 2).astype(dtype)
    else:  # all that its bits can say
        noise = np.random.default_rng(0).bytes(3 * math.prod(SHAPE) * np.dtype(dtype).itemsize)
        due = np.frombuffer(noise, dtype).reshape(3, *SHAPE)
    for k in range(3):
        npy(folder / f"m{k}.npy", due[k])
    ways = EVERYWHERE if dtype in {"?", "f2", "c8", "M8[s]"} else PLAIN
    gives(folder, folder, due, ways=ways)
    gives(folder, folder, np.concatenate(due), join="concat", ways=ways)


# ----------------------------------------------------------------------------------------- stacking


SIZES: list[tuple[int, ...]] = [(1, 7), (5, 1), (7, 5), (5, 7, 1), (1, 5, 7), (35,), (7,), (), (5, 8), (5, 0)]


# docarray/docarray#39, absDL/absDL.github.io#4, NVlabs/STEP#6: an image of another size
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("bad", [[3], [1, 4]], ids=str)
def test_another_size(folder: Path, shape: tuple[int, ...], bad: list[int]) -> None:
    for k in range(5):
        npy(folder / f"i{k}.npy", frame(k, shape if k in bad else SHAPE))
    names = [f"i{k}.npy" for k in bad]
    refuses(folder, folder, *names, says=[f"{len(bad)} of 5 files", str(shape), str(SHAPE)])
    if math.prod(shape) != math.prod(SHAPE):  # then a look at its size is enough, before any pixel is read
        assert base([e.path for e in daskstack.open_stack(folder).condemned()]) == names


@pytest.mark.parametrize("shape", [(1, 7), (7, 5), (2, 5, 7), (5, 8)], ids=str)
@JOINS
def test_another_size_of_tiff(folder: Path, shape: tuple[int, ...], join: str) -> None:
    pages = [frame(k, shape if k == 2 else SHAPE) for k in range(5)]
    for k in range(5):
        tiff(folder / f"i{k}.tif", pages[k])
    if join == "concat" and len(shape) == 3:  # files may differ in how many pages they hold
        gives(folder, folder, np.concatenate([p.reshape(-1, *SHAPE) for p in pages]), join="concat")
    else:
        refuses(folder, folder, "i2.tif", says=[str(shape), str(SHAPE)], join=join)


# the same: who comes first says what is due, and all others are named
@EVERY_WAY
def test_another_size_comes_first(folder: Path, way: Way) -> None:
    for k in range(5):
        npy(folder / f"i{k}.npy", frame(k, SHAPE if k else (1, 7)))
    refuses(folder, folder, *(f"i{k}.npy" for k in range(1, 5)), says=["(1, 7)", str(SHAPE)], ways=[way])


def test_another_size_on_the_command_line(folder: Path) -> None:
    for k in range(5):
        npy(folder / f"i{k}.npy", frame(k, (1, 7) if k == 3 else SHAPE))
    says = ["error: 1 of 5 files is bad", "i3.npy", "(1, 7)", str(SHAPE), "next "]
    command_refuses(folder, folder, folder.parent / "out.npy", says=says)


KINDS = [
    ("uint8", "uint16"),
    ("uint16", "uint8"),
    ("uint16", "int16"),
    ("float32", "float64"),
    ("bool", "uint8"),
    ("int64", "float64"),
    ("complex64", "float32"),
    ("datetime64[s]", "datetime64[ms]"),
    ("<U3", "<U4"),
]


# NHPatterson/wsireg#28, spacetx/starfish#208: another dtype later
@pytest.mark.parametrize(("first", "later"), KINDS)
@pytest.mark.parametrize(("bad", "join"), [([1, 2, 3], "stack"), ([2], "concat")], ids=str)
def test_another_dtype(folder: Path, first: str, later: str, bad: list[int], join: str) -> None:
    for k in range(4):
        npy(folder / f"u{k}.npy", (frame(k) % 300).astype("int64").astype(later if k in bad else first))
    refuses(folder, folder, *(f"u{k}.npy" for k in bad), says=[first, later], join=join)


@pytest.mark.parametrize(("first", "later"), [("uint8", "uint16"), ("uint16", "int16"), ("uint16", "float32")])
@JOINS
@SOME_WAYS
def test_another_dtype_of_tiff(folder: Path, first: str, later: str, join: str, way: Way) -> None:
    for k in range(4):
        tiff(folder / f"u{k}.tif", frame(k, dtype=later if k in (1, 3) else first))
    refuses(folder, folder, "u1.tif", "u3.tif", says=[first, later], join=join, ways=[way])


# the same where the wider dtype is asked for: every number is held
@pytest.mark.parametrize(("first", "later"), [("uint8", "uint16"), ("uint16", "uint8"), ("bool", "uint16")])
def test_another_dtype_where_a_cast_is_asked_for(folder: Path, first: str, later: str) -> None:
    parts = [(frame(k) % 300).astype(later if k else first) for k in range(4)]
    for k, part in enumerate(parts):
        npy(folder / f"u{k}.npy", part)
    gives(folder, folder, np.stack([part.astype("uint16") for part in parts]), dtype="uint16")


# dask/dask-image#200: each label belongs to its image
@pytest.mark.parametrize(
    ("way", "sort_by", "listed"),
    pairwise(SOME, [None, ["kind"], ["kind", "n"], ["n"]], [True, False]),
    indirect=["way"],
    ids=str,
)
def test_labels_belong_to_images(folder: Path, sort_by: list[str] | None, listed: bool, way: Way) -> None:
    numbers = list(range(0, 240, 7))
    kind = {n: "dark" if n % 3 == 0 else "light" for n in numbers}
    paths = {n: npy(folder / f"s{n}_{kind[n]}.npy", np.full((3, 4), n, "uint16")) for n in reversed(numbers)}
    order = random.Random(1).sample(numbers, len(numbers)) if listed else numbers
    sources: Any = [paths[n] for n in order] if listed else folder
    keys: dict[str, Callable[[int], Any]] = {"n": lambda n: n, "kind": lambda n: kind[n]}
    for name in reversed(sort_by or []):
        order = sorted(order, key=keys[name])
    gives(
        folder,
        sources,
        np.stack([np.full((3, 4), n, "uint16") for n in order]),
        labels=r"s(?P<n>\d+)_(?P<kind>[a-z]+)",
        sort_by=sort_by,
        labelled={"n": order, "kind": [kind[n] for n in order]},
        ways=[way],
    )


KEYS = [slice(None, None, 3), slice(None, None, -1), [5, 0, 5, 2], slice(4, 9)]


@pytest.mark.parametrize(("way", "key", "kind"), pairwise(SOME, KEYS, ["npy", "tif"]), indirect=["way"], ids=str)
def test_labels_belong_to_images_of_a_part(folder: Path, key: Any, kind: str, way: Way) -> None:
    join: Any = {"npy": "stack", "tif": "concat"}[kind]
    rows = np.arange(12).repeat(1 if join == "stack" else 2)
    for k in range(12):
        SAVE[kind](folder / f"s{k}.{kind}", np.full((2, *SHAPE), k, "uint16"))
    due = np.stack([np.full(SHAPE if join == "concat" else (2, *SHAPE), k, "uint16") for k in rows[key]])
    whole = daskstack.open_stack(folder, labels=r"s(?P<k>\d+)", join=join)
    part, out = whole[key], folder.parent / way.name()
    assert part.labels["k"].tolist() == rows[key].tolist()
    assert_same(part.array.compute(scheduler="synchronous"), due)
    daskstack.store(whole.array[key], out, like=part, **way.options)  # Dask's own slice of the whole
    assert_same(way.read(out), due)
    assert way.read(out, "k").tolist() == rows[key].tolist()
    assert daskstack.open(out).files == tuple(str(folder / f"s{k}.{kind}") for k in rows[key])


# scverse/spatialdata#929, dask/dask#12581, sgkit-dev/sgkit#296, pydata/xarray#2335: joined files of several lengths
LENGTHS = [[3, 2, 4, 1, 3], [1, 1, 1], [7], [1, 20, 2], [0, 3, 0, 2]]
HELD = [("C", None), ("C", 2), ("F", None), ("pages", 1)]


@pytest.mark.parametrize(("rows", "held", "way"), pairwise(LENGTHS, HELD, SOME), indirect=["way"], ids=str)
def test_files_of_several_lengths(folder: Path, rows: list[int], held: tuple[str, int | None], way: Way) -> None:
    kind, files_per_block = held
    due = frames(sum(rows), (4, 6))
    file_of = [k for k in range(len(rows)) for _ in range(rows[k])]
    for k, part in enumerate(np.split(due, np.cumsum(rows)[:-1])):
        if kind != "pages":
            npy(folder / f"c{k}.npy", np.array(part, order="F" if kind == "F" else "C"))
        elif len(part):  # a TIFF file holds a page at least
            paged(folder / f"c{k}.tif", part)
    asked = {"labels": r"c(?P<k>\d)\.", "join": "concat", "files_per_block": files_per_block}
    gives(folder, folder, due, labelled={"k": file_of}, ways=[way], **asked)


@RACING_WAYS
def test_files_of_several_lengths_many_times(folder: Path, way: Way) -> None:
    rows = [3, 2, 4, 1, 3]
    due = frames(sum(rows), (6,))
    for k, part in enumerate(np.split(due, np.cumsum(rows)[:-1])):
        npy(folder / f"c{k}.npy", part)
    gives(folder, folder, due, join="concat", files_per_block=1, ways=[way] * (10 if way.scheduler == "threads" else 5))


# the same of any Dask array: no two tasks write the same file, and what lies beside a block stays
BLOCKS: dict[str, tuple[int | tuple[int, ...], ...]] = {
    "unlike the chunks": (5, 4, 3),
    "irregular": ((1, 7, 2, 3), (6, 3), (11,)),
    "with none": ((3, 0, 10), (9,), (11,)),
    "one": (13, 9, 11),
}
DERIVED: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Array]]] = {
    "itself": (lambda a: a, lambda a: a),
    "computed": (lambda a: a.map_blocks(lambda b: b + 1), lambda a: a + 1),
    "turned": (lambda a: a.T[::-1], lambda a: a.T[::-1]),
    "twice": (lambda a: da.concatenate([a, a[:3]]), lambda a: np.concatenate([a, a[:3]])),
    "reduced": (lambda a: a.sum(axis=(1, 2)), lambda a: a.sum(axis=(1, 2))),
    "Fortran order": (lambda a: a.map_blocks(np.asfortranarray, dtype="u2"), lambda a: a),
    "big-endian": (lambda a: a.astype(">f4"), lambda a: a.astype("f4")),
    "broadcast": (lambda a: da.broadcast_to(a[0], (7, 9, 11)), lambda a: np.broadcast_to(a[0], (7, 9, 11))),
    "dates": (lambda a: a.astype("M8[s]"), lambda a: a.astype("M8[s]")),
}
NO_SPECIFICATION = "ignore:The data type:zarr.errors.UnstableSpecificationWarning"  # zarr, of dates in Zarr 3


@pytest.mark.filterwarnings(NO_SPECIFICATION)
@pytest.mark.parametrize(("derived", "blocks", "kind"), pairwise(DERIVED, BLOCKS, OUTPUTS))
def test_each_file_of_a_derived_array_is_written_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, blocks: str, derived: str
) -> None:
    whole, way = frames(13, (9, 11)), Way(kind, "synchronous")
    of_dask, of_numpy = DERIVED[derived]
    array, due = of_dask(da.from_array(whole, chunks=BLOCKS[blocks])), of_numpy(whole)
    tiles: dict[str, Any] = {} if kind == "npy" else {"chunks": (2,) * due.ndim}
    if kind == "zarr":
        tiles["shards"] = (4,) * due.ndim
    written, real = [], os.rename

    def rename(source: str, target: str) -> None:
        written.append(os.path.basename(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    out = folder.parent / way.name()
    daskstack.store(array, out, **tiles, **way.options)
    assert_same(way.read(out), np.ascontiguousarray(due))
    if kind != "npy":
        step = 4 if kind == "zarr" else 2
        data = [name for name in os.listdir(out / "data") if re.fullmatch(r"(c\.)?\d+(\.\d+)*", name)]
        assert len(data) == math.prod(-(-n // step) for n in due.shape)
        assert sorted(name for name in written if name in data) == sorted(data)


# dask/dask#12583, zarr-developers/zarr-python#3682, pydata/xarray#10831: chunks or shards across blocks
TILES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1, 4, 4), (4, 8, 8)),
    ((3, 3, 8), (6, 9, 8)),
    ((7, 1, 5), (7, 8, 5)),
]


@RACING_WAYS
@pytest.mark.parametrize("of", ["files", "array"])
def test_chunks_across_blocks_many_times(folder: Path, way: Way, of: str) -> None:
    due = frames(10, (8, 8), "int64")
    for k in range(10):
        npy(folder / f"a{k:02}.npy", due[k])
    stack = daskstack.open_stack(folder, files_per_block=3)
    for k in range(9 if way.scheduler == "threads" else 3):
        chunks, shards = TILES[k % 3]
        tiles: dict[str, Any] = {"npy": {}, "zarr": {"chunks": chunks, "shards": shards}, "zarr 2": {"chunks": chunks}}[
            way.kind
        ]
        out = folder.parent / way.name(str(k))
        if of == "files":
            daskstack.build(folder, out, **tiles, **way.options)
        else:
            daskstack.store(stack.array.rechunk((k % 3 + 2, 5, 8)), out, like=stack, **tiles, **way.options)
        assert_same(way.read(out), due)


# dask/dask#586, gwmod/nlmod#395: the same path, new content
@pytest.mark.parametrize(
    ("way", "kind"),
    [((out, scheduler), kind) for scheduler, out, kind in pairwise(EVERY_SCHEDULER, OUTPUTS, ["npy", "tif"])],
    indirect=["way"],
    ids=str,
)
def test_new_content(folder: Path, kind: str, way: Way) -> None:
    join: Any = {"npy": "concat", "tif": "stack"}[kind]
    paths = [SAVE[kind](folder / f"f{k}.{kind}", frame(k)) for k in range(2)]
    joined = np.concatenate if join == "concat" and kind == "npy" else np.stack
    old, new = joined([frame(0), frame(1)]), joined([frame(0), frame(9)])
    out = folder.parent / way.name()
    options: dict[str, Any] = {"join": join, **way.options}
    first = daskstack.open_stack(paths, join=join).array.persist(scheduler=way.scheduler)
    daskstack.build(paths, out, **options)
    SAVE[kind](Path(paths[1]), frame(9))
    second = daskstack.open_stack(paths, join=join).array
    assert first.name != second.name
    assert_same(second.compute(scheduler=way.scheduler), new)
    assert_same(first.compute(scheduler=way.scheduler), old)
    with pytest.raises(OutputExistsError, match=rf"f1\.{kind}"):  # the old output does not pass for one of the new file
        daskstack.build(paths, out, **options)
    assert_same(way.read(out), old)
    daskstack.build(paths, out, overwrite=True, **options)
    assert_same(way.read(out), new)
    daskstack.store(first, out, overwrite=True, **way.options)  # where it was persisted
    assert_same(way.read(out), old)


# the same: what lies on a cluster is asked for there, or it is said so
@pytest.mark.parametrize("scheduler", ["threads", "synchronous", "processes", None])
def test_persisted_on_a_cluster(folder: Path, client: Client, scheduler: str | None) -> None:
    array = client.persist(da.from_array(frames(3), chunks=1)) + 1
    with pytest.raises(UsageError, match=r"lies on a Dask cluster\nnext  give its Client: scheduler=client"):
        daskstack.store(array, folder.parent / "out.npy", scheduler=scheduler, progress=False)
    assert os.listdir(folder.parent) == ["in"]


# ------------------------------------------------------------------------------------------ storing


def in_the_way(path: Path, what: str) -> None:
    if what == "folder":
        path.mkdir()
        (path / "kept").write_text("kept")
    elif what == "link":
        path.symlink_to("nowhere")
    elif what == "empty":
        path.touch()
    elif path.suffix == ".zarr":
        zarr.create_array(str(path / "data"), data=frame(77))
    else:
        npy(path, frame(77))


# pydata/xarray#11159, ome/ome-zarr-py#555: the output, or what lies beside it, is there already
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["out.npy", "out.npy.index.csv", "out.npy.json", "out.k.npy", "out.zarr"])
@pytest.mark.parametrize("what", ["array", "folder", "link", "empty"])
def test_output_exists(folder: Path, what: str, name: str, overwrite: bool) -> None:
    for k in range(2):
        npy(folder / f"a{k}.npy", frame(k))
    in_the_way(folder.parent / name, what)
    before = contents(folder.parent)
    options: dict[str, Any] = {"labels": r"a(?P<k>\d)", "overwrite": overwrite}
    tried = [Way(kind, s) for kind in (["zarr", "zarr 2"] if name == "out.zarr" else ["npy"]) for s in SCHEDULERS]
    refuses(folder, folder, error=OutputExistsError, says=[name, "not touched"], ways=tried, **options)
    stack = daskstack.open_stack(folder, labels=options["labels"])
    with pytest.raises(OutputExistsError, match=f"{name} exists and was not made by daskstack; it was not touched"):
        daskstack.store(stack.array + 1, folder.parent / tried[0].name(), like=stack, overwrite=overwrite)
    assert contents(folder.parent) == before


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_output_exists_on_the_command_line(folder: Path, name: str) -> None:
    for k in range(2):
        npy(folder / f"a{k}.npy", frame(k))
    in_the_way(folder.parent / name, "array")
    before = contents(folder.parent)
    says = ["error: ", f"{name} exists and was not made by daskstack; it was not touched\nnext  choose another OUT\n"]
    command_refuses(folder, folder, folder.parent / name, says=says)
    assert contents(folder.parent) == before


# the same where the output is daskstack's own: nothing to do, refused, or replaced when asked
@SOME_WAYS
@pytest.mark.parametrize("change", [{"limit": 2}, {"labels": {"k": r"a(\d)"}}, {"join": "concat"}], ids=str)
def test_own_output_exists(folder: Path, way: Way, change: dict[str, Any]) -> None:
    for k in range(3):
        npy(folder / f"a{k}.npy", frame(k))
    out, options = folder.parent / way.name(), way.options
    daskstack.build(folder, out, **options)
    before = contents(folder.parent)
    assert daskstack.build(folder, out, **options).files == 0
    with pytest.raises(OutputExistsError, match=re.escape(out.name)):
        daskstack.build(folder, out, **change, **options)
    assert contents(folder.parent) == before
    daskstack.build(folder, out, overwrite=True, **change, **options)
    due = frames(3)[: change.get("limit")]
    due = np.concatenate(due) if "join" in change else due
    assert_same(way.read(out), due)
    array = daskstack.open(out).array + 1  # the output read while its successor grows
    with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
        daskstack.store(array, out, **options)
    assert_same(way.read(out), due)
    daskstack.store(array, out, overwrite=True, **options)
    assert_same(way.read(out), due + 1)


# dask/dask#5942, fractal-analytics-platform/fractal-tasks-core#53: the output is one of the inputs
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("source", ["", "*.npy", "list"])
@pytest.mark.parametrize("by", ["name", "dots", "link", "hard link", "folder link"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_output_is_an_input(folder: Path, by: str, source: str, overwrite: bool, scheduler: str) -> None:
    paths = [npy(folder / f"a{k}.npy", frame(k)) for k in range(3)]
    out = folder / "a1.npy"
    if by == "dots":
        out = folder / ".." / "in" / "a1.npy"
    elif by == "folder link":
        (folder.parent / "alias").symlink_to(folder)
        out = folder.parent / "alias" / "a1.npy"
    elif by != "name":
        out = folder.parent / "out.npy"
        (out.symlink_to if by == "link" else out.hardlink_to)(paths[1])
    before = contents(folder.parent)
    sources: Any = paths if source == "list" else str(folder / source)
    with pytest.raises(OutputExistsError, match=re.escape(out.name)):
        daskstack.build(sources, out, overwrite=overwrite, scheduler=scheduler, progress=False)
    assert contents(folder.parent) == before


# the same where it is a folder that holds the inputs, or an array made of them
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["in.zarr", "a1.npy"])
def test_output_holds_the_inputs(folder: Path, name: str, overwrite: bool) -> None:
    place = folder if name == "a1.npy" else folder / "in.zarr"
    place.mkdir(exist_ok=True)
    stack = daskstack.open_stack([npy(place / f"a{k}.npy", frame(k)) for k in range(3)])
    before = contents(folder)
    for like in (stack, None):
        with pytest.raises(OutputExistsError, match=rf"in/{re.escape(name)} .*; it was not touched"):
            daskstack.store(stack.array + 1, folder / name, like=like, overwrite=overwrite, progress=False)
    with pytest.raises(OutputExistsError, match=rf"in/{re.escape(name)} .*; it was not touched"):
        daskstack.build(stack.files, folder / name, overwrite=overwrite, progress=False)
    assert contents(folder) == before
    assert sorted(os.listdir(folder)) == sorted(os.listdir(place) if place == folder else ["in.zarr"])


# the same: what the first run made is no input of the second
@SOME_WAYS
@pytest.mark.parametrize("source", ["", "*", "**/*.npy", "[a-z]*"])
def test_own_output_is_no_input(folder: Path, source: str, way: Way) -> None:
    for k in range(3):
        npy(folder / f"a{k}.npy", frame(k))
    out = folder / way.name()
    for files in (3, 0):
        report = daskstack.build(str(folder / source), out, labels={"k": r"a(\d)"}, **way.options)
        assert (report.shape, report.files) == ((3, *SHAPE), files)
        assert_same(way.read(out), frames(3))
        assert way.read(out, "k").tolist() == [0, 1, 2]


def test_output_is_an_input_on_the_command_line(folder: Path) -> None:
    for k in range(3):
        npy(folder / f"a{k}.npy", frame(k))
    says = ["error: ", "a1.npy is one of the inputs", "not touched"]
    command_refuses(folder, folder / "*.npy", folder / "a1.npy", "--overwrite", says=says)


# zarr-developers/zarr-python#487, scverse/spatialdata#812, pangeo-data/rechunker#98: a chunk over 2 GiB
@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize(
    ("shape", "join"),
    [
        ((2**31 + 4096,), "stack"),
        ((3, 2**16, 2**15), "concat"),
        ((2, 2**31 + 4096), "concat"),
        ((5, 2**31 - 1), "stack"),
    ],
    ids=str,
)
def test_chunk_over_2_gib(folder: Path, version: int, shape: tuple[int, ...], join: Any) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}"
    with_header(folder / "big.npy", header, b"")
    os.truncate(folder / "big.npy", os.path.getsize(folder / "big.npy") + math.prod(shape))  # a hole
    stack, out = daskstack.open_stack(folder, join=join), folder.parent / "out.zarr"
    target: Any = stack.plan(out, zarr_format=version).target
    assert math.prod(target.chunks) <= (4 << 20 if version == 3 else 128 << 20)
    assert math.prod(target.shards) <= 128 << 20
    whole = (1, *(-1,) * (stack.array.ndim - 1))
    split = (1, *(1 << 12,) * (stack.array.ndim - 1))
    asked: Any = stack.plan(out, zarr_format=version, chunks=split).target
    assert asked.chunks == tuple(min(c, n) for c, n in zip(split, stack.shape, strict=True))
    for store in (stack.to_zarr, lambda out, **options: daskstack.store(stack.array + 1, out, **options)):
        with pytest.raises(UsageError, match=r"one chunk of \(1, [\d, ]+\) takes .* GB; codecs take 2 GiB"):
            store(out, zarr_format=version, chunks=whole, progress=False)
    assert os.listdir(folder.parent) == ["in"]


# khanlab/zarrnii#189, fideus-labs/ngff-zarr#478, napari/napari#7215: a version of Zarr is wanted
@pytest.mark.parametrize("by", ["build", "to_zarr", "plan", "store", "command"])
@pytest.mark.parametrize("version", [2, 3, None])
def test_version_of_zarr(folder: Path, version: int | None, by: str) -> None:
    for k in range(3):
        npy(folder / f"a{k}.npy", frame(k))
    out = folder.parent / "out.zarr"
    options: dict[str, Any] = {"zarr_format": version, "chunks": (2, 3, 4)}
    stack = daskstack.open_stack(folder, labels={"k": r"a(\d)"})
    if by == "build":
        daskstack.build(folder, out, labels={"k": r"a(\d)"}, progress=False, **options)
    elif by == "to_zarr":
        stack.to_zarr(out, progress=False, **options)
    elif by == "plan":
        stack.carry_out(stack.plan(out, **options), progress=False)
    elif by == "store":
        daskstack.store(stack.array, out, like=stack, progress=False, **options)
    else:
        words = ["--zarr-format", version] if version else []
        assert command("build", folder, out, "--label", r"k=a(\d)", "--chunks", "2,3,4", *words).returncode == 0
    names = {path.name for path in out.rglob("*") if not path.is_dir() and not re.fullmatch(r"[c\d.]+", path.name)}
    assert names == ({".zgroup", ".zattrs", ".zarray", ".zmetadata"} if version == 2 else {"zarr.json"})
    spec = {"driver": "zarr" if version == 2 else "zarr3", "kvstore": {"driver": "file", "path": str(out / "data")}}
    assert_same(np.asarray(tensorstore.open(spec).result().read().result()), frames(3))
    assert Way("zarr 2" if version == 2 else "zarr", None).read(out, "k").tolist() == [0, 1, 2]


@pytest.mark.parametrize(("name", "version"), [("out.npy", 2), ("out.npy", 3), ("out.zarr", 1), ("out.zarr", 4)])
def test_version_that_is_none(folder: Path, name: str, version: int) -> None:
    npy(folder / "a.npy", frame(0))
    with pytest.raises(UsageError, match="zarr_format"):
        daskstack.build(folder, folder.parent / name, zarr_format=version, progress=False)
    out = ["build", folder, folder.parent / name, "--zarr-format", version]
    assert (done := command(*out)).returncode == 2
    assert "zarr" in done.stderr
    assert os.listdir(folder.parent) == ["in"]


# dask/dask#9556, dask/dask#8974, dask/dask#4349: the target is written by other processes, in other folders
@EVERY_WAY
def test_target_in_other_processes(folder: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    due = frames(6)
    for k in range(6):
        npy(folder / f"a{k}.npy", due[k])
    monkeypatch.chdir(folder.parent)  # the workers are elsewhere
    daskstack.build("in/*.npy", way.name("files"), **way.options)
    offset = 1
    array = da.from_array(due, chunks=(2, 3, 7), lock=True).map_blocks(lambda block: block + offset, dtype="u2")
    daskstack.store(array, way.name("array"), **way.options)
    assert_same(way.read(Path(way.name("files"))), due)
    assert_same(way.read(Path(way.name("array"))), due + 1)


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_workers_of_its_own_on_the_command_line(folder: Path, name: str) -> None:
    due = frames(6)
    for k in range(6):
        npy(folder / f"a{k}.npy", due[k])
    done = command("build", "in", name, "--workers", 2, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"100%  6/6 files  .*\n", done.stderr)  # nothing of what the cluster does
    assert_same(Way(name[4:], None).read(folder.parent / name), due)


LIMITED = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
import daskstack
try:
    daskstack.build(sys.argv[3], sys.argv[2], scheduler=sys.argv[4], progress=False)
except daskstack.errors.NoSpaceError as exc:
    print(exc)
"""


# numpy/numpy#21964, bloomberg/memray#117, h2o/h2o#910, osmcode/osmium-tool#184: the disk is full
@pytest.mark.parametrize(
    ("name", "scheduler", "limit", "says"),
    [
        ("out.npy", "threads", 1 << 19, "1.0 MB needed"),
        ("out.npy", "synchronous", (1 << 20) + 127, "1.0 MB needed"),
        ("out.npy", "processes", 1 << 19, "1.0 MB needed"),
        ("out.zarr", "threads", 1 << 16, "131 kB needed"),
        ("out.zarr", "synchronous", 1 << 16, "131 kB needed"),
    ],
)
def test_limit_on_file_sizes(folder: Path, name: str, scheduler: str, limit: int, says: str) -> None:
    for k in range(8):
        npy(folder / f"a{k}.npy", frame(k, (256, 256)))
    before = contents(folder)
    done = script(LIMITED, limit, folder.parent / name, folder, scheduler)
    assert done.returncode == 0, done.stderr  # not by SIGXFSZ or SIGBUS
    assert name in done.stdout
    assert says in done.stdout
    assert published(folder.parent) == ["in"]
    assert contents(folder) == before


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EFBIG"])
@pytest.mark.parametrize(
    ("name", "function", "call"),
    [("out.npy", "pwrite", k) for k in (1, 2, 6, 12)] + [("out.zarr", "writev", k) for k in (1, 2, 6)],
)
def test_disk_fills_up_on_the_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, code: str, name: str, function: str, call: int
) -> None:
    for k in range(8):
        npy(folder / f"a{k}.npy", frame(k))
    before = contents(folder)
    real, calls = getattr(os, function), iter(range(1, 1000))

    def write(*arguments: Any) -> int:
        if next(calls) >= call:
            raise OSError(getattr(errno, code), code)
        return int(real(*arguments))

    monkeypatch.setattr(os, function, write)
    tiles: dict[str, Any] = {"chunks": (1, -1, -1), "shards": (1, -1, -1)} if name == "out.zarr" else {}
    with pytest.raises(NoSpaceError, match=re.escape(name)):
        daskstack.build(folder, folder.parent / name, scheduler=scheduler, progress=False, **tiles)
    assert published(folder.parent) == ["in"]
    assert contents(folder) == before


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_disk_is_too_small(folder: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str) -> None:
    for k in range(8):
        npy(folder / f"a{k}.npy", frame(k, (256, 256)))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1000, f_frsize=512, f_blocks=2000))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("something was written"))
    with pytest.raises(NoSpaceError, match=r"out\.npy needs 1\.\d MB; 512 kB are free") as caught:
        daskstack.build(folder, folder.parent / "out.npy", scheduler=scheduler, progress=False)
    assert caught.value.errno == errno.ENOSPC
    assert published(folder.parent) == ["in"]


BIG = (512, 256)  # half a MiB of float32


def big(folder: Path, kind: str) -> dict[str, Any]:
    """24 large items, in as many files or in one; item k is full of k."""
    items = [np.full(BIG, k, "float32") for k in range(24)]
    if kind.startswith("files"):
        for k, item in enumerate(items):
            if kind == "files, zlib":
                tiff(folder / f"a{k:02}.tif", item, compression="zlib")
            else:
                npy(folder / f"a{k:02}.npy", np.array(item, order="F" if kind == "files, F" else "C"))
        return {}
    if kind == "pages":
        paged(folder / "a.tif", items, compression="zlib")
    else:
        npy(folder / "a.npy", np.array(items, order="F" if kind == "one file, F" else "C"))
    return {"join": "concat"}


# dask/dask#5985, numpy/numpy#26532: memory stays within what the plan says, and that within what the user says
@pytest.mark.parametrize(
    ("kind", "scheduler", "memory_limit", "name"),
    [
        (*row, "out.npy")
        for row in [
            ("files", "threads", None),
            ("files", "synchronous", "4 MB"),
            ("files, zlib", "threads", "4 MB"),
            ("files, F", "threads", "4 MB"),
            ("one file", "threads", "4 MB"),
            ("one file, F", "threads", "4 MB"),
            ("pages", "threads", None),
            ("pages", "synchronous", "4 MB"),
        ]
    ]
    + [("files", "threads", "4 MB", "out.zarr"), ("pages", "synchronous", "4 MB", "out.zarr")],
)
def test_memory(folder: Path, kind: str, scheduler: str, memory_limit: str | None, name: str) -> None:
    out = folder.parent / name
    stack = daskstack.open_stack(folder, **big(folder, kind))
    options: dict[str, Any] = {"scheduler": scheduler, "threads": 2, "memory_limit": memory_limit}
    plan = stack.plan(out, **options)
    assert memory_limit is None or plan.memory <= 4_000_000 < stack.nbytes / 3
    daskstack.build(folder, folder.parent / f"small.{name}", limit=1, progress=False)  # imports are not counted
    tracemalloc.start()
    try:
        stack.carry_out(plan, progress=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < plan.memory + (2 << 20)
    stored = Way(name[4:], None).read(out)
    assert stored.shape == (24, *BIG)
    assert all((stored[k] == k).all() for k in range(24))


# --------------------------------------------------------------------------------------- scheduling


# dask/dask#7851, dask/dask#2895, danforthcenter/plantcv#1773, dask/dask-image#121: the graph is too big
@pytest.mark.parametrize(("count", "join"), [(12_000, "stack"), (3_000, "concat")])
def test_size_of_graph(folder: Path, count: int, join: Any) -> None:
    path = npy(folder / "one.npy", np.arange(4, dtype="uint8")[None])
    begin = time.process_time()
    stack = daskstack.open_stack([path] * count, join=join)
    array, plan = stack.array, stack.plan(folder.parent / "out.npy")
    assert time.process_time() - begin < 5
    assert len(array.__dask_graph__()) == plan.blocks == len(array.chunks[0]) <= 64
    assert len(pickle.dumps(dict(array.__dask_graph__()))) < 100 * count


def test_size_of_graph_with_a_file_a_block(folder: Path) -> None:
    path = npy(folder / "one.npy", np.arange(4, dtype="uint8"))
    begin = time.process_time()
    array = daskstack.open_stack([path] * 3_000, files_per_block=1).array
    assert time.process_time() - begin < 5
    assert array.numblocks == (3_000, 1)
    gives(folder, [path] * 3_000, np.tile(np.arange(4, dtype="uint8"), (3_000, 1)), ways=PLAIN)


@SOME_WAYS
def test_large_graph_gives_no_warning(folder: Path, way: Way) -> None:
    path = npy(folder / "one.npy", np.arange(4, dtype="uint8"))
    due = np.tile(np.arange(4, dtype="uint8"), (3_000, 1))
    gives(folder, [path] * 3_000, due, ways=[way])  # a warning is an error here
    out = folder.parent / way.name("derived")
    stack = daskstack.open_stack([path] * 3_000)
    daskstack.store(stack.array + 1, out, like=stack, **way.options)
    assert_same(way.read(out), due + 1)


# dask/distributed#5726, dask/distributed#4751: a script without a guard ends, and says why
@pytest.mark.parametrize(
    "call",
    [
        "daskstack.store(da.ones((4, 3)), 'out.zarr', workers=2)",
        "daskstack.open_stack('in').to_zarr('out.zarr', scheduler='processes', zarr_format=2)",
    ],
)
def test_script_without_a_guard(folder: Path, call: str) -> None:
    npy(folder / "a.npy", frame(0))
    (folder.parent / "script.py").write_text(f"import dask.array as da\nimport daskstack\n{call}\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    says = "this script cannot start worker processes: each would run it again\nnext  put the call under: if __name__ == '__main__':\n"
    assert done.stderr.endswith(says)
    assert sorted(os.listdir(folder.parent)) == ["in", "script.py"]


# dask/distributed#2694, dask/dask-jobqueue#122, dask/dask-jobqueue#481: a worker is killed
@pytest.mark.parametrize(("kind", "of"), [("zarr", "files"), ("npy", "array")])
def test_killed_worker(folder: Path, client: Client, kind: str, of: str) -> None:
    due, killed = frames(6), folder.parent / "killed"
    for k in range(6):
        npy(folder / f"a{k}.npy", due[k])

    def killer(path: str) -> Array:
        if path.endswith("a3.npy") and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.asarray(np.load(path))

    way = Way(kind, client)
    out = folder.parent / way.name()
    if of == "files":
        daskstack.build(folder, out, reader=killer, **way.options)
    else:
        daskstack.store(daskstack.open_stack(folder, reader=killer).array + 1, out, **way.options)
    assert killed.exists()
    assert_same(way.read(out), due if of == "files" else due + 1)
    assert not os.path.lexists(f"{out}.part")


FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import daskstack
stack = daskstack.open_stack(sys.argv[2], join=sys.argv[4], files_per_block=100)
daskstack.store(stack.array + 0, "derived" + sys.argv[1], like=stack, scheduler=sys.argv[3], progress=False)
store = stack.to_npy if sys.argv[1] == ".npy" else stack.to_zarr
store("out" + sys.argv[1], scheduler=sys.argv[3], progress=False)
"""


# joblib/joblib#81, MITgcm/xmitgcm#11, logix-project/logix#22: too many open files
@pytest.mark.parametrize(
    ("kind", "scheduler", "join", "suffix"),
    [
        ("npy", "threads", "stack", ".zarr"),
        ("npy", "processes", "stack", ".zarr"),
        ("npy", "synchronous", "concat", ".npy"),
        ("tif", "threads", "concat", ".npy"),
    ],
)
def test_few_descriptors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scheduler: str, join: str, suffix: str
) -> None:
    due = frames(300)
    for k in range(300):
        SAVE[kind](folder / f"a{k:03}.{kind}", due[k])
    monkeypatch.chdir(folder.parent)
    done = script(FEW, suffix, folder, scheduler, join)
    assert done.returncode == 0, done.stderr
    for stem in ("out", "derived"):
        found = Way(suffix[1:], None).read(Path(stem + suffix))
        assert_same(found, np.concatenate(due) if (kind, join) == ("npy", "concat") else due)


# malariagen/malariagen-data-python#612, dask/distributed#5953: progress with every scheduler, none unasked
@EVERY_WAY
@pytest.mark.parametrize(("wanted", "of"), [(None, "files"), (True, "array"), (False, "array")])
def test_progress(folder: Path, capfd: pytest.CaptureFixture[str], way: Way, wanted: bool | None, of: str) -> None:
    for k in range(12):
        npy(folder / f"a{k}.npy", frame(k))
    out, options = folder.parent / way.name(), {**way.options, "progress": wanted}
    if of == "files":
        daskstack.build(folder, out, files_per_block=5, **options)
    else:
        daskstack.store(daskstack.open_stack(folder).array + 1, out, **options)
    shown = capfd.readouterr()
    assert shown.out == ""
    if wanted is False:
        assert shown.err == ""
    else:
        assert re.search(rf"^100%  12/12 {'files' if of == 'files' else 'items'}  ", shown.err, re.MULTILINE)
        assert "\r" not in shown.err  # no terminal


@pytest.mark.parametrize("options", [[], ["--quiet"]], ids=str)
def test_progress_on_the_command_line(folder: Path, options: list[str]) -> None:
    for k in range(12):
        npy(folder / f"a{k}.npy", frame(k))
    done = command("build", folder, folder.parent / "out.npy", *options)
    assert done.returncode == 0
    if options == ["--quiet"]:
        assert (done.stdout, done.stderr) == ("", "")
    else:
        assert "12/12 files" in done.stderr
        assert "done  " in done.stdout
