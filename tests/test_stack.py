"""The stack as an array: against plain NumPy, lazily, item by item, sliced."""

from __future__ import annotations

import functools
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import tifffile
from conftest import DATA, Array, image, same
from dask.base import tokenize
from hypothesis import given, settings
from hypothesis import strategies as st

from daskstack import Stack, open_stack
from daskstack.errors import BadFileError, BadFilesError, UsageError


def save_parts(folder: Path, array: Array, rows: list[int]) -> list[str]:
    paths = [str(folder / f"p{k}.npy") for k in range(len(rows))]
    for path, part in zip(paths, np.split(array, np.cumsum(rows)[:-1]), strict=True):
        np.save(path, part)
    return paths


def test_one_header_is_read(frames: Path) -> None:
    for k in range(1, 12):
        (frames / f"img_{k}.tif").write_bytes(b"damaged")
    stack = open_stack("frames")
    assert (stack.shape, stack.dtype, stack.dims) == ((12, 5, 7), np.dtype("uint16"), ("item", "y", "x"))
    assert same(stack[0], image(0))


def test_the_lazy_array_equals_the_files(frames: Path, expected: Array) -> None:
    stack = open_stack("frames", files_per_block=5)
    assert isinstance(stack.array, da.Array)
    assert stack.array.chunks == ((5, 5, 2), (5,), (7,))
    assert same(stack.array, expected)
    assert same(stack.array[3:11:2, 1:4].compute(), expected[3:11:2, 1:4])
    assert same(da.map_blocks(np.left_shift, stack.array, 1, dtype="uint16"), expected * np.uint16(2))
    assert stack.array.dtype == expected.dtype


def test_one_delayed_read_a_file_where_asked(frames: Path, expected: Array) -> None:
    array = open_stack("frames", files_per_block=1).array
    assert array.numblocks == (12, 1, 1)
    assert len(array.dask.layers) == 1
    assert len(array.dask) == 12
    assert same(array, expected)


def test_the_graph_is_small(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(4, dtype="uint8"))
    stack = open_stack([tmp_path / "one.npy"] * 20_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        array = stack.array
    assert len(array.dask) == 64
    assert len(pickle.dumps(dict(array.dask))) < 100_000
    assert same(array, np.tile(np.arange(4, dtype="uint8"), (20_000, 1)))


def test_names_are_deterministic_and_change_with_a_file(frames: Path) -> None:
    def name() -> str:
        return str(open_stack("frames").array.name)

    first = name()
    assert name() == first
    os.utime(frames / "img_3.tif", ns=(5, 5))
    second = name()
    assert second != first
    tifffile.imwrite(frames / "img_3.tif", image(99), photometric="minisblack")
    assert name() not in (first, second)
    assert open_stack("frames", files_per_block=3).array.name != name()
    assert open_stack("frames")[::-1].array.name != name()


def test_persisted_data_are_not_taken_for_a_file_that_changed(frames: Path, expected: Array) -> None:
    kept = open_stack("frames").array.persist(scheduler="synchronous")
    tifffile.imwrite(frames / "img_3.tif", image(50), photometric="minisblack")
    os.utime(frames / "img_3.tif", ns=(7, 7))
    assert same(kept, expected)
    assert same(open_stack("frames").array[3], image(50))


def test_one_item_reads_one_file(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = open_stack("frames")
    opened: list[str] = []
    real = os.open

    def logged(path: str, *rest: Any) -> int:
        opened.append(path)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", logged)
    assert same(stack[5], image(5))
    assert same(stack[-1], image(11))
    assert same(stack[np.int64(2)], image(2))
    assert [os.path.basename(p) for p in opened] == ["img_5.tif", "img_11.tif", "img_2.tif"]
    for wrong in (12, -13):
        with pytest.raises(IndexError, match=f"item {wrong} of a stack of 12"):
            stack[wrong]
    for beyond in ((1, 2), (slice(2), 1), (slice(None), slice(None))):
        with pytest.raises(IndexError, match=r"slice \.array for the rest"):
            stack[beyond]
    for key in (None, np.array([[1, 2]]), np.array(3), True):
        with pytest.raises(IndexError, match="is no index of a stack"):
            stack[key]


KEYS: list[Any] = [
    slice(None, None, 2),
    slice(None, None, -1),
    slice(3, 7),
    [4, 4, 0],
    np.arange(12) % 3 == 1,
    np.array([11, -12]),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("join", ["stack", "concat"])
def test_a_slice_is_a_stack_again(frames: Path, expected: Array, key: Any, join: Any) -> None:
    stack = open_stack("frames", labels=r"img_(?P<k>\d+)", join=join)[key]
    assert isinstance(stack, Stack)
    assert stack.shape == expected[key].shape
    assert same(stack.array, expected[key])
    assert same(stack.labels["k"], np.arange(12)[key])
    assert same(np.stack([stack[i] for i in range(len(stack))]), expected[key])
    report = stack.to_npy("sliced.npy", progress=False)
    assert same(np.load(report.out), expected[key])
    assert same(np.load("sliced.k.npy"), np.arange(12)[key])
    assert stack[0:1].shape == (1, 5, 7)


def test_an_empty_slice_is_no_stack(frames: Path) -> None:
    with pytest.raises(IndexError, match="no item is left of 12"):
        open_stack("frames")[5:5]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    item=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    files_per_block=st.one_of(st.none(), st.integers(1, 4)),
    data=st.data(),
)
def test_joined_files_of_any_length_against_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[int],
    item: tuple[int, ...],
    files_per_block: int | None,
    data: st.DataObject,
) -> None:
    whole = image(1, (sum(rows), *item), "int32")
    paths = save_parts(tmp_path_factory.mktemp("parts"), whole, rows)
    stack = open_stack(paths, join="concat", files_per_block=files_per_block)
    assert stack.shape == whole.shape
    assert same(stack.array.compute(scheduler="synchronous"), whole)
    most = data.draw(st.integers(1, 4))
    blocks_read = [
        stack.block(a, b).read() for a, b in np.lib.stride_tricks.sliding_window_view(stack.cut(most), 2).tolist()
    ]
    assert not any(read.bad for read in blocks_read)
    parts = [read.array for read in blocks_read]
    assert same(np.concatenate(parts), whole)
    if files_per_block is None:
        assert max(map(len, parts)) <= most
    key = data.draw(st.lists(st.integers(-len(whole), len(whole) - 1), min_size=1, max_size=9))
    assert same(stack[key].array.compute(scheduler="synchronous"), whole[key])


def test_pages_of_one_file_are_items_where_joined() -> None:
    path = DATA / "membrane_2d_timelapse.tif"
    assert open_stack(path).shape == (1, 5, 256, 256)
    joined = open_stack(path, join="concat")
    assert joined.shape == (5, 256, 256)
    assert same(joined.array, tifffile.imread(path))
    assert same(joined[3], tifffile.imread(path)[3])


def test_a_single_page_is_an_item_where_joined(frames: Path, expected: Array) -> None:
    assert same(open_stack("frames", join="concat").array, expected)


def test_joined_files_that_differ_are_named_at_once(frames: Path) -> None:
    tifffile.imwrite(frames / "img_4.tif", image(4, (2, 5, 6)), photometric="minisblack")
    (frames / "img_7.tif").write_bytes(b"")
    with pytest.raises(BadFilesError) as caught:
        open_stack("frames", join="concat")
    assert str(caught.value).splitlines()[:3] == [
        "2 of 12 files cannot be joined; nothing was written",
        "  frames/img_4.tif  found (5, 6) uint16, due (5, 7) uint16",
        "  frames/img_7.tif  empty file (0 bytes)",
    ]


def test_a_value_has_no_axis_to_join_along(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.float32(3))
    with pytest.raises(BadFilesError, match="a single value, which has no axis to join along"):
        open_stack(tmp_path, join="concat")
    stack = open_stack(tmp_path)
    assert stack.shape == (1,)
    assert stack[0] == 3


def test_a_bad_first_file_is_no_header(frames: Path) -> None:
    (frames / "img_0.tif").write_bytes(b"")
    (frames / "img_1.tif").write_bytes(b"nonsense")
    stack = open_stack("frames", files_per_block=12)
    assert os.path.basename(stack.header_from) == "img_2.tif"
    with pytest.raises(BadFilesError, match=r"img_0\.tif  empty file"):
        stack.array.compute()
    with pytest.raises(BadFilesError, match=r"img_1\.tif  not a TIFF file"):
        stack[1]


def test_where_no_header_can_be_read_all_files_are_named(frames: Path) -> None:
    for k in range(12):
        (frames / f"img_{k}.tif").write_bytes(b"")
    with pytest.raises(BadFilesError) as caught:
        open_stack("frames")
    assert [os.path.basename(f.path) for f in caught.value.files] == [f"img_{k}.tif" for k in range(12)]
    assert "none of 12 files can be read" in str(caught.value)
    with pytest.raises(BadFilesError, match=r"^the file cannot be read\n  frames/img_3\.tif  empty file"):
        open_stack("frames/img_3.tif")


def test_bad_files_of_a_block_come_together(frames: Path) -> None:
    (frames / "img_4.tif").write_bytes(b"")
    tifffile.imwrite(frames / "img_5.tif", image(5, dtype="uint8"), photometric="minisblack")
    with pytest.raises(BadFilesError) as caught:
        open_stack("frames", files_per_block=12).array.compute()
    assert [f.problem for f in caught.value.files] == [
        "empty file (0 bytes)",
        "found uint8, due uint16; or cast all files by dtype=",
    ]
    assert isinstance(caught.value.files[0], BadFileError)


def test_relative_paths_survive_a_change_of_folder(
    frames: Path, expected: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = open_stack("frames/*.tif")
    monkeypatch.chdir("/")
    assert same(stack.array, expected)
    assert all(os.path.isabs(path) for path in stack.files)


def test_sort_by_moves_files_and_labels_together(frames: Path, expected: Array) -> None:
    labels = {"last": r"(\d)\.tif", "k": r"_(\d+)"}
    stack = open_stack("frames", labels=labels, sort_by=["last", "k"])
    order = [0, 10, 1, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert stack.labels["k"].tolist() == order
    assert same(stack.array, expected[order])


def test_labels_repeat_for_the_items_of_a_file(tmp_path: Path) -> None:
    paths = save_parts(tmp_path, image(0, (6, 5)), [3, 1, 2])
    stack = open_stack(paths, labels=r"p(?P<p>\d)", join="concat")
    assert stack.labels["p"].tolist() == [0, 0, 0, 1, 2, 2]
    assert len(stack.files) == 3


def test_a_function_reads_what_daskstack_does_not(tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"{k}.raw").write_bytes(image(k).tobytes())
    read: Callable[[str], Array] = lambda path: np.fromfile(path, "uint16").reshape(5, 7)  # noqa: E731
    stack = open_stack(tmp_path, reader=read)
    assert same(stack.array, np.stack([image(k) for k in range(3)]))


def test_files_of_two_kinds_are_refused(frames: Path) -> None:
    np.save(frames / "targets.npy", np.zeros(12))
    with pytest.raises(UsageError, match=r"1 of 13 files have another suffix than frames/img_0\.tif: targets\.npy"):
        open_stack("frames")
    assert len(open_stack("frames/*.tif")) == 12


def test_options_that_cannot_be_meant(frames: Path) -> None:
    for options in ({"files_per_block": 0}, {"reader": "load"}, {"join": "cat"}, {"sort_by": "t"}):
        with pytest.raises(UsageError):
            open_stack("frames", **options)


def test_a_stack_says_what_it_is(frames: Path) -> None:
    (frames / "notes.txt").touch()
    stack = open_stack("frames", labels={"k": r"_(\d+)", "one": "1", "kind": "(tif)"})
    size = sum(os.path.getsize(path) for path in stack.files)
    assert repr(stack).splitlines() == [
        "<daskstack.Stack (12, 5, 7) uint16>",
        f"files   12 in frames ({size / 1000:.1f} kB); left out: notes.txt",
        "order   natural: img_0.tif, img_1.tif, img_2.tif ... img_11.tif",
        "array   (item 12, y 5, x 7) uint16, 840 B; item from img_0.tif",
        "labels  k (0 to 11); one (3 true); kind (tif)",
    ]


def test_dask_keeps_its_own_settings(frames: Path, expected: Array) -> None:
    with dask.config.set(scheduler="synchronous"):
        assert same(open_stack("frames").array.compute(), expected)


# -- what people met --------------------------------------------------------------------------------------------


def test_functions_that_differ_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", image(k))
    readers: list[Callable[[str], Array]] = [
        lambda path: np.asarray(np.load(path)),
        lambda path: np.load(path) * np.uint16(2),
        functools.partial(scaled, factor=3),
        functools.partial(scaled, factor=4),
        Scaled(5),
        Scaled(6),
    ]
    stacks = [open_stack("[0-2].npy", reader=reader) for reader in readers]
    assert len({stack.array.name for stack in stacks}) == 6
    difference = (stacks[1].array - stacks[0].array).sum().compute()
    assert difference == sum(int(image(k).sum()) for k in range(3))
    for k, stack in enumerate(stacks):
        stack.to_npy(f"out{k}.npy", progress=False)
    assert [int(np.load(f"out{k}.npy")[0, 0, 1]) for k in range(6)] == [1, 2, 3, 4, 5, 6]
    # What can be pickled is known again in another run, and only that.
    for k, again in ((2, True), (4, True), (0, False)):
        twin = open_stack("[0-2].npy", reader=Scaled(5) if k == 4 else readers[k])
        assert (twin.plan("x.npy").plan_id == stacks[k].plan("x.npy").plan_id) is again


def test_a_changed_default_is_another_function(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", image(1))
    before = open_stack(tmp_path, reader=with_default).plan("x.npy").plan_id
    with_default.__defaults__ = (3,)
    try:
        assert open_stack(tmp_path, reader=with_default).plan("x.npy").plan_id != before
    finally:
        with_default.__defaults__ = (2,)
    assert open_stack(tmp_path, reader=with_default).plan("x.npy").plan_id == before


def with_default(path: str, factor: int = 2) -> Array:
    return scaled(path, factor)


def scaled(path: str, factor: int) -> Array:
    return np.load(path) * np.uint16(factor)  # type: ignore[no-any-return]


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, path: str) -> Array:
        return scaled(path, self.factor)


def test_a_stack_without_its_first_file_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for k in range(4):
        np.save(tmp_path / f"{k}.npy", image(k))
    open_stack(".")[1:].to_npy("out.npy", progress=False)
    assert same(np.load("out.npy"), np.stack([image(k) for k in range(1, 4)]))


def test_a_file_rewritten_since_it_was_listed_is_named(frames: Path) -> None:
    stack = open_stack("frames")
    tifffile.imwrite(frames / "img_3.tif", image(77), photometric="minisblack")
    os.utime(frames / "img_3.tif", ns=(3, 3))
    with pytest.raises(BadFilesError, match=r"img_3\.tif  changed since it was listed"):
        stack.to_npy("out.npy", progress=False)
    with pytest.raises(BadFilesError, match=r"img_3\.tif  changed since it was listed"):
        stack[3]
    assert same(open_stack("frames")[3], image(77))


@pytest.mark.parametrize(
    "source", ["./x/../frames", "x//..//./frames/", "frames/../frames/./*.tif", "x/../frames/img_*.tif"]
)
def test_names_are_right_however_a_source_is_written(frames: Path, source: str) -> None:
    (frames.parent / "x").mkdir()
    stack = open_stack(source, labels=r"^img_(?P<k>\d+)\.tif$")
    assert stack.names == tuple(f"img_{k}.tif" for k in range(12))
    assert stack.labels["k"].tolist() == list(range(12))


@pytest.mark.parametrize("dtype", ["S5", "U5"])
@pytest.mark.parametrize("join", ["stack", "concat"])
def test_texts_have_their_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, join: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(3):
        np.save(tmp_path / "in" / f"{k}.npy", np.array(["a", "bc"] if join == "concat" else "a", dtype))
    open_stack("in", join=join).to_npy("out.npy", progress=False)
    assert open_stack("in", join=join).to_npy("out.npy", progress=False).files == 0


def test_times_beyond_those_of_64_bits(frames: Path, expected: Array) -> None:
    os.utime(frames / "img_3.tif", (16725225600, 16725225600))  # in the year 2500
    open_stack("frames").to_npy("out.npy", progress=False)
    assert same(np.load("out.npy"), expected)


def test_a_name_with_a_carriage_return(frames: Path) -> None:
    (frames / "img_3.tif").rename(frames / "img_3\r.tif")
    open_stack("frames").to_npy("out.npy", progress=False)
    assert open_stack("frames").to_npy("out.npy", progress=False).files == 0


@pytest.mark.parametrize("shape", [(0, 2**62), (1,) * 70, (2**31, 2**31, 0)], ids=["huge", "axes", "zero"])
def test_shapes_that_no_array_can_have(tmp_path: Path, shape: tuple[int, ...]) -> None:
    text = repr({"descr": "<u2", "fortran_order": False, "shape": shape}).encode()
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(BadFilesError, match=r"x\.npy"):
        open_stack(tmp_path)


def test_memory_for_a_file_in_fortran_order_is_bounded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(image(1, (60, 70, 80), "int32")))
    joined = open_stack(tmp_path, join="concat")
    assert same(joined.array, image(1, (60, 70, 80), "int32"))
    read = joined.block(7, 31).read()
    assert not read.bad
    assert same(read.array, image(1, (60, 70, 80), "int32")[7:31])


def test_blocks_of_the_same_files_read_otherwise_are_others_to_dask(frames: Path) -> None:
    first, cast = (open_stack(frames, dtype=dtype).block(0, 3) for dtype in (None, "float64"))
    assert tokenize(first) == tokenize(open_stack(frames).block(0, 3))
    assert tokenize(first) != tokenize(cast)
