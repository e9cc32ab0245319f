"""Labels as axes: each file in its place, whatever the order of the names; a gap or a double is an error."""

from __future__ import annotations

import csv
import itertools
import os
import random
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from conftest import Array, Run, published, same
from hypothesis import given, settings
from hypothesis import strategies as st

import daskstack
from daskstack import build, open_stack
from daskstack.errors import LabelError, OutputExistsError, UsageError
from daskstack.sorting import grid_order
from daskstack.targets import crc32c

LABELS = r"t(?P<t>\d+)_(?P<c>[a-z]+\d*)"
TIMES = [1, 2, 10]
CHANNELS = ["ch2", "ch10"]
WHOLE = np.array([[100 * t + len(c) for c in CHANNELS] for t in TIMES], "uint16")[..., None, None] + np.arange(
    35, dtype="uint16"
).reshape(5, 7)


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six files in a folder ``in`` of the current one: three times, two channels, their names not in order."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for (i, t), (k, c) in itertools.product(enumerate(TIMES), enumerate(CHANNELS)):
        np.save(tmp_path / "in" / f"t{t}_{c}.npy", WHOLE[i, k])
    return tmp_path


def opened(**options: Any) -> daskstack.Stack:
    return open_stack("in", labels=LABELS, axes=("t", "c"), **options)


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def read_zarr(out: str) -> Array:
    return np.asarray(zarr.open_group(out, mode="r")["data"][:])  # type: ignore[index]


# -- what a grid is ---------------------------------------------------------------------------------------------


def test_a_stack_of_times_and_channels(grid: Path) -> None:
    stack = opened()
    assert (stack.shape, stack.dims, len(stack), stack.items) == ((3, 2, 5, 7), ("t", "c", "y", "x"), 3, 6)
    assert same(stack.array, WHOLE)
    assert stack.names == tuple(f"t{t}_{c}.npy" for t in TIMES for c in CHANNELS)
    assert stack.labels["t"].tolist() == TIMES
    assert stack.labels["c"].tolist() == CHANNELS
    assert repr(stack).splitlines()[0] == "<daskstack.Stack (3, 2, 5, 7) uint16>"
    assert "order   by t, c: t1_ch2.npy, t1_ch10.npy, t2_ch2.npy ... t10_ch10.npy" in repr(stack)


def test_the_order_of_the_axes_is_the_one_given(grid: Path) -> None:
    stack = open_stack("in", labels=LABELS, axes=["c", "t"])
    assert stack.dims == ("c", "t", "y", "x")
    assert same(stack.array, WHOLE.swapaxes(0, 1))


def test_files_in_any_order_make_the_same_grid(grid: Path) -> None:
    paths = [str(p) for p in (grid / "in").iterdir()]
    rng = random.Random(0)
    for _ in range(5):
        rng.shuffle(paths)
        stack = open_stack(paths, labels=LABELS, axes=("t", "c"))
        assert same(stack.array, WHOLE)
        assert stack.content_id == opened().content_id


@pytest.mark.parametrize(
    ("labels", "axes", "shape", "expected"),
    [
        (r"t(?P<t>\d+)", "t", (3,), {"t": [1, 2, 10]}),
        (lambda p: {"z": float(p[1:].split("_")[0]) / -4}, ("z",), (3,), {"z": [-2.5, -0.5, -0.25]}),
        (lambda p: {"late": p.startswith("t10"), "odd": "t1_" in p}, ("late", "odd"), None, {}),
    ],
    ids=["one", "floats", "bools"],
)
def test_one_axis_and_other_kinds_of_labels(
    grid: Path, labels: Any, axes: Any, shape: tuple[int, ...] | None, expected: dict[str, list[Any]]
) -> None:
    if shape is None:
        with pytest.raises(
            LabelError, match=r"^1 position of 4 of the grid \(late, odd\) has no file: late=True odd=True"
        ):
            open_stack("in/*ch2.npy", labels=labels, axes=axes)
        return
    stack = open_stack("in/*ch2.npy", labels=labels, axes=axes)
    assert stack.grid == shape
    assert {name: values.tolist() for name, values in stack.labels.items()} == expected
    assert same(stack.array, WHOLE[:, 0] if "t" in expected else WHOLE[::-1, 0])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_grid_against_numpy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("grid")
    (folder / "in").mkdir()
    values = [
        sorted(data.draw(st.sets(st.integers(0, 120), min_size=1, max_size=4)))
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    sizes = tuple(map(len, values))
    item = data.draw(st.sampled_from([(), (3,), (2, 3), (5, 4)]))
    whole = np.arange(np.prod((*sizes, *item)), dtype="int32").reshape(*sizes, *item)
    for at in np.ndindex(*sizes):
        name = "_".join(f"{axis}{v[k]}" for axis, v, k in zip("abc", values, at, strict=False))
        np.save(folder / "in" / f"{name}.npy", whole[at])
    axes = list("abc"[: len(sizes)])
    place = data.draw(st.permutations(range(len(sizes))))
    labels = "_".join(rf"{axis}(?P<{axis}>\d+)" for axis in axes)
    order = [axes[k] for k in place]
    due = np.moveaxis(whole, place, range(len(place)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", daskstack.errors.StackWarning)  # of gaps in the numbers drawn
        stack = open_stack(folder / "in", labels=labels, axes=order)
    assert same(stack.array.compute(scheduler="synchronous"), due)
    out = data.draw(st.sampled_from(["out.npy", "out.zarr"]))
    options: dict[str, Any] = {}
    if out == "out.zarr":
        options["zarr_format"] = data.draw(st.sampled_from([2, 3]))
        if data.draw(st.booleans()):
            chunks = tuple(data.draw(st.integers(1, n)) for n in due.shape)
            options["chunks"] = chunks
            if options["zarr_format"] == 3 and data.draw(st.booleans()):
                options["shards"] = tuple(c * data.draw(st.integers(1, 3)) for c in chunks)
    store = stack.to_npy if out == "out.npy" else stack.to_zarr
    store(folder / out, scheduler="synchronous", progress=False, **options)
    found = daskstack.open(folder / out)
    assert same(np.load(folder / out) if out == "out.npy" else read_zarr(str(folder / out)), due)
    assert same(found.array.compute(scheduler="synchronous"), due)
    assert found.dims[: len(order)] == tuple(order)
    assert {name: v.tolist() for name, v in found.labels.items()} == dict(zip(axes, values, strict=True))
    assert found.files == stack.files


def test_the_pages_of_a_file_are_an_axis_of_its_own(grid: Path) -> None:
    import tifffile

    (grid / "tiff").mkdir()
    for t, c in itertools.product((0, 1), "ab"):
        pages = np.full((3, 5, 7), 10 * t + ord(c), "uint8")
        tifffile.imwrite(grid / "tiff" / f"t{t}_{c}.tif", pages, photometric="minisblack")
    stack = open_stack("tiff", labels=LABELS, axes=("t", "c"))
    assert stack.shape == (2, 2, 3, 5, 7)
    assert stack.array[:, :, 2, 4, 6].compute().tolist() == [[97, 98], [107, 108]]


# -- parts of a grid --------------------------------------------------------------------------------------------


def test_one_entry_and_one_item_are_read_by_numbers(grid: Path) -> None:
    stack = opened()
    assert same(stack[2], WHOLE[2])
    assert same(stack[-1, -2], WHOLE[-1, -2])
    for key, message in (
        (3, "item 3 of a stack of 3"),
        ((0, 2), "item 2 of a stack of 2"),
        ((0, 0, 0), "a stack is indexed along t, c alone; slice .array for the rest"),
        ((slice(1), 0), "a stack is sliced along t alone; slice .array for the rest"),
    ):
        with pytest.raises(IndexError) as caught:
            stack[key]
        assert str(caught.value) == message


@pytest.mark.parametrize("key", [slice(1, 3), slice(None, None, -2), [2, 0], [True, False, True], [1]], ids=str)
def test_a_part_is_a_grid_again(grid: Path, key: Any) -> None:
    stack = opened()
    part = stack[key]
    assert part.dims == stack.dims
    assert same(part.array, WHOLE[key])
    assert part.labels["t"].tolist() == np.array(TIMES)[key].tolist()
    assert part.labels["c"].tolist() == CHANNELS
    build_of_part = part.to_npy("part.npy", progress=False)
    assert build_of_part.shape == WHOLE[key].shape
    assert same(np.load("part.npy"), WHOLE[key])
    assert np.load("part.t.npy").tolist() == np.array(TIMES)[key].tolist()


def test_a_mask_from_an_axis_s_label_chooses_entries(grid: Path) -> None:
    stack = opened()
    part = stack[stack.labels["t"] > 1]
    assert part.labels["t"].tolist() == [2, 10]
    assert same(part.array, WHOLE[1:])


def test_chunks_of_the_array_are_runs_of_the_grid(grid: Path) -> None:
    assert opened(files_per_block=1).array.chunks == ((1, 1, 1), (1, 1), (5,), (7,))
    assert opened(files_per_block=2).array.chunks == ((1, 1, 1), (2,), (5,), (7,))
    assert opened(files_per_block=4).array.chunks == ((2, 1), (2,), (5,), (7,))
    assert opened(files_per_block=99).array.chunks == ((3,), (2,), (5,), (7,))
    for n in (1, 2, 4, 6, 99):
        assert same(opened(files_per_block=n).array, WHOLE)
        report = opened(files_per_block=n).to_npy(f"{n}.npy", progress=False)
        assert report.files == 6
        assert same(np.load(f"{n}.npy"), WHOLE)


def test_a_limit_takes_whole_entries_of_the_first_axis(grid: Path) -> None:
    for limit, entries in ((1, 1), (2, 1), (3, 1), (4, 2), (99, 3)):
        build("in", "out.npy", labels=LABELS, axes=("t", "c"), limit=limit, overwrite=True, progress=False)
        assert same(np.load("out.npy"), WHOLE[:entries])


@pytest.mark.parametrize(("out", "options"), [("out.npy", {}), ("out.zarr", {"chunks": (1, 1, 5, 7)})])
def test_a_memory_limit_makes_smaller_blocks(grid: Path, out: str, options: dict[str, Any]) -> None:
    stack = opened()
    with pytest.raises(UsageError, match=r"^memory_limit=100: one block takes "):
        stack.plan(out, memory_limit=100, **options)
    plan = stack.plan(out, memory_limit=300, **options)
    assert plan.memory <= 300
    assert plan.blocks == 6
    stack.carry_out(plan, progress=False)
    assert same(np.load(out) if out == "out.npy" else read_zarr(out), WHOLE)


# -- on disk ----------------------------------------------------------------------------------------------------

KIND = r"t(?P<t>\d+)_(?P<c>(?P<kind>[a-z])[a-z]+\d*)"


def test_npy_labels_and_index(grid: Path) -> None:
    build("in", "out.npy", labels=KIND, axes=("t", "c"), progress=False)
    np.save("plain.npy", WHOLE)
    assert Path("out.npy").read_bytes() == Path("plain.npy").read_bytes()
    assert np.load("out.t.npy").tolist() == TIMES
    assert np.load("out.c.npy").tolist() == CHANNELS
    assert np.load("out.kind.npy").tolist() == [["c", "c"]] * 3
    found = rows("out.npy.index.csv")
    assert list(found[0]) == ["item", "file", "t", "c", "kind", "size", "mtime", "checksum"]
    assert [(r["item"], r["file"], r["t"], r["c"], r["checksum"]) for r in found] == [
        (str(2 * i + k), f"t{t}_{c}.npy", str(t), c, f"{crc32c(WHOLE[i, k].copy()):08x}")
        for i, t in enumerate(TIMES)
        for k, c in enumerate(CHANNELS)
    ]


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_coordinates_lie_along_their_axes(grid: Path, version: int) -> None:
    build("in", "out.zarr", labels=KIND, axes=("t", "c"), zarr_format=version, progress=False)
    assert same(read_zarr("out.zarr"), WHOLE)
    data = xarray.open_zarr("out.zarr")
    assert data["data"].dims == ("t", "c", "y", "x")
    dims = {name: data[name].dims for name in data.coords}
    assert dims == {
        "t": ("t",), "c": ("c",), "kind": ("t", "c"), "file": ("t", "c"), "size": ("t", "c"), "mtime": ("t", "c"),
        "checksum": ("t", "c"),
    }  # fmt: skip
    assert data["t"].values.tolist() == TIMES
    assert data["c"].values.tolist() == CHANNELS
    assert data["file"].values.tolist() == [[f"t{t}_{c}.npy" for c in CHANNELS] for t in TIMES]
    assert data["checksum"].values.tolist() == [[crc32c(item.copy()) for item in entry] for entry in WHOLE]
    assert same(data["data"].sel(t=10, c="ch2").values, WHOLE[2, 0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (2, 1, 5, 7)},
        {"chunks": (1, 2, 2, 3)},
        {"chunks": (2, 1, 3, 3), "shards": (2, 2, 6, 9)},
        {"chunks": (-1, -1, -1, -1)},
        {"chunks": (1, 1, -1, -1), "shards": (3, 1, -1, -1)},
        {"chunks": (2, 1, 5, 7), "zarr_format": 2},
        {"chunks": (2, 2, 2, 2), "zarr_format": 2},
    ],
    ids=str,
)
def test_zarr_chunks_and_shards_as_asked_for(grid: Path, options: dict[str, Any]) -> None:
    build("in", "out.zarr", labels=LABELS, axes=("t", "c"), progress=False, **options)
    array: Any = zarr.open_group("out.zarr", mode="r")["data"]
    assert same(array[:], WHOLE)
    asked = options.get("chunks", (3, 2, 5, 7))
    assert array.chunks == tuple(n if c == -1 else c for c, n in zip(asked, WHOLE.shape, strict=True))
    if "shards" in options:
        assert array.shards == tuple(n if s == -1 else s for s, n in zip(options["shards"], WHOLE.shape, strict=True))


@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
def test_the_same_build_again_does_nothing_and_another_one_is_refused(grid: Path, out: str) -> None:
    def again(axes: Any = ("t", "c"), **options: Any) -> daskstack.api.StoreReport:  # type: ignore[name-defined]
        return build("in", out, labels=LABELS, axes=axes, progress=False, **options)

    assert again().files == 6
    assert again().was_there
    assert again(axes=["t", "c"]).was_there
    for other in (("c", "t"), None):
        with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
            again(axes=other)
    os.utime("in/t2_ch10.npy", ns=(1, 1))
    with pytest.raises(OutputExistsError, match=rf"^{out} exists and was made before 1 file changed: in/t2_ch10\.npy"):
        again()
    assert again(overwrite=True).files == 6
    found = daskstack.open(out)
    assert (found.shape, found.dims, len(found)) == ((3, 2, 5, 7), ("t", "c", "y", "x"), 3)
    assert found.labels["t"].tolist() == TIMES
    assert same(found.array[1:, ::-1, 2], WHOLE[1:, ::-1, 2])
    assert found.files == tuple(str(grid / "in" / f"t{t}_{c}.npy") for t in TIMES for c in CHANNELS)
    assert found.record["axes"] == ["t", "c"]


def test_a_bad_file_of_a_grid_is_named(grid: Path) -> None:
    np.save("in/t2_ch2.npy", np.zeros((5, 6), "uint16"))
    with pytest.raises(daskstack.errors.BadFilesError) as caught:
        build("in", "out.npy", labels=LABELS, axes=("t", "c"), progress=False)
    assert [f.path for f in caught.value.files] == [str(grid / "in" / "t2_ch2.npy")]
    assert published(grid) == ["in"]


# -- gaps and doubles -------------------------------------------------------------------------------------------

GAP = "next  add what is missing, or leave out its time, channel or the like by a pattern"
DOUBLE = "next  name an axis that tells them apart, or leave out what is not meant"


def failure(call: Callable[[], Any]) -> str:
    with pytest.raises(LabelError) as caught:
        call()
    return str(caught.value)


def test_missing_positions_are_named(grid: Path) -> None:
    (grid / "in" / "t2_ch10.npy").unlink()
    assert failure(opened) == f"1 position of 6 of the grid (t, c) has no file: t=2 c=ch10\n{GAP}"
    (grid / "in" / "t10_ch10.npy").unlink()
    assert failure(opened) == f"2 positions of 6 of the grid (t, c) have no file: t=2 c=ch10, t=10 c=ch10\n{GAP}"


def test_doubled_positions_are_named_with_their_files(grid: Path) -> None:
    np.save("in/t1_ch2_again.npy", WHOLE[0, 0])
    assert failure(opened) == (
        f"1 position of the grid has two files: t=1 c=ch2: t1_ch2.npy, t1_ch2_again.npy\n{DOUBLE}"
    )
    np.save("in/t01_ch2.npy", WHOLE[0, 0])  # the same number
    message = "1 position of the grid has several files: t=1 c=ch2: t01_ch2.npy, t1_ch2.npy, t1_ch2_again.npy\n"
    assert failure(opened) == message + DOUBLE
    assert failure(lambda: open_stack("in/t*_ch*0.npy", labels=LABELS, axes="c")) == (
        f"1 position of the grid has several files: c=ch10: t1_ch10.npy, t2_ch10.npy, t10_ch10.npy\n{DOUBLE}"
    )
    assert failure(lambda: open_stack(["in/t2_ch2.npy"] * 2, labels=LABELS, axes="t")) == (
        f"1 position of the grid has two files: t=2: t2_ch2.npy, t2_ch2.npy\n{DOUBLE}"
    )


def test_many_missing_positions_are_counted_and_the_first_named() -> None:
    times, channels = np.arange(1000), np.arange(1000)
    labels = {"t": times, "c": channels}
    assert failure(lambda: grid_order(labels, ["t", "c"], [f"{k}" for k in range(1000)])) == (
        f"999,000 positions of 1,000,000 of the grid (t, c) have no file: t=0 c=1, t=0 c=2, t=0 c=3 ...\n{GAP}"
    )


@pytest.mark.parametrize("axes", [3, 4, 7])
def test_a_huge_sparse_grid_takes_neither_memory_nor_time_nor_does_its_size_overflow(axes: int) -> None:
    names = "abcdefg"[:axes]
    labels = {name: np.arange(70_000) for name in names}
    files = [f"{k}" for k in range(70_000)]
    tracemalloc.start()
    begin = time.monotonic()
    message = failure(lambda: grid_order(labels, list(names), files))
    assert time.monotonic() - begin < 30
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    total = 70_000**axes
    zeros = " ".join(f"{name}=0" for name in names[:-1])
    assert message == (
        f"{total - 70_000:,} positions of {total:,} of the grid ({', '.join(names)}) have no file: "
        f"{zeros} {names[-1]}=1, {zeros} {names[-1]}=2, {zeros} {names[-1]}=3 ...\n{GAP}"
    )
    twice = {name: np.append(values, 5) for name, values in labels.items()}
    fives = " ".join(f"{name}=5" for name in names)
    assert failure(lambda: grid_order(twice, list(names), [*files, "again"])) == (
        f"1 position of the grid has two files: {fives}: 5, again\n{DOUBLE}"
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*(st.integers(0, 3) for _ in range(3))), min_size=1, max_size=40))
def test_gaps_and_doubles_against_brute_force(places: list[tuple[int, int, int]]) -> None:
    labels = {name: np.array([p[k] for p in places]) for k, name in enumerate("abc")}
    names = [str(k) for k in range(len(places))]
    values = [sorted(set(labels[name].tolist())) for name in "abc"]
    every = list(itertools.product(*values))
    missing = [p for p in every if p not in places]

    def text(p: tuple[int, ...]) -> str:
        return " ".join(f"{name}={v}" for name, v in zip("abc", p, strict=True))

    doubled = [p for p in every if places.count(p) > 1]
    if doubled:
        of_first = ", ".join(str(k) for k, p in enumerate(places) if p == doubled[0])
        message = failure(lambda: grid_order(labels, list("abc"), names))
        noun = "position of the grid has" if len(doubled) == 1 else "positions of the grid have"
        assert message.startswith(f"{len(doubled)} {noun} ")
        if places.count(doubled[0]) < 5:
            assert f" files: {text(doubled[0])}: {of_first}" in message
    elif missing:
        message = failure(lambda: grid_order(labels, list("abc"), names))
        assert f": {', '.join(map(text, missing[:3]))}{' ...' if len(missing) > 3 else ''}\n" in message
    else:
        order, shape = grid_order(labels, list("abc"), names)
        assert [places[k] for k in order] == every
        assert shape == tuple(map(len, values))


# -- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axes": ("t", "z")}, "axes=t,z: there is no label 'z'\nnext  choose from: t, c"),
        ({"axes": "t,c"}, "axes=t,c: there is no label 't,c'\nnext  choose from: t, c"),
        (
            {"axes": ("t", "c"), "labels": None},
            "axes=t,c: there is no label 't'\nnext  choose from: none (give labels)",
        ),
        ({"axes": ("t", "t")}, "axes='t,t'\nnext  name each axis once"),
        ({"axes": ()}, "axes=''\nnext  name each axis once"),
        (
            {"axes": ("t", "c"), "join": "concat"},
            "axes with join='concat'\nnext  leave join out: the pages of a file become an axis of its own",
        ),
        (
            {"axes": ("t", "c"), "sort_by": "t"},
            "axes and sort_by are both given\nnext  leave sort_by out: axes are sorted",
        ),
        (
            {"axes": ("y", "c"), "labels": r"t(?P<y>\d+)_(?P<c>\w+)"},
            "axis 'y' has the name of an axis of each file (y, x)\nnext  choose another name",
        ),
        (
            {"axes": ("t", "c"), "files_per_block": 3},
            "files_per_block=3 gives no rectangles of the grid (3, 2)\nnext  the next below: 2",
        ),
        (
            {"axes": ("t", "c"), "files_per_block": 5},
            "files_per_block=5 gives no rectangles of the grid (3, 2)\nnext  the next below: 4",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(grid: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build("in", "out.npy", progress=False, **{"labels": LABELS, **options})
    assert str(caught.value) == message
    assert os.listdir(grid) == ["in"]


def test_a_label_that_is_an_axis_of_the_files_alone_is_refused_by_zarr_alone(grid: Path) -> None:
    labels = {"t": r"t(\d+)", "c": r"_(\w+)", "x": "ch10"}
    assert build("in", "out.npy", labels=labels, axes=("t", "c"), progress=False).shape == WHOLE.shape
    with pytest.raises(UsageError, match=r"^label x has the name of an axis\n"):
        build("in", "out.zarr", labels=labels, axes=("t", "c"), progress=False)


def test_the_plan_says_what_the_grid_is(grid: Path) -> None:
    lines = str(opened(files_per_block=4).plan("out.npy", threads=2)).splitlines()
    assert lines[:5] == [
        "files   6 in in (1.2 kB)",
        "order   by t, c: t1_ch2.npy, t1_ch10.npy, t2_ch2.npy ... t10_ch10.npy",
        "array   (t 3, c 2, y 5, x 7) uint16, 420 B; item from t1_ch2.npy",
        "labels  t (1 to 10); c (ch2, ch10)",
        "work    2 blocks of up to 4 files, 2 threads, at most 840 B memory",
    ]
    assert lines[5].startswith("disk    420 B in 5 files; free ")


def test_on_the_command_line(grid: Path, daskstack: Run) -> None:
    arguments = ("build", "in", "out.npy", "--labels", LABELS, "--axes", "t,c")
    done = daskstack(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "      out.npy.index.csv (row to file)",
        "      out.npy.json (how it was made)",
        "      out.t.npy (label)",
        "      out.c.npy (label)",
        'read  np.load("out.npy", mmap_mode="r")',
    ]
    assert same(np.load("out.npy"), WHOLE)
    again = daskstack(*arguments)
    assert again.returncode == 0
    assert again.stdout.splitlines()[0] == (
        "done  out.npy (3, 2, 5, 7) uint16, 420 B: it was there already, made from these files"
    )
    shown = daskstack("info", "out.npy").stdout.splitlines()
    assert shown[0] == "array   (t 3, c 2, y 5, x 7) uint16, 420 B in out.npy"
    assert "labels  t, c" in shown
    assert daskstack("plan", "in", "out.zarr", *arguments[3:]).returncode == 0


@pytest.mark.parametrize(
    ("axes", "status", "message"),
    [
        (
            "t",
            1,
            "3 positions of the grid have two files: t=1: t1_ch2.npy, t1_ch10.npy, t=2: t2_ch2.npy, "
            "t2_ch10.npy, t=10: t10_ch2.npy, t10_ch10.npy\n" + DOUBLE,
        ),
        ("t,k", 2, "axes=t,k: there is no label 'k'\nnext  choose from: t, c"),
    ],
)
def test_errors_on_the_command_line(grid: Path, daskstack: Run, axes: str, status: int, message: str) -> None:
    done = daskstack("build", "in", "out.npy", "--labels", LABELS, "--axes", axes)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"error: {message}\n")
    (grid / "in" / "t2_ch10.npy").unlink()
    done = daskstack("plan", "in", "out.npy", "--labels", LABELS, "--axes", "t,c")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: 1 position of 6 of the grid (t, c) has no file: t=2 c=ch10\n{GAP}\n"
    assert os.listdir(grid) == ["in"]
