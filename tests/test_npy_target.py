"""The .npy on disk, byte by byte."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Array, image
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from daskstack import files
from daskstack.targets import Index, NpyTarget, crc32c
from daskstack.targets.npy import npy_header


def saved(array: Array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def index(items: int, **labels: Any) -> Index:
    numbers = np.arange(items)
    names = [f"f{k}.npy" for k in range(items)]
    columns: dict[str, Any] = {"file": names, "size": numbers, "mtime": numbers, "checksum": numbers.astype("uint32")}
    return Index(("item",), (items,), columns, labels, {"plan_id": "x"})


@given(
    dtype=st.one_of(hnp.scalar_dtypes(), st.just(np.dtype([("x", "<f4"), ("id", "<i8", (2,))]))),
    shape=hnp.array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=3),
)
def test_the_header_is_the_one_that_numpy_saves(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    data = saved(array)
    assert npy_header(shape, dtype) == data[: len(data) - array.nbytes]


def test_headers_that_need_other_versions(tmp_path: Path) -> None:
    many = np.dtype([(f"field_{k:04d}", "<f4") for k in range(3000)])
    other = np.dtype([("größe", "<f4"), ("名", "<i2")])
    for dtype, version in ((many, (2, 0)), (other, (3, 0) if "名" in str(other) else (1, 0))):
        target = NpyTarget((3,), dtype, 1)
        assert tuple(target.header[6:8]) == version
        assert len(target.header) % 64 == 0
        array = np.zeros(3, dtype)
        (tmp_path / "x.npy").write_bytes(target.header + array.tobytes())
        found = np.load(tmp_path / "x.npy", max_header_size=1 << 20)
        assert found.dtype == dtype
        assert found.shape == (3,)


def test_numpy_integers_in_the_shape_do_not_reach_the_header() -> None:
    shape: Any = (np.int64(3), np.uint8(4))
    assert b"(3, 4)" in npy_header(shape, np.dtype("u1"))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3, 2, 2, 0]])
def test_blocks_in_any_order_any_number_of_times(tmp_path: Path, order: list[int]) -> None:
    whole = image(1, (10, 5, 7))
    target = NpyTarget(whole.shape, whole.dtype, 1)
    target.create(str(tmp_path))
    edges = [0, 3, 6, 9, 10]
    for k in order:
        target.write(str(tmp_path), edges[k], whole[edges[k] : edges[k + 1]])
    moves = target.finish(str(tmp_path), str(tmp_path / "out.npy"), index(10))
    assert moves[-1] == (str(tmp_path / "data.npy"), str(tmp_path / "out.npy"))
    assert (tmp_path / "data.npy").read_bytes() == saved(whole)


def test_an_unfinished_target_is_no_array_for_any_reader(tmp_path: Path) -> None:
    target = NpyTarget((10, 5, 7), np.dtype("uint16"), 1)
    target.create(str(tmp_path))
    target.write(str(tmp_path), 0, image(0, (10, 5, 7)))
    assert os.path.getsize(tmp_path / "data.npy") == len(target.header) + target.nbytes
    for mode in (None, "r"):
        with pytest.raises(ValueError, match=r"only support format version|Invalid") as caught:
            np.load(tmp_path / "data.npy", mmap_mode=mode)
        assert "pickle" not in str(caught.value)


def test_a_write_touches_its_own_bytes_only(tmp_path: Path) -> None:
    target = NpyTarget((10, 4), np.dtype("uint8"), 1)
    target.create(str(tmp_path))
    path = tmp_path / "data.npy"
    before = b"\xaa" * os.path.getsize(path)
    path.write_bytes(before)
    target.write(str(tmp_path), 3, np.arange(8, dtype="uint8").reshape(2, 4))
    start = len(target.header) + 12
    assert path.read_bytes() == before[:start] + bytes(range(8)) + before[start + 8 :]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = image(3, (4, 50))
    target = NpyTarget(whole.shape, whole.dtype, 1)
    target.create(str(tmp_path))
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    target.write(str(tmp_path), 0, whole)
    target.finish(str(tmp_path), str(tmp_path / "out.npy"), index(4))
    assert (tmp_path / "data.npy").read_bytes() == saved(whole)


def test_room_is_taken_at_once(tmp_path: Path) -> None:
    NpyTarget((1 << 20,), np.dtype("uint8"), 1).create(str(tmp_path))
    assert os.stat(tmp_path / "data.npy").st_blocks * 512 >= 1 << 20


def test_where_fallocate_is_not_offered_the_size_is_set_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_fallocate", lambda *_: False)
    target = NpyTarget((1000,), np.dtype("uint8"), 1)
    target.create(str(tmp_path))
    assert os.path.getsize(tmp_path / "data.npy") == len(target.header) + 1000


def test_side_files(tmp_path: Path) -> None:
    target = NpyTarget((2, 3), np.dtype("uint8"), 1)
    target.create(str(tmp_path))
    kinds = np.array(["a", 'b,\n"c'])
    moves = target.finish(str(tmp_path), str(tmp_path / "out.npy"), index(2, kind=kinds, n=np.array([1.5, 2])))
    finals = [os.path.basename(final) for _, final in moves]
    assert finals == ["out.npy.json", "out.npy.index.csv", "out.kind.npy", "out.n.npy", "out.npy"]
    assert tuple(final for _, final in moves) == target.final_names(str(tmp_path / "out.npy"), ["kind", "n"])
    for source, final in moves:
        os.rename(source, final)
    out = str(tmp_path / "out.npy")
    due = {
        "item": ["0", "1"], "file": ["f0.npy", "f1.npy"], "kind": ["a", 'b,\n"c'], "n": ["1.5", "2.0"],
        "size": ["0", "1"], "mtime": ["0", "1"], "checksum": ["00000000", "00000001"],
    }  # fmt: skip
    assert target.read_index(out, [*due, "page"]) == due
    assert target.read_index(out, ["kind"]) == {"kind": due["kind"]}
    record = target.read_record(out)
    assert record is not None
    assert record["files"].keys() == {"out.npy.index.csv", "out.kind.npy", "out.n.npy"}
    assert np.load(tmp_path / "out.kind.npy").tolist() == kinds.tolist()


def test_crc32c_is_that_of_rfc_3720() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4
    assert crc32c(np.arange(32, dtype="uint8")) == 0x46DD794E
    assert crc32c(np.empty((0, 5))) == 0
