"""Any Dask array stored: whatever its chunks, as it promised to be, or not at all."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import tifffile
import zarr
from conftest import Array, image, same
from dask.delayed import delayed
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import daskstack
from daskstack import build, open_stack, store
from daskstack.api.storing import planned
from daskstack.derived import checked
from daskstack.errors import (
    BadFilesError,
    DaskstackError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from daskstack.tasks import Place


def stored(out: str | Path) -> Array:
    if str(out).endswith(".npy"):
        return np.asarray(np.load(out))
    return np.asarray(zarr.open_group(str(out), mode="r")["data"][:])  # type: ignore[index]


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- any chunks -------------------------------------------------------------------------------------------------


def chunks_of(n: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Any way to cut an axis, empty chunks included, as filters leave them."""
    return st.lists(st.integers(0, n), max_size=4).map(
        lambda cuts: tuple(int(c) for c in np.diff([0, *sorted(cuts), n]))
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_shape_and_chunks_against_numpy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)) + data.draw(
        st.sampled_from([[], [0], [1], [3]])
    )
    chunks = tuple(data.draw(chunks_of(n)) for n in shape)
    dtype = data.draw(st.sampled_from(["<i4", ">i4", "bool", ">f8", "complex64", "datetime64[s]", "S3"]))
    whole = (np.arange(np.prod(shape), dtype="int64").reshape(shape) % 99).astype(dtype)
    options: dict[str, Any] = {"zarr_format": data.draw(st.sampled_from([2, 3]))}
    if data.draw(st.booleans()):
        options["chunks"] = [data.draw(st.integers(1, n + 1)) for n in shape]
    name, more = data.draw(st.sampled_from([("out.npy", {}), ("out.zarr", options)]))
    scheduler = data.draw(st.sampled_from(["synchronous", "threads"]))
    report = store(
        da.from_array(whole, chunks=chunks), folder / name, scheduler=scheduler, progress=False, **more
    )  # fmt: skip
    native = whole.astype(whole.dtype.newbyteorder("="))
    assert (report.shape, report.dtype) == (native.shape, native.dtype)
    out = daskstack.open(folder / name)
    with dask.config.set(scheduler="synchronous"):
        assert same(out.array, native)
    assert sorted(os.listdir(folder)) == (
        ["out.zarr"] if name == "out.zarr" else ["out.npy", "out.npy.index.csv", "out.npy.json"]
    )
    if name == "out.npy":
        np.save(folder / "plain.npy", native)
        assert (folder / name).read_bytes() == (folder / "plain.npy").read_bytes()


def test_the_same_from_processes(here: Path, pool: None) -> None:
    whole = image(0, (9, 8), "float32")
    store(da.from_array(whole, chunks=(2, 3)), "out.zarr", scheduler="processes", threads=2, progress=False)
    assert same(stored("out.zarr"), whole)


def test_an_array_larger_than_a_block_is_stored_in_small_slabs(here: Path) -> None:
    array = da.arange(1 << 23, chunks=1 << 23, dtype="f8").reshape(64, 1 << 17)
    work = checked(array, None, None)
    bounds = work.cut(None)
    assert bounds.tolist() == list(range(65))
    limited = checked(array.rechunk((16, -1)), None, None)
    assert limited.cut(None).tolist() == [0, 16, 32, 48, 64]
    assert limited.cut(2).tolist() == list(range(65))
    with pytest.raises(UsageError, match=r"memory_limit=1000000: one block takes 1\.0 MB"):
        store(array, "out.npy", memory_limit=1_000_000)
    assert os.listdir(here) == []


def test_chunks_that_a_filter_left_empty(here: Path) -> None:
    array = da.arange(9, chunks=3)
    left = array[(array < 2) | (array > 6)]
    left.compute_chunk_sizes()
    assert left.chunks == ((2, 0, 2),)
    for out in ("out.npy", "out.zarr"):
        store(left, out, progress=False)
        assert stored(out).tolist() == [0, 1, 7, 8]


# -- tasks ------------------------------------------------------------------------------------------------------


def graph_of(array: da.Array, folder: Path) -> tuple[dict[Any, Any], list[Any]]:
    work = checked(array, None, None)
    plan = planned(work, folder / "out.npy")
    return work.tasks(plan.bounds, range(plan.blocks), Place(plan.target, str(folder), plan.plan_id))


@pytest.mark.parametrize("chunks", [(2, -1, -1), ((1, 5, 6), -1, -1), (12, -1, -1)])
def test_aligned_arrays_get_one_task_a_block(here: Path, chunks: Any) -> None:
    array = da.ones((12, 5, 7), chunks=chunks) + 1
    graph, keys = graph_of(array, here)
    assert len(graph) == len(keys) == array.numblocks[0]
    assert set(graph) == set(keys)


def test_of_a_stack_s_array_each_block_is_one_read_and_one_store(frames: Path) -> None:
    stack = open_stack("frames", files_per_block=3)
    graph, keys = graph_of(stack.array * 2, frames.parent)
    assert len(keys) == 4
    assert len(graph) == 8


@pytest.fixture
def grid(here: Path) -> Array:
    """A folder ``in`` of 6 times and 3 channels; what it becomes."""
    whole = np.stack([np.stack([image(10 * t + c) for c in range(3)]) for t in range(6)])
    (here / "in").mkdir()
    for t, c in np.ndindex(6, 3):
        np.save(here / "in" / f"{t}{c}.npy", whole[t, c])
    return whole


def opened_grid(files_per_block: int) -> daskstack.Stack:
    labels = r"(?P<t>\d)(?P<c>\d)"
    return open_stack("in", labels=labels, axes=("t", "c"), files_per_block=files_per_block)


@pytest.mark.parametrize("files_per_block", [1, 3, 6, 9, 12, 18])
def test_of_a_grid_s_array_each_block_is_one_read_and_one_store(here: Path, grid: Array, files_per_block: int) -> None:
    stack = opened_grid(files_per_block)
    work = checked(stack.array + 1, stack, None)
    plan = planned(work, here / "out.npy")
    graph, keys = work.tasks(plan.bounds, range(plan.blocks), Place(plan.target, str(here), plan.plan_id))
    assert len(keys) == -(-18 // files_per_block)
    assert len(graph) == 2 * len(keys)
    store(stack.array + 1, "out.npy", like=stack, progress=False)
    assert same(stored("out.npy"), grid + np.uint16(1))


def test_chunks_of_a_grid_that_are_no_runs_of_items_are_cut_anew(grid: Array) -> None:
    stack = opened_grid(1)
    for chunks in ((2, 2), (6, 1), ((1, 2, 3), 3), ((2, 4), (1, 2))):
        array = stack.array.rechunk((*chunks, -1, -1))
        store(array, "out.npy", like=stack, overwrite=True, progress=False)
        assert same(stored("out.npy"), grid)


def test_blocks_of_other_chunks_are_each_computed_once(here: Path) -> None:
    def read(k: int) -> Array:
        with open("reads.txt", "a") as f:
            f.write(f"{k}\n")
        return np.full((4, 6), k, "uint8")

    parts = [da.from_delayed(delayed(read)(k), (4, 6), "uint8") for k in range(5)]
    array = da.concatenate(parts)
    for chunks in ((4, 6), (3, 6), (7, 2), (20, 1)):
        store(array.rechunk(chunks), "out.npy", overwrite=True, progress=False)
        assert same(stored("out.npy"), np.repeat(np.arange(5, dtype="uint8"), 4)[:, None] + np.zeros(6, "uint8"))
        assert sorted(Path("reads.txt").read_text().split()) == list("01234")
        Path("reads.txt").unlink()


def test_each_file_of_a_stack_is_read_once(here: Path) -> None:
    (here / "in").mkdir()
    for k in range(6):
        np.save(here / "in" / f"{k}.npy", image(k))

    def read(path: str) -> Array:
        with open("reads.txt", "a") as f:
            f.write(f"{os.path.basename(path)}\n")
        return np.asarray(np.load(path))

    stack = open_stack("in", reader=read, files_per_block=4)
    Path("reads.txt").unlink()  # the header
    store(stack.array[:, 1:].rechunk((1, 2, 3)), "out.npy", like=stack, progress=False)
    assert sorted(Path("reads.txt").read_text().split()) == [f"{k}.npy" for k in range(6)]


# -- like= ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
def test_labels_and_files_come_from_like(frames: Path, expected: Array, out: str) -> None:
    stack = open_stack("frames", labels=r"img_(?P<k>\d+)\.(?P<kind>\w+)")
    report = store(stack.array[::2, 1:] / 2, out, like=stack[::2], progress=False)
    assert same(stored(out), expected[::2, 1:] / 2)
    assert report.files == 0
    assert str(report).splitlines()[0].startswith(f"done  {out} (6, 4, 7) float64, 1.3 kB in ")
    found = daskstack.open(out)
    assert found.dims == ("item", "y", "x")
    assert found.labels["k"].tolist() == [0, 2, 4, 6, 8, 10]
    assert found.labels["kind"].tolist() == ["tif"] * 6
    assert found.files == tuple(str(frames / f"img_{k}.tif") for k in range(0, 12, 2))
    assert found.record["derived"] is True
    assert "from    a Dask array, items like frames, below" in repr(found)


def test_the_index_of_a_derived_array(frames: Path) -> None:
    stack = open_stack("frames", labels={"k": r"_(\d+)"})
    store(stack.array.mean(axis=(1, 2)), "out.npy", like=stack, progress=False)
    found = rows("out.npy.index.csv")
    assert list(found[0]) == ["item", "file", "k", "size", "mtime", "checksum"]
    assert [r["file"] for r in found] == [f"img_{k}.tif" for k in range(12)]
    store(stack.array, "plain.npy", progress=False)
    assert list(rows("plain.npy.index.csv")[0]) == ["item", "checksum"]
    assert daskstack.open("plain.npy").files == ()
    assert "from    a Dask array\n" in repr(daskstack.open("plain.npy"))


@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
def test_a_grid_keeps_its_axes(here: Path, out: str) -> None:
    (here / "in").mkdir()
    for t in range(4):
        for c in "ab":
            np.save(here / "in" / f"{t}{c}.npy", image(10 * t + ord(c)))
    stack = open_stack("in", labels=r"(?P<t>\d)(?P<c>\w)", axes=("t", "c"))
    whole = np.asarray(stack.array)
    store((stack.array + 0.5).rechunk((3, 1, 2, 7)), out, like=stack, progress=False)
    found = daskstack.open(out)
    assert found.dims == ("t", "c", "y", "x")
    assert same(found.array, whole + 0.5)
    assert found.labels["t"].tolist() == [0, 1, 2, 3]
    assert found.labels["c"].tolist() == ["a", "b"]
    message = r"the array has shape \(4, 5, 7\), like has \(4, 2\) items"
    with pytest.raises(UsageError, match=message):
        store(stack.array[:, 0], "more.npy", like=stack)


def test_axes_that_an_item_gets_by_default_give_way_to_those_of_like(here: Path) -> None:
    (here / "in").mkdir()
    for k in range(3):
        np.save(here / "in" / f"{k}.npy", image(k, (2, 3, 4)))
    stack = open_stack("in", labels=r"(?P<y>\d)", axes="y")
    store(stack.array.sum(axis=1), "out.zarr", like=stack, progress=False)
    assert daskstack.open("out.zarr").dims == ("y", "item_y", "x")
    assert same(stored("out.zarr"), np.stack([image(k, (2, 3, 4)).sum(axis=0, dtype="uint64") for k in range(3)]))


# -- what is refused --------------------------------------------------------------------------------------------


class Duck:
    """What Dask takes for an array and NumPy does not hold, as those on a GPU."""

    __array_priority__ = 100
    dtype = np.dtype("f8")
    ndim = 1
    shape = (0,)

    def __array_function__(self, *_: Any) -> Any:
        return NotImplemented

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        return NotImplemented

    def __getitem__(self, _: Any) -> Duck:
        return self


def duck() -> da.Array:
    return da.Array({("duck", 0): Duck()}, "duck", ((3,),), meta=Duck(), dtype="f8")


def unknown() -> da.Array:
    array = da.arange(9, chunks=3)
    left: da.Array = array[array > 4]
    return left


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "NumPy": (lambda: np.zeros(3), "ndarray is no Dask array\nnext  make it one: dask.array.asarray(...)"),
    "list": (lambda: [1, 2], "list is no Dask array\nnext  make it one: dask.array.asarray(...)"),
    "delayed": (lambda: delayed(3), "DelayedLeaf is no Dask array\nnext  make it one: dask.array.asarray(...)"),
    "0-d": (
        lambda: da.ones(3).sum(),
        "an array without axes has no items\nnext  give it an axis: array[None]",
    ),
    "unknown": (unknown, "the array has chunks of unknown size\nnext  compute_chunk_sizes() finds them"),
    "empty": (lambda: da.ones((0, 3)), "the array holds no items\nnext  give one with at least one"),
    "objects": (
        lambda: da.from_array(np.array([None, 1], object), chunks=1),
        "the array holds Python objects\nnext  convert it to plain values: astype(...)",
    ),
    "objects in records": (
        lambda: da.zeros(3, dtype=[("a", "O")], chunks=1),
        "the array holds Python objects\nnext  convert it to plain values: astype(...)",
    ),
    "texts of any length": (
        lambda: da.from_array(np.array(["a", "b"], np.dtypes.StringDType()), chunks=1),
        "the array holds Python objects\nnext  convert it to plain values: astype(...)",
    ),
    "masked": (
        lambda: da.ma.masked_equal(da.ones(3), 1),
        "the array's blocks are of numpy.ma.MaskedArray\nnext  convert them to NumPy: map_blocks(...)",
    ),
    "duck": (duck, f"the array's blocks are of {__name__}.Duck\nnext  convert them to NumPy: map_blocks(...)"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
def test_what_cannot_be_stored_is_refused_before_anything_is_written(here: Path, what: str, out: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(UsageError) as caught:
        store(make(), out, progress=False)
    found = str(caught.value).replace("numpy.ma.core.", "numpy.ma.")  # as NumPy names it
    assert found == message
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            "s3://bucket/out.zarr",
            "the output 's3://bucket/out.zarr' is a URL; daskstack writes files\nnext  store on a disk, copy it then",
        ),
        ("out.txt", "the output 'out.txt' has no known suffix\nnext  let it end in .npy or .zarr"),
    ],
)
def test_outputs_that_are_none(here: Path, out: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        store(da.ones(3), out)
    assert str(caught.value) == message.format(here=here)
    with pytest.raises(OutputError, match=r"there is no folder nowhere\n"):
        store(da.ones(3), "nowhere/out.npy")
    assert os.listdir(here) == []


def test_like_of_another_length_or_kind(frames: Path) -> None:
    stack = open_stack("frames")
    with pytest.raises(UsageError) as caught:
        store(stack.array[::2], "out.npy", like=stack)
    assert str(caught.value) == (
        "the array has shape (6, 5, 7), like has (12,) items\n"
        "next  give as like= the stack of just these items, as in like=stack[::2]"
    )
    build("frames", "all.npy", progress=False)
    for like, kind in ((daskstack.open("all.npy"), "Output"), ("frames", "str"), (stack.array, "Array")):
        with pytest.raises(UsageError) as caught:
            store(stack.array, "out.npy", like=like)  # type: ignore[arg-type]
        assert str(caught.value) == f"like is {kind}\nnext  give the stack that open_stack() made, or a part of it"
    assert not list(Path().glob("out*"))


# -- blocks that are not what the array promises ----------------------------------------------------------------

BASE = da.ones((4, 6), chunks=(2, 6), dtype="uint8")
SHAPE = "mend the shape that it states"
LIES: dict[str, tuple[Callable[[Array], Any], str]] = {
    "dtype": (lambda b: b + 0.5, "a block of the array is float64, due uint8\nnext  mend its dtype, or astype"),
    "shorter": (lambda b: b[:1], f"a block of the array has shape (1, {{}}), due (2, {{}})\nnext  {SHAPE}"),
    "narrower": (lambda b: b[:, :1], f"a block of the array has shape (2, 1), due (2, {{}})\nnext  {SHAPE}"),
    "flat": (lambda b: b[:, 0], f"a block of the array has shape (2,), due (2, {{}})\nnext  {SHAPE}"),
    "masked": (
        lambda b: np.ma.masked_equal(b, 1),
        "a block of the array is a MaskedArray, due an ndarray\nnext  mend the array",
    ),
    "list": (lambda b: b.tolist(), "a block of the array is a list, due an ndarray\nnext  mend the array"),
    "None": (lambda b: None, "a block of the array is a NoneType, due an ndarray\nnext  mend the array"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("width", [6, 3])  # where blocks are joined, Dask would cast and broadcast them
@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
def test_one_block_that_is_not_as_promised_is_an_error(here: Path, lie: str, width: int, out: str) -> None:
    function, message = LIES[lie]

    def of_last(block: Array, block_id: tuple[int, ...]) -> Any:
        return function(block) if block_id == (1, 6 // width - 1) else block

    array = BASE.rechunk((2, width)).map_blocks(of_last, dtype="uint8", meta=np.empty((0, 0), "uint8"))
    with pytest.raises(DaskstackError) as caught:
        store(array, out, progress=False)
    assert str(caught.value) == message.format(width, width)
    assert os.listdir(here) == []


def test_maps_of_files_are_plain_arrays(here: Path) -> None:
    np.save("in.npy", image(0))
    part = delayed(np.load)("in.npy", mmap_mode="r")
    array = da.from_delayed(part, (5, 7), "uint16", meta=np.empty((0, 0), "uint16"))
    store(array, "out.npy", progress=False)
    store(array.rechunk((5, 3)), "again.npy", progress=False)
    assert same(stored("out.npy"), image(0))
    assert same(stored("again.npy"), image(0))


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_a_bad_file_behind_it_is_named(frames: Path, scheduler: str) -> None:
    stack = open_stack("frames")
    tifffile.imwrite(frames / "img_5.tif", image(5, (1, 7)), photometric="minisblack")
    with pytest.raises(BadFilesError) as caught:
        store(stack.array + 1, "out.npy", like=stack, scheduler=scheduler, progress=False)
    assert [f.path for f in caught.value.files] == [str(frames / "img_5.tif")]
    assert "frames/img_5.tif  found (1, 7) uint16, due (5, 7) uint16\n" in str(caught.value)
    assert os.listdir(frames.parent) == ["frames"]


class OwnError(Exception):
    """Of a user."""


def fail(block: Array, block_id: tuple[int, ...]) -> Array:
    if block_id[0] == 2:
        raise OwnError("this is mine")
    return block


@pytest.mark.parametrize(
    ("out", "scheduler"),
    [("out.npy", "synchronous"), ("out.zarr", "threads"), ("out.npy", "processes")],
)
def test_an_exception_of_the_user_s_function_reaches_the_user(here: Path, pool: None, out: str, scheduler: str) -> None:
    array = da.ones((4, 6), chunks=(1, 3)).map_blocks(fail, dtype="f8")
    with pytest.raises(OwnError, match=r"^this is mine"):
        store(array, out, scheduler=scheduler, threads=2, progress=False)
    assert os.listdir(here) == []


# -- clusters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [False, True])
def test_on_a_cluster(here: Path, cluster: LocalCluster, current: bool) -> None:
    whole = image(0, (8, 9), "int32")
    array = da.from_array(whole, chunks=(3, 2))
    with Client(cluster, set_as_default=current) as client:
        where = {} if current else {"scheduler": client}
        store(array, "out.npy", progress=False, **where)
        store(array, "out.zarr", progress=False, **where)
        # The same array again is stored again, not taken from what the cluster remembers.
        store(array, "out.npy", overwrite=True, progress=False, **where)
        store(client.persist(array) + 1, "persisted.npy", progress=False, **where)
    assert same(stored("out.npy"), whole)
    assert same(stored("out.zarr"), whole)
    assert same(stored("persisted.npy"), whole + np.int32(1))


def test_threads_beside_a_current_cluster(here: Path, cluster: LocalCluster) -> None:
    whole = image(0, (40, 30), "int32")
    with Client(cluster):
        store(da.from_array(whole, chunks=(40, 1)), "out.npy", scheduler="threads", progress=False)
    assert same(stored("out.npy"), whole)


def test_errors_of_a_cluster_are_the_user_s_and_the_files_own(frames: Path, cluster: LocalCluster) -> None:
    stack = open_stack("frames")
    (frames / "img_5.tif").write_bytes(b"")

    def divide(block: Array) -> Array:
        raise ZeroDivisionError("this is mine")

    with Client(cluster, set_as_default=False) as client:
        with pytest.raises(ZeroDivisionError, match=r"^this is mine$"):
            store(da.ones(3).map_blocks(divide, dtype="f8"), "out.npy", scheduler=client, progress=False)
        with pytest.raises(BadFilesError, match=r"\n  frames/img_5\.tif  empty file \(0 bytes\)\n"):
            store(stack.array + 1, "out.npy", like=stack, scheduler=client, progress=False)
    assert os.listdir(frames.parent) == ["frames"]


# -- what is there already --------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
def test_an_output_is_replaced_only_where_asked_for_and_only_an_own_one(here: Path, out: str) -> None:
    store(da.ones(3), out, progress=False)
    with pytest.raises(OutputExistsError) as caught:
        store(da.ones(3), out, progress=False)
    assert str(caught.value) == (
        f"{out} exists and was made from other files or with other options; it was not touched\n"
        "next  choose another OUT, or --overwrite it"
    )
    store(da.zeros(4), out, overwrite=True, progress=False)
    assert same(stored(out), np.zeros(4))
    np.save("mine.npy", np.ones(2))
    zarr.create_array("mine.zarr", data=np.ones(2))
    mine = out.replace("out", "mine")
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match=f"^{mine} exists and was not made by daskstack"):
            store(da.zeros(4), mine, overwrite=overwrite, progress=False)
    assert np.load("mine.npy").tolist() == [1, 1]
    assert same(zarr.open_array("mine.zarr", mode="r")[:], np.ones(2))


@pytest.mark.parametrize("out", ["out.npy", "out.zarr"])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_what_is_made_of_an_output_can_take_its_place(frames: Path, expected: Array, out: str, scheduler: str) -> None:
    stack = open_stack("frames", labels={"k": r"_(\d+)"})
    build("frames", out, labels={"k": r"_(\d+)"}, progress=False)
    for k in range(3):
        store(
            daskstack.open(out).array[::-1] + 1, out, like=stack[::-1], overwrite=True, scheduler=scheduler,
            progress=False,
        )  # fmt: skip
        whole = expected + np.uint16(k + 1)
        assert same(stored(out), whole[::-1] if k % 2 == 0 else whole)
    assert daskstack.open(out).labels["k"].tolist() == list(range(11, -1, -1))


def test_a_function_that_fails_leaves_the_output_that_was_there(here: Path) -> None:
    store(da.ones(3), "out.npy", progress=False)
    before = {p: p.read_bytes() for p in here.iterdir()}
    with pytest.raises(OwnError, match="this is mine"):
        store(
            da.ones(3, chunks=1).map_blocks(fail, dtype="f8"), "out.npy", overwrite=True, progress=False
        )  # fmt: skip
    assert {p: p.read_bytes() for p in here.iterdir()} == before


def test_an_input_of_like_is_not_overwritten(here: Path) -> None:
    store(da.ones((3, 4)), "in.npy", progress=False)
    stack = open_stack("in.npy", join="concat")
    before = Path("in.npy").read_bytes()
    with pytest.raises(OutputExistsError, match=r"^in\.npy is one of the inputs; it was not touched"):
        store(stack.array + 1, "in.npy", like=stack, overwrite=True, progress=False)
    assert Path("in.npy").read_bytes() == before


def test_a_store_that_was_killed_leaves_nothing_behind_the_next(here: Path) -> None:
    script = (
        "import sys, time, dask.array as da, daskstack\n"
        "def wait(block, block_id):\n"
        "    if sys.argv[1] == 'wait' and block_id[0] == 3:\n"
        "        print('waiting', flush=True)\n"
        "        time.sleep(60)\n"
        "    return block\n"
        "array = da.ones((4, 3), chunks=(1, 3)).map_blocks(wait, dtype='f8')\n"
        "daskstack.store(array, 'out.zarr', scheduler='synchronous', progress=False)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, "wait"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert os.listdir(here) == ["out.zarr.part"]
    subprocess.run([sys.executable, "-c", script, "go"], check=True)
    assert os.listdir(here) == ["out.zarr"]
    assert same(stored("out.zarr"), np.ones((4, 3)))


def test_a_store_at_work_is_not_swept_away_by_another(here: Path) -> None:
    from daskstack import staging

    work = checked(da.ones(3), None, None)
    plan = planned(work, here / "out.npy")
    manifest = {"plan_id": plan.plan_id, "request": "", "repeatable": False, **work.origin}
    held = staging.prepare(plan.out, manifest, work.listing, plan.target)
    with pytest.raises(OutputError, match=r"is held by another run into the same output \(.*, pid \d+, since "):
        store(da.zeros(4), "out.npy", progress=False)
    assert os.listdir("out.npy.part") == [plan.plan_id]
    os.close(held.lock)  # as when it is killed
    store(da.ones(4), "out.npy", progress=False)
    assert sorted(os.listdir(here)) == ["out.npy", "out.npy.index.csv", "out.npy.json"]
    assert same(stored("out.npy"), np.ones(4))
