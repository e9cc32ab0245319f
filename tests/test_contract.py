"""One contract that every output format passes: equal arrays for all readers, equal bytes from all schedulers, all
that is stored written once."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import dask
import dask.array
import numpy as np
import pytest
import tensorstore
import tifffile
import xarray
import zarr
from conftest import DATA, Array
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import daskstack
from daskstack import blocks, build, files, open_stack
from daskstack.errors import UsageError

Join: TypeAlias = Literal["stack", "concat"]
Read: TypeAlias = Callable[[str], Any]
Schedulers: TypeAlias = dict[str, Any]


def exactly(found: Any, expected: Array) -> bool:
    """Whether it has this dtype, this shape and every byte: NaN with its payload, the sign of zero."""
    found = np.asarray(found)
    alike = found.dtype == expected.dtype and found.shape == expected.shape
    return alike and np.ascontiguousarray(found).tobytes() == expected.tobytes()


# -- inputs -----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Files, and how they are joined."""

    paths: list[Path]
    join: Join = "stack"


def any_bits(shape: tuple[int, ...], dtype: str) -> Array:
    """Random bits, so that all kinds of NaN and NaT are among them; and zeros of both signs."""
    rng = np.random.default_rng(math.prod(shape))
    kind = np.dtype(dtype)
    if kind.kind == "b":
        items: Array = rng.integers(0, 2, shape).astype(bool)
    else:
        items = np.frombuffer(rng.bytes(math.prod(shape) * kind.itemsize), kind).reshape(shape).copy()
    if kind.kind in "fc":
        items.reshape(-1)[:3] = [-0.0, np.nan, -np.inf]
    items[1] = 0
    return items


def saved(folder: Path, items: Sequence[Array] | Array) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{k}.npy" for k in range(len(items))]
    for path, item in zip(paths, items, strict=True):
        np.save(path, item)
    return paths


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*INTEGERS, "float16", "float32", "float64", "bool", "complex64", "complex128", "datetime64[ms]"]
ITEMS: dict[str, tuple[tuple[int, ...], str]] = {
    **{dtype: ((7, 3, 4), dtype) for dtype in DTYPES},
    "1-D": ((9, 5), "uint16"),
    "3-D": ((9, 3, 4, 5), "uint16"),
    "4-D": ((9, 2, 3, 4, 5), "float32"),
    "5-D": ((9, 2, 3, 2, 1, 3), "uint16"),
    "no axis": ((70,), "float64"),
    "one element": ((70, 1), "uint8"),
    "no block filled": ((131, 2, 3), "int32"),  # blocks of 3, the last of 2
    "huge": ((3, 1100, 1001), "uint32"),
}
REAL = {
    "banana": Case(sorted(DATA.glob("banana*.tif"))),
    "foam": Case([DATA / "V1.75f3.1250001.tif"]),
    "membrane": Case([DATA / "membrane_2d_timelapse.tif"], "concat"),
}
CASES = [*ITEMS, *REAL]


def make(name: str, folder: Path) -> Case:
    return REAL[name] if name in REAL else Case(saved(folder / "in", any_bits(*ITEMS[name])))


def plain_loop(case: Case) -> Array:
    """What NumPy makes of the files, one item after another."""
    loaded = [np.load(p) if p.suffix == ".npy" else tifffile.imread(p) for p in case.paths]
    items = [item for array in loaded for item in (array if case.join == "concat" else [array])]
    out = np.empty((len(items), *items[0].shape), items[0].dtype.newbyteorder("="))
    for k, item in enumerate(items):
        out[k] = item
    return out


def test_the_huge_item_is_larger_than_a_chunk_and_the_blocks_are_not_filled() -> None:
    (count, *item), dtype = ITEMS["huge"]
    assert math.prod(item) * np.dtype(dtype).itemsize > blocks.MOST_CHUNK_NBYTES
    assert blocks.choose_chunks((count,), item, 4)[1:] != tuple(item)
    assert 131 % blocks.items_per_block(131, 24) != 0


# -- schedulers -------------------------------------------------------------------------------------------------


@pytest.fixture
def schedulers(client: Client, pool: None) -> Schedulers:
    """All four."""
    return {"synchronous": "synchronous", "threads": "threads", "processes": "processes", "client": client}


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    """A record without the time at which it was made, and without its checksum, which counts the time in."""
    if "daskstack" in entry:
        del entry["daskstack"]["created"], entry["crc32c"]
    return entry


def stored(folder: Path) -> dict[str, Any]:
    """All files below a folder, by their bytes; of metadata what they say but for the time."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            is_metadata = path.suffix == ".json" or path.name.startswith(".z")
            found[str(path.relative_to(folder))] = json.loads(data, object_hook=timeless) if is_metadata else data
    return found


# -- the contract -----------------------------------------------------------------------------------------------


class StoreContract:
    """What is due of every output format."""

    out: str
    options: ClassVar[dict[str, Any]]
    cut_small: tuple[str, ...]  # arguments that make an output of several files or byte ranges
    plain: Read  # the reader that depends on least

    def readers(self, case: str) -> dict[str, Read]:
        """Programs that must read it equal."""
        raise NotImplementedError

    def labels(self, out: str) -> dict[str, Array]:
        """All labels, read with nothing of daskstack."""
        raise NotImplementedError

    def build(self, case: Case, folder: Path, **options: Any) -> str:
        out = folder / self.out
        out.parent.mkdir(exist_ok=True)
        build(case.paths, out, join=case.join, progress=False, **self.options, **options)
        return str(out)

    @pytest.mark.parametrize("name", CASES)
    def test_every_scheduler_stores_what_every_reader_finds_equal_to_a_plain_loop(
        self, tmp_path: Path, schedulers: Schedulers, name: str
    ) -> None:
        case = make(name, tmp_path)
        expected = plain_loop(case)
        if name in DTYPES:  # of dtypes, which are many and alike, the others take turns
            others = list(schedulers)[1:]
            schedulers = {how: schedulers[how] for how in ("synchronous", others[DTYPES.index(name) % len(others)])}
        outs = {how: self.build(case, tmp_path / how, scheduler=s, threads=2) for how, s in schedulers.items()}
        assert {how: exactly(self.plain(out), expected) for how, out in outs.items()} == dict.fromkeys(outs, True)
        first = stored(tmp_path / "synchronous")
        assert {how for how in outs if stored(tmp_path / how) == first} == set(outs)
        readers = self.readers(name)
        found = {how: exactly(read(outs["synchronous"]), expected) for how, read in readers.items()}
        assert found == dict.fromkeys(readers, True)

    @pytest.mark.parametrize(("axes", "grid"), [((), (6,)), (("t",), (3,)), (("kind", "t"), (2, 3))])
    def test_labels_are_those_of_the_files_in_their_places(
        self, tmp_path: Path, axes: tuple[str, ...], grid: tuple[int, ...]
    ) -> None:
        (tmp_path / "in").mkdir()
        names = [(t, kind) for t in (250, -3, 0) for kind in ("ä", "bb")]
        if grid == (3,):
            names = names[::2]
        for k, (t, kind) in enumerate(names):
            np.save(tmp_path / "in" / f"t{t}_{kind}.npy", np.full((3, 4), k, "uint8"))
        labels: dict[str, str | Callable[[str], Any]] = {
            "t": r"t(-?\d+)",
            "kind": r"_(\w+)\.",
            "zero": "t0",
            "half": lambda path: len(path) / 2,
        }
        out = self.build(Case([tmp_path / "in"]), tmp_path, labels=labels, axes=axes or None)
        file_of = np.asarray(self.plain(out))[..., 0, 0]  # every pixel tells its file
        assert file_of.shape == grid
        found = self.labels(out)
        assert list(found) == list(labels)
        due = {
            "t": [t for t, _ in names],
            "kind": [kind for _, kind in names],
            "zero": [t == 0 for t, _ in names],
            "half": [len(f"t{t}_{kind}.npy") / 2 for t, kind in names],
        }
        for name, of_files in due.items():
            along = [-1 if a == name else 1 for a in axes] if name in axes else grid
            whole = np.broadcast_to(found[name].reshape(along), grid)
            assert exactly(whole, np.array(of_files)[file_of]), name

    def test_the_target_survives_pickling(self, tmp_path: Path) -> None:
        case = make("no block filled", tmp_path)
        plan = open_stack(case.paths).plan(self.out, **self.options)
        targets = [plan.target, pickle.loads(pickle.dumps(plan.target))]
        assert targets[0] == targets[1]
        assert vars(targets[0]).keys() == vars(targets[1]).keys()
        whole = plain_loop(case)
        begin, end = plan.bounds[-2:].tolist()
        for k, target in enumerate(targets):
            (tmp_path / f"{k}").mkdir()
            target.create(str(tmp_path / f"{k}"))
            target.write(str(tmp_path / f"{k}"), begin, whole[begin:end])
        assert stored(tmp_path / "0") == stored(tmp_path / "1") != {}

    def test_every_byte_was_written_once_as_the_kernel_saw_it(self, tmp_path: Path) -> None:
        need_strace(tmp_path)
        case = make("no block filled", tmp_path)
        out = tmp_path / "made" / self.out
        out.parent.mkdir()
        (tmp_path / "trace").mkdir()
        command = [sys.executable, "-m", "daskstack", "build", str(tmp_path / "in"), str(out), "-q", "--threads", "2"]
        done = subprocess.run(
            [*STRACE, "-o", str(tmp_path / "trace" / "calls"), *command, *self.cut_small],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert exactly(self.plain(str(out)), plain_loop(case))
        written = replay(traced(tmp_path / "trace", str(out)))
        assert_written_once(written, out)
        data = [str(out)] if self.out.endswith(".npy") else [str(path) for path in shards(out)]
        assert sum(len(written[path].extents) for path in data) > 10  # it was written in parts


class TestNpy(StoreContract):
    out = "out.npy"
    options: ClassVar[dict[str, Any]] = {}
    cut_small = ()

    def plain(self, out: str) -> Any:
        return np.load(out, mmap_mode="r")

    def readers(self, case: str) -> dict[str, Read]:
        return {
            "np.load": np.load,
            "a map": self.plain,
            "bytes": lambda out: np.lib.format.read_array(io.BytesIO(Path(out).read_bytes())),
            "daskstack": lambda out: daskstack.open(out).array,
        }

    def labels(self, out: str) -> dict[str, Array]:
        names = json.loads(Path(f"{out}.json").read_text())["daskstack"]["labels"]
        return {name: np.load(f"{out.removesuffix('.npy')}.{name}.npy") for name in names}

    @pytest.mark.parametrize("name", CASES)
    def test_it_is_the_file_that_numpy_saves(self, tmp_path: Path, name: str) -> None:
        case = make(name, tmp_path)
        np.save(tmp_path / "plain.npy", plain_loop(case))
        out = self.build(case, tmp_path / "made")
        assert Path(out).read_bytes() == (tmp_path / "plain.npy").read_bytes()


class ZarrContract(StoreContract):
    """What is due of both versions of Zarr."""

    out = "out.zarr"
    driver: str
    due: frozenset[str]  # names of files of metadata

    def plain(self, out: str) -> Any:
        data: Any = zarr.open_group(out, mode="r")["data"]
        return data[:]

    def readers(self, case: str) -> dict[str, Read]:
        found: dict[str, Read] = {
            "zarr": self.plain,
            "dask": lambda out: dask.array.from_zarr(out, component="data"),
            "xarray": lambda out: xarray.open_zarr(out)["data"].values,  # that it warns of nothing is pytest's setting
            "daskstack": lambda out: daskstack.open(out).array,
        }
        if not case.startswith("datetime64"):  # of which tensorstore knows nothing
            found["tensorstore"] = self.read_tensorstore
        return found

    def read_tensorstore(self, out: str) -> Any:
        spec = {"driver": self.driver, "kvstore": {"driver": "file", "path": f"{out}/data"}}
        return tensorstore.open(spec).result().read().result()

    def labels(self, out: str) -> dict[str, Array]:
        """The coordinates that xarray finds; it has texts of any length."""
        data = xarray.open_zarr(out)
        names = data.attrs["daskstack"]["labels"]
        assert set(data.coords) == {*names, "file", "size", "mtime", "checksum"}
        axes = tuple(data.attrs["daskstack"]["axes"])
        assert data["data"].dims[: len(axes)] == axes
        assert all(data[name].dims == ((name,) if name in axes else axes) for name in data.coords)
        found = {name: data[name].values for name in names}
        return {name: np.array(v.tolist()) if v.dtype.kind in "OT" else v for name, v in found.items()}

    def test_all_metadata_are_of_its_version(self, tmp_path: Path) -> None:
        out = self.build(make("uint16", tmp_path), tmp_path, labels={"k": r"(\d+)"})
        names = {path.name for path in Path(out).rglob("*")}
        assert names & {"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"} == self.due


class TestZarr3(ZarrContract):
    options: ClassVar[dict[str, Any]] = {}
    cut_small = ("--chunks", "3,2,2", "--shards", "6,2,4")
    driver = "zarr3"
    due = frozenset({"zarr.json"})


class TestZarr2(ZarrContract):
    options: ClassVar[dict[str, Any]] = {"zarr_format": 2}
    cut_small = ("--zarr-format", "2", "--chunks", "5,2,2")
    driver = "zarr"
    due = frozenset({".zarray", ".zattrs", ".zgroup", ".zmetadata"})

    def test_no_value_stands_for_a_missing_one(self, tmp_path: Path) -> None:
        """Xarray would take zeros for missing."""
        out = self.build(make("uint16", tmp_path), tmp_path, labels={"k": r"(\d+)"})
        values = {p.parent.name: json.loads(p.read_text())["fill_value"] for p in Path(out).rglob(".zarray")}
        assert values == dict.fromkeys(["data", "k", "file", "size", "mtime", "checksum"])
        consolidated = json.loads((Path(out) / ".zmetadata").read_text())["metadata"]
        assert [v["fill_value"] for k, v in consolidated.items() if k.endswith(".zarray")] == [None] * len(values)


# -- every byte written once ------------------------------------------------------------------------------------

Event: TypeAlias = tuple[str, str, Any]  # "made" path; "wrote" path (offset, bytes); "renamed" path to path


@dataclass
class Written:
    """What came to be of one file."""

    made: int = 0
    renamed: int = 0
    extents: list[tuple[int, int]] = field(default_factory=list)  # offset and length
    data: bytearray = field(default_factory=bytearray)


def replay(events: list[Event]) -> dict[str, Written]:
    """The files that the events leave, by their last names."""
    found: dict[str, Written] = {}
    for what, path, more in events:
        if what == "made":
            found.setdefault(path, Written()).made += 1
        elif what == "wrote":
            offset, data = more
            file = found[path]
            file.extents.append((offset, len(data)))
            file.data += bytes(max(0, offset + len(data) - len(file.data)))
            file.data[offset : offset + len(data)] = data
        elif path in found:
            assert more not in found, f"{more} was replaced"
            found[more] = found.pop(path)
            found[more].renamed += 1
        else:
            inside = [name for name in found if name.startswith(f"{path}/")]
            found |= {more + name[len(path) :]: found.pop(name) for name in inside}
    return found


def shards(out: Path) -> list[Path]:
    """The files that hold the data of a Zarr group."""
    return [path for path in (out / "data").iterdir() if re.fullmatch(r"(c\.)?\d+(\.\d+)*", path.name)]


def published(out: Path) -> list[Path]:
    """All files of an output, and of its side files."""
    return [path for path in out.parent.rglob("*") if path.is_file()]


def assert_written_once(written: dict[str, Written], out: Path) -> None:
    """Each file was made once, its bytes lie end to end without overlap, and it was renamed once at most."""
    assert {name for name in written if Path(name).is_file()} == set(map(str, published(out)))
    for path in published(out):
        file = written[str(path)]
        begin = 0
        extents = sorted(file.extents)
        if path == out:
            with out.open("rb") as f:
                np.lib.format.read_magic(f)
                np.lib.format.read_array_header_1_0(f)
                begin = f.tell()
            # A header that no reader takes comes first and is replaced last.
            header = [(0, 8), (0, begin)]
            assert [e for e in file.extents if e[0] < begin] == [file.extents[0], file.extents[-1]] == header
            extents = extents[2:]
        assert [at for at, _ in extents] + [path.stat().st_size] == [begin] + [at + n for at, n in extents], path
        assert file.made == 1, path
        in_group = out.suffix == ".zarr"
        assert file.renamed == (1 if not in_group or path in shards(out) else 0), path


@contextmanager
def logged() -> Iterator[list[Event]]:
    """What this process asks of the operating system: files made to be written, bytes, other names."""
    events: list[Event] = []
    paths: dict[int, str] = {}  # of descriptors that can write
    real_open, real_close, real_pwrite, real_rename = os.open, os.close, os.pwrite, os.rename
    real_exclusive = files._rename_exclusive

    def open_(path: Any, flags: int, *args: Any, **more: Any) -> int:
        descriptor = real_open(path, flags, *args, **more)
        if flags & (os.O_WRONLY | os.O_RDWR):
            paths[descriptor] = os.fspath(path)
            if flags & os.O_CREAT:
                events.append(("made", os.fspath(path), None))
        return descriptor

    def close(descriptor: int) -> None:
        paths.pop(descriptor, None)
        real_close(descriptor)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        done = real_pwrite(descriptor, data, offset)
        events.append(("wrote", paths[descriptor], (offset, bytes(data)[:done])))
        return done

    def at_its_position(real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def write(descriptor: int, data: Any) -> int:
            if descriptor not in paths:  # a pipe of somebody else's
                return real(descriptor, data)
            offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            done = real(descriptor, data)
            whole = b"".join(map(bytes, data)) if real is real_writev else bytes(data)
            events.append(("wrote", paths[descriptor], (offset, whole[:done])))
            return done

        return write

    real_writev = os.writev

    def rename(source: Any, target: Any) -> None:
        real_rename(source, target)
        events.append(("renamed", os.fspath(source), os.fspath(target)))

    def rename_exclusive(source: str, target: str) -> int:
        code = real_exclusive(source, target)
        if not code:
            events.append(("renamed", source, target))
        return code

    wrapped = {"open": open_, "close": close, "pwrite": pwrite, "rename": rename}
    wrapped |= {"write": at_its_position(os.write), "writev": at_its_position(os.writev)}
    with pytest.MonkeyPatch.context() as patch:
        for name, function in wrapped.items():
            patch.setattr(os, name, function)
        patch.setattr(files, "_rename_exclusive", rename_exclusive)  # a call of the C library's
        yield events


class Job(NamedTuple):
    """Sources, how they are opened, how they are stored, and what must come of it."""

    items: dict[str, Array]  # by their files' names
    opening: dict[str, Any]
    storing: dict[str, Any]
    out: str
    expected: Array


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    dtype = draw(st.sampled_from(["uint8", "int32", "float64"]))
    axes = draw(st.sampled_from([(), ("i",), ("i", "j"), ("j", "i", "k")]))
    opening: dict[str, Any] = {}
    if axes:
        grid = tuple(draw(st.integers(1, 4)) for _ in axes)
        expected = any_values((*grid, *shape), dtype)
        places = draw(st.permutations(list(np.ndindex(*grid))))
        items = {"_".join(f"{a}{n}" for a, n in zip(axes, at, strict=True)): expected[at] for at in places}
        opening = {"axes": axes, "labels": "_".join(rf"{a}(?P<{a}>\d+)" for a in axes)}
    elif draw(st.booleans()):
        rows = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
        expected = any_values((sum(rows), *shape), dtype)
        items = {f"{k}": part for k, part in enumerate(np.split(expected, np.cumsum(rows)[:-1]))}
        opening = {"join": "concat"}
    else:
        expected = any_values((draw(st.integers(1, 12)), *shape), dtype)
        items = {f"{k}": item for k, item in enumerate(expected)}
    if draw(st.booleans()):
        opening["files_per_block"] = draw(run_of(expected.shape[: len(axes)] or (len(items),)))
    out, storing = draw(tilings(expected.shape))
    storing["threads"] = draw(st.sampled_from([None, 1, 3]))
    storing["scheduler"] = draw(st.sampled_from(["synchronous", "threads"]))
    return Job(items, opening, storing, out, expected)


def any_values(shape: tuple[int, ...], dtype: str) -> Array:
    """Nowhere two times the same value, as far as the dtype has as many."""
    return (np.arange(1, math.prod(shape) + 1).reshape(shape) * 7).astype(dtype)


@st.composite
def run_of(draw: st.DrawFn, grid: tuple[int, ...]) -> int:
    """How many positions a rectangle of the grid has that is one run of them."""
    level = draw(st.integers(0, len(grid) - 1))
    return draw(st.integers(1, grid[level])) * math.prod(grid[level + 1 :])


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """An output and what can be asked of its format."""
    version = draw(st.sampled_from([3, 2, None]))
    if version is None:
        return "out.npy", {}
    options: dict[str, Any] = {"zarr_format": version}
    options["compression"] = draw(st.sampled_from([None, "none", "zstd", "gzip:1", "blosc:lz4"]))
    given_too = draw(st.sampled_from(["shards", "chunks", "nothing"]))
    if given_too != "nothing":
        options["chunks"] = draw(st.tuples(*(st.integers(1, n + 1) | st.just(-1) for n in shape)))
    if given_too == "shards" and version == 3:
        fitted = blocks.fit_chunks(shape, options["chunks"])
        options["shards"] = tuple(c * draw(st.integers(1, 3)) for c in fitted)
    return "out.zarr", options


@settings(max_examples=80, deadline=None)
@given(job=jobs(), share=st.none() | st.floats(0.2, 3))
def test_any_job_against_numpy_with_every_byte_written_once(
    tmp_path_factory: pytest.TempPathFactory, job: Job, share: float | None
) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "in").mkdir()
    (folder / "made").mkdir()
    for name, item in job.items.items():
        np.save(folder / "in" / f"{name}.npy", item)
    out = folder / "made" / job.out
    stack = open_stack(folder / "in", **job.opening)
    options = dict(job.storing)
    if share is not None:
        plan = stack.plan(out, **options)
        options["memory_limit"] = max(1, int(share * plan.memory / plan.threads))
    with logged() as events:
        try:
            plan = stack.plan(out, **options)
        except UsageError as exc:  # one block needs more, and cannot be made smaller
            refusal = str(exc)
        else:
            refusal = ""
            stack.carry_out(plan, progress=False)
    if refusal:
        message = rf"memory_limit={options['memory_limit']}: one block takes .*\nnext  give at least \d.*"
        assert re.fullmatch(message, refusal)
        assert events == []
        assert os.listdir(folder / "made") == []
        return
    assert plan.memory <= options.get("memory_limit", plan.memory)
    written = replay(events)
    assert_written_once(written, out)
    assert {p: written[str(p)].data == p.read_bytes() for p in published(out)} == dict.fromkeys(published(out), True)
    found = np.load(out) if out.suffix == ".npy" else zarr.open_group(str(out), mode="r")["data"][:]  # type: ignore[index]
    assert exactly(found, job.expected)
    assert ".part" not in {path.suffix for path in out.parent.iterdir()}


# -- the same as the kernel sees it -----------------------------------------------------------------------------

CALLS = "openat,write,writev,pwrite64,lseek,rename,renameat,renameat2"
# None of these may touch an output: what they write would not be counted.
UNCOUNTED = "pwritev,pwritev2,copy_file_range,sendfile,splice,link,linkat,mmap,io_uring_setup"
STRACE = ["strace", "-ff", "-ttt", "-y", "-s0", "--seccomp-bpf", "-e", f"trace={CALLS},{UNCOUNTED}"]


def need_strace(folder: Path) -> None:
    """Skip where system calls cannot be traced, and say why."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trial = [*STRACE, "-o", str(folder / "trial"), sys.executable, "-c", ""]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()}")


def traced(folder: Path, out: str) -> list[Event]:
    """What the calls did to files below the output's folder; one file of calls a thread, each line with its time."""
    lines = [line.split(" ", 1) for path in folder.iterdir() for line in path.read_text().splitlines()]
    events: list[Event] = []
    position: dict[str, int] = {}
    for _, call in sorted(lines, key=lambda line: float(line[0])):
        if os.path.dirname(out) not in call or not re.search(r" = \d+", call):
            continue
        name = call.split("(", 1)[0]
        result = int(re.findall(r" = (\d+)", call)[-1])
        on = re.match(r"\w+\(\d+<([^>]*)>", call)
        if name == "openat":
            path, flags = re.findall(r'"([^"]*)", (\S+?)[,)]', call)[0]
            position[path] = 0
            if "O_CREAT" in flags:
                assert "O_EXCL" in flags or path.endswith("/lock"), call
                events.append(("made", path, None))
        elif name.startswith("rename"):
            source, target = re.findall(r'"([^"]*)"', call)
            events.append(("renamed", source, target))
        elif name == "lseek" and on:
            position[on[1]] = result
        elif name == "pwrite64" and on:
            offset = int(call.rsplit(") = ", 1)[0].rsplit(", ", 1)[1])
            events.append(("wrote", on[1], (offset, bytes(result))))
        elif name in ("write", "writev") and on:
            events.append(("wrote", on[1], (position[on[1]], bytes(result))))
            position[on[1]] += result
        else:
            assert name == "mmap" and not re.search(r"PROT_WRITE.*MAP_SHARED", call), call  # noqa: PT018
    return events
