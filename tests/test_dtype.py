"""One dtype for the whole stack: a cast only where it is asked for, and only one that changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from conftest import Array, image
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import daskstack
from daskstack.errors import BadFileError, BadFilesError, OutputError, UsageError
from daskstack.readers import NpyReader
from daskstack.readers.cast import cast_exactly

NUMBERS = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


def numbers(array: Array) -> list[Any]:
    """Python's own numbers, which it compares exactly whatever their kinds."""
    return array.ravel().tolist()


def as_held(a: Any, b: Any) -> bool:
    """Whether two numbers are the same, part by part; NaN is NaN."""
    parts = ((complex(a).real, complex(b).real), (complex(a).imag, complex(b).imag))
    if isinstance(a, complex) or isinstance(b, complex):
        if isinstance(a, int) or isinstance(b, int):  # a complex number rounds a large integer before it is compared
            real, whole = (b.real, a) if isinstance(a, int) else (a.real, b)
            return bool(real == whole and parts[0][0] == parts[0][1] and parts[1][0] == parts[1][1])
        return all(x == y or (np.isnan(x) and np.isnan(y)) for x, y in parts)
    return bool(a == b or (np.isnan(a) and np.isnan(b)))


@settings(max_examples=300, deadline=None)
@example(np.array([2**63 - 1]), "f8")
@example(np.array([2**63 - 1], "u8"), "f4")
@example(np.array([2.0**63]), "i8")
@example(np.array([2.0**64]), "u8")
@example(np.array([-1]), "u1")
@example(np.array([65520]), "f2")
@example(np.array([np.nan]), "i4")
@example(np.array([np.nan + 1j]), "f4")
@example(np.array([1 + np.nan * 1j]), "f4")
@example(np.array([2, 1]), "?")
@example(np.array([0.5]), "?")
@given(
    st.sampled_from(NUMBERS).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(max_dims=2, max_side=3))),
    st.sampled_from(NUMBERS),
)
def test_a_cast_holds_every_number_or_names_the_first_that_it_does_not(array: Array, dtype: str) -> None:
    out = np.zeros((1, *array.shape), dtype)
    with np.errstate(all="ignore"):
        due = (array.real if np.dtype(dtype).kind != "c" else array).astype(dtype)
    held = [as_held(a, b) for a, b in zip(numbers(array), numbers(due), strict=True)]
    if all(held):
        cast_exactly("x.npy", np.ascontiguousarray(array)[None], out)
        assert out[0].tobytes() == due.tobytes()
    else:
        place = tuple(int(n) for n in np.unravel_index(held.index(False), array.shape))
        with pytest.raises(BadFileError) as caught:
            cast_exactly("x.npy", np.ascontiguousarray(array)[None], out)
        name = np.dtype(dtype)
        value = np.ascontiguousarray(array)[place]
        due_text = f"what {name} holds exactly, as dtype={name} asks for"
        assert caught.value.problem == f"found the value {value} at {place}, due {due_text}"


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    """Six items in ``in``, of three dtypes and both byte orders; what they are as float32."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k, dtype in enumerate(["<u2", ">f8", "u1", "<u2", ">i4", "?"]):
        np.save(tmp_path / "in" / f"{k}.npy", (image(k) % (2 if dtype == "?" else 200)).astype(dtype))
    return np.stack([(image(k) % (2 if k == 5 else 200)).astype("float32") for k in range(6)])


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
@pytest.mark.parametrize("join", ["stack", "concat"])
def test_files_of_several_dtypes_become_the_one_that_is_asked_for(mixed: Array, name: str, join: Any) -> None:
    with pytest.raises(BadFilesError, match=r"found float64, due uint16|cannot be joined"):
        daskstack.build("in", name, join=join, progress=False)
    stack = daskstack.open_stack("in", dtype="float32", join=join)
    due = mixed if join == "stack" else mixed.reshape(-1, mixed.shape[-1])
    assert (stack.dtype, stack.shape) == (np.dtype("float32"), due.shape)
    assert np.array_equal(stack.array.compute(), due)
    assert np.array_equal(stack[3], due[3])
    stack.check()
    daskstack.build("in", name, dtype=np.float32, join=join, progress=False, restart=True)
    out = daskstack.open(name)
    assert out.dtype == np.dtype("float32")
    assert np.array_equal(out.array.compute(), due)
    assert out.record["options"]["dtype"] == "float32"
    report = daskstack.verify(name, data=True, inputs=True, progress=False)
    assert report.status == 0, str(report)


def test_another_dtype_is_another_plan(mixed: Array) -> None:
    plans = {daskstack.open_stack("in", dtype=d).plan("out.npy").plan_id for d in ("float32", "float64")}
    assert len(plans) == 2
    (Path("in") / "1.npy").unlink()
    one = daskstack.open_stack("in/0.npy")
    cast = daskstack.open_stack("in/0.npy", dtype="uint16")
    assert one.plan("out.npy").plan_id != cast.plan("out.npy").plan_id
    np.save("in/9.npy", np.full((5, 7), 300, "uint16"))
    with pytest.raises(BadFilesError):
        daskstack.build("in", "out.npy", dtype="uint8", progress=False)
    with pytest.raises(OutputError, match=r"another build: dtype .u1, now <i2; options"):
        daskstack.build("in", "out.npy", dtype="int16", progress=False)


def test_a_number_that_is_not_held_is_named_with_its_file(mixed: Array) -> None:
    with pytest.raises(BadFilesError) as caught:
        daskstack.build("in", "out.npy", dtype="int8", progress=False)
    files = [b.path.rpartition("/")[2] for b in caught.value.files]
    assert files == ["1.npy", "3.npy"]
    text = "found the value {} at {}, due what int8 holds exactly, as dtype=int8 asks for"
    for bad in caught.value.files:
        item = np.load(bad.path)
        place = tuple(int(n) for n in np.argwhere(item > 127)[0])
        assert bad.problem == text.format(item[place], place)
    assert not Path("out.npy").exists()


def test_verify_finds_a_number_that_was_changed_to_one_that_the_dtype_does_not_hold(mixed: Array) -> None:
    daskstack.build("in", "out.npy", dtype="float32", progress=False)
    changed = np.load("in/4.npy")
    changed[2, 3] = 2**24 + 1
    np.save("in/4.npy", changed)
    report = daskstack.verify("out.npy", inputs=True, progress=False)
    assert [p.item for p in report.problems] == [4]
    assert report.problems[0].what == "is (5, 7) float32, its file (5, 7) int32; the file changed since it was stored"


def test_what_is_no_number_is_not_cast(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", image(0))
    for dtype in ("datetime64[s]", "U5", "O", [("a", "u1")]):
        with pytest.raises(UsageError, match="is none of numbers\nnext  give one such as uint16"):
            daskstack.open_stack(tmp_path, dtype=dtype)
    with pytest.raises(UsageError, match=r"dtype='nonsense'.*\nnext  give one such as uint16"):
        daskstack.open_stack(tmp_path, dtype="nonsense")
    np.save(tmp_path / "1.npy", image(1).astype("datetime64[s]"))
    with pytest.raises(BadFilesError) as caught:
        daskstack.open_stack(tmp_path, dtype="int64").check()
    assert [b.problem for b in caught.value.files] == ["found datetime64[s], due numbers, to be cast to int64"]


def test_a_reader_s_arrays_and_tiffs_are_cast_as_well(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", image(3), compression="zlib", photometric="minisblack")
    tifffile.imwrite(tmp_path / "b.tif", image(2, dtype="float32"), photometric="minisblack")
    due = np.stack([image(3), image(2)]).astype("int64")
    for reader in (None, tifffile.imread):
        stack = daskstack.open_stack(sorted(tmp_path.glob("*.tif")), dtype=">i8", reader=reader)
        assert stack.dtype == np.dtype("int64")
        assert np.array_equal(stack.array.compute(), due)


@pytest.mark.parametrize("suffix", [".npy", ".tif"])
@pytest.mark.parametrize("quick", [True, False])
def test_files_laid_out_alike_are_cast_and_checked_the_same_way(tmp_path: Path, suffix: str, quick: bool) -> None:
    items = [image(k, dtype=">u2") for k in range(4)]
    items[2][3, 4] = 40_000
    for k, item in enumerate(items):
        path = tmp_path / f"{k}{suffix}"
        if suffix == ".npy":
            np.save(path, item)
        else:
            tifffile.imwrite(path, item, byteorder=">", photometric="minisblack")
    stack = daskstack.open_stack(tmp_path, dtype="int16")
    assert stack.layout is not None
    out = np.zeros((4, 5, 7), "int16")
    fast = stack.layout.reader() if quick else None
    bad = stack.reader.read_into(stack.files, out, stack.header, fast=fast)
    due = "due what int16 holds exactly, as dtype=int16 asks for"
    assert [b.message.partition("  ")[2] for b in bad] == [f"found the value 40000 at (3, 4), {due}"]
    assert [k for k in range(4) if np.array_equal(out[k], items[k])] == [0, 1, 3]


def test_the_plan_counts_the_memory_of_what_is_cast(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((50, 60), "uint8"))
    np.save(tmp_path / "b.npy", np.zeros((50, 60), "complex128"))
    stack = daskstack.open_stack(tmp_path, dtype="uint8")
    assert stack.scratch(stack.bounds) == 2 * 16 * 50 * 60
    assert NpyReader().scratch(1, stack.header, 0) == 2 * 50 * 60
    assert not stack.array.compute().any()
