"""Finished outputs compared with their record and their inputs: every damage that touches the array is found."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import tifffile
from conftest import Run, image

import daskstack
from daskstack import build, open_stack, store, verify
from daskstack.errors import UsageError
from daskstack.verification import VerifyReport

OUTPUTS: dict[str, dict[str, Any]] = {
    "out.npy": {},
    "out.zarr": {"chunks": (2, 5, 3), "shards": (4, 5, 6)},
    "two.zarr": {"chunks": (5, 5, 7), "zarr_format": 2},
}
OTHERS = [name for name in OUTPUTS if name != "out.npy"]


@pytest.fixture
def outputs(frames: Path) -> Path:
    """All outputs of the twelve frames, with a label, in the current folder."""
    for name, options in OUTPUTS.items():
        build("frames", name, labels={"k": r"_(\d+)"}, progress=False, **options)
    return frames.parent


def checked(name: str, **options: Any) -> VerifyReport:
    return verify(name, progress=False, **{"data": True, **options})


def files_of(name: str) -> list[Path]:
    """Every file of an output, side files too."""
    if name.endswith(".npy"):
        return sorted(p for p in Path().glob("out.*") if p.is_file())
    return sorted(p for p in Path(name).rglob("*") if p.is_file())


# -- what is right ----------------------------------------------------------------------------------------------


def test_what_was_built_is_equal(outputs: Path) -> None:
    due = {
        "out.npy": "structure  (12, 5, 7) uint16, 3 files beside it",
        "out.zarr": "structure  (12, 5, 7) uint16, Zarr 3, 6 files of data",
        "two.zarr": "structure  (12, 5, 7) uint16, Zarr 2, 3 files of data",
    }
    for name, structure in due.items():
        assert str(verify(name, progress=False)).splitlines() == [structure, f"equal: {name}"]
        report = checked(name, inputs=True)
        assert report.status == 0
        assert str(report).splitlines() == [
            structure,
            "data       12 items, all as recorded",
            "inputs     12 items beside their files, all equal",
            f"equal: {name}",
        ]
        assert checked(name, inputs=True, sample=5).checked[1:] == (
            "data       5 of 12 items, all as recorded",
            "inputs     5 of 12 items beside their files, all equal",
        )


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "complex64", "datetime64[s]", ">u2", "float16"])
def test_every_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    bits = np.random.default_rng(0).integers(0, 256, (5, 3, 4 * np.dtype(dtype).itemsize), dtype="u1")
    for k, item in enumerate(bits % 2 if dtype == "bool" else bits):
        np.save(tmp_path / "in" / f"{k}.npy", item.view(dtype))
    build("in", name, progress=False)
    assert checked(name, inputs=True).status == 0


def test_grids_and_joined_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(6):
        np.save(tmp_path / "in" / f"{k // 3}{k % 3}.npy", image(k, (4, 5, 7)))
    for name in ("out.npy", "out.zarr"):
        build("in", name, labels=r"(?P<t>\d)(?P<c>\d)", axes=("t", "c"), progress=False)
        assert checked(name, inputs=True).status == 0
        build("in", f"joined{name[3:]}", join="concat", progress=False)
        assert (
            checked(f"joined{name[3:]}", inputs=True).checked[2] == "inputs     24 items beside their files, all equal"
        )


# -- what is different ------------------------------------------------------------------------------------------


def is_text(path: Path) -> bool:
    return path.suffix == ".json" or path.name.startswith(".z")


def flips(path: Path, alike: int) -> Iterator[int]:
    """Bytes of a file in turn changed; as it was, in the end.

    Each byte beside a .npy, each third one of the first of files of a Zarr group that are alike; of those after it, and
    of texts, some, from another one on each time.
    """
    data = path.read_bytes()
    text, in_group = is_text(path), path.parts[0].endswith(".zarr")
    step = (101 if len(data) > 1000 else 37) if text else 23 if alike else 3 if in_group else 1
    for at in range(alike % step, len(data), step):
        path.write_bytes(data[:at] + bytes([data[at] ^ (0x11 if text else 0xFF)]) + data[at + 1 :])
        yield at
    path.write_bytes(data)


def same_json(path: Path, before: bytes) -> bool:
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(before))
    except ValueError:
        return False


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_flipped_bytes_are_found_wherever_they_are(frames: Path, name: str) -> None:
    build("frames", name, labels={"k": r"_(\d+)"}, limit=5, progress=False, **OUTPUTS[name])
    found, seen = 0, Counter[str]()
    for path in files_of(name):
        before = path.read_bytes()
        kind = "text" if is_text(path) else str(path.parent if name.endswith(".zarr") else path)
        header = range(10, 128) if name == path.name == "out.npy" else range(0)
        seen[kind] += 1
        for at in flips(path, seen[kind] - 1):
            report = checked(name)
            if path.suffix == ".json" and same_json(path, before):
                continue
            if at in header and not report.problems:  # white space, or a number written otherwise
                assert np.array_equal(np.load(path), np.stack([image(k) for k in range(5)]))
                continue
            assert report.status, f"{path} at {at}"
            assert any(p.item is not None or p.file for p in report.problems) or report.unchecked
            found += 1
    assert found > 250
    assert checked(name).status == 0


def test_a_changed_item_is_named_with_its_file(outputs: Path) -> None:
    with open("out.npy", "r+b") as f:
        f.seek(128 + 3 * 70 + 5)
        f.write(b"\xff")
    report = checked("out.npy", inputs=True)
    assert report.status == 1
    assert [(p.item, p.file) for p in report.problems] == [(3, "img_3.tif")] * 2
    assert str(report.problems[1]) == "item 3 (img_3.tif)  1 bytes of 70 differ from its file"
    assert str(report).splitlines()[3] == "different: 2 problems in out.npy"


@pytest.mark.parametrize("kind", ["swapped", "shifted", "longer", "shorter"])
def test_items_that_moved_are_found(outputs: Path, kind: str) -> None:
    data = Path("out.npy").read_bytes()
    head, items = data[:128], data[128:]
    Path("out.npy").write_bytes(
        {
            "swapped": head + items[70:140] + items[:70] + items[140:],
            "shifted": head + items[:70] + b"\0" + items[70:-1],
            "longer": data + b"\0",
            "shorter": data[:-1],
        }[kind]
    )
    report = checked("out.npy")
    assert report.status == 1
    due = {"swapped": [0, 1], "shifted": list(range(1, 12)), "longer": [None], "shorter": [None]}[kind]
    assert [p.item for p in report.problems] == due


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_a_group_that_is_gone_or_another_s(outputs: Path, name: str) -> None:
    parts = sorted(p for p in Path(name, "data").iterdir() if p.name[-1].isdigit())
    first, second = parts[0].read_bytes(), parts[2].read_bytes()
    parts[0].write_bytes(second)
    assert {p.item for p in checked(name).problems} <= set(range(5))
    assert checked(name).status == 1
    parts[0].unlink()
    report = verify(name, progress=False)
    assert report.status == 1
    last = 3 if name == "out.zarr" else 4
    text = f"data/{parts[0].name}  was never written; it holds items 0 to {last} (img_0.tif"
    assert str(report.problems[0]).startswith(text)
    parts[0].write_bytes(first)
    (Path(name) / "data" / "c.9.9.9").write_bytes(first)
    assert [str(p) for p in verify(name, progress=False).problems] == ["data/c.9.9.9  is none of the data's files"]


def test_a_chunk_that_was_never_written_is_no_chunk_of_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store(da.zeros((4, 3), chunks=(4, 3), dtype="u1"), "out.zarr", chunks=(1, 3), shards=(4, 3), progress=False)
    assert checked("out.zarr").status == 0
    import zarr

    (tmp_path / "out.zarr" / "data" / "c.0.0").unlink()
    array: Any = zarr.open_array("out.zarr/data", mode="r+")
    with zarr.config.set({"array.write_empty_chunks": True}):
        array[:1] = 1
    array[:1] = 0
    array[1:2] = 1
    found = [str(p) for p in checked("out.zarr").problems]
    assert "data/c.0.0  holds chunks that were never written; it holds items 0 to 3" in found


def test_an_input_that_changed_or_is_gone(outputs: Path, frames: Path) -> None:
    tifffile.imwrite(frames / "img_4.tif", image(99), photometric="minisblack")
    (frames / "img_7.tif").unlink()
    for name in OUTPUTS:
        report = checked(name, inputs=True)
        assert report.status == 1
        assert [str(p) for p in report.problems] == [
            "item 4 (img_4.tif)  70 bytes of 70 differ from its file; the file changed since it was stored"
        ]
        assert report.unchecked == ("img_7.tif  its file is not there any more",)
    shutil.copy(frames / "img_3.tif", frames / "img_4.tif")
    os.utime(frames / "img_3.tif", ns=(1, 1))  # another time, the same pixels
    assert [p.item for p in checked("out.npy", inputs=True).problems] == [4]


def test_what_was_filled_holds_the_fill_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(4):
        np.save(tmp_path / "in" / f"{k}.npy", image(k, dtype="float32"))
    (tmp_path / "in" / "2.npy").write_bytes(b"")
    for name in ("out.npy", "out.zarr"):
        build("in", name, on_error="fill", progress=False)
        assert checked(name, inputs=True).status == 0
    with open("out.npy", "r+b") as f:
        f.seek(-70 * 2 - 140, os.SEEK_END)
        f.write(np.float32(5).tobytes())
    assert "item 2 (2.npy)  it does not hold the fill value" in map(str, checked("out.npy", inputs=True).problems)


# -- what cannot be compared ------------------------------------------------------------------------------------


def test_what_cannot_be_compared(frames: Path) -> None:
    assert checked("nowhere.npy").unchecked == ("there is no nowhere.npy",)
    np.save("plain.npy", image(0))
    assert checked("plain.npy").unchecked == ("there is no plain.npy.json, the record of how it was made",)
    Path("plain.zarr").mkdir()
    assert checked("plain.zarr").unchecked == ("plain.zarr has no record of how it was made",)
    stack = open_stack("frames")
    store(stack.array + 1, "derived.npy", like=stack, progress=False)
    report = checked("derived.npy", inputs=True)
    assert (report.status, report.problems) == (3, ())
    assert report.unchecked == ("the inputs: the array was computed from them, not read",)
    build("frames/*.tif", "read.npy", reader=tifffile.imread, progress=False)
    assert checked("read.npy", inputs=True).unchecked == ("the inputs: they were read by a function of yours (imread)",)
    with pytest.raises(UsageError, match="sample=0"):
        verify("read.npy", sample=0)


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_an_index_that_is_damaged_is_told(outputs: Path, name: str) -> None:
    path = Path("out.npy.index.csv" if name == "out.npy" else "out.zarr/file/zarr.json")
    path.write_bytes(b'x,"')
    report = checked(name, inputs=True)
    assert report.status == 1
    assert "the inputs: the index does not tell the file of each item" in report.unchecked


def test_a_pipe_in_place_of_a_record_does_not_hang(frames: Path) -> None:
    build("frames", "out.npy", progress=False)
    Path("out.npy.index.csv").unlink()
    os.mkfifo("out.npy.index.csv")
    assert checked("out.npy").status == 1


def test_on_the_command_line(outputs: Path, daskstack: Run) -> None:
    done = daskstack("verify", "out.zarr", "--data", "--inputs")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "equal: out.zarr")
    assert "100%  12/12 items  " in done.stderr
    with open("out.npy", "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\x77")
    done = daskstack("verify", "out.npy", "--data", "--json", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    done = daskstack("verify", "out.npy", "--data", "-q")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "next  move it away and build it anew"
    done = daskstack("verify", "out.npy", "--data", "--json")
    found = json.loads(done.stdout)
    assert (found["result"], found["status"], done.returncode) == ("different", 1, 1)
    assert [(p["item"], p["file"]) for p in found["problems"]] == [(11, "img_11.tif")]
    done = daskstack("verify", "nowhere.npy")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "not checked: there is no nowhere.npy\n")
    done = daskstack("verify", "out.npy", "--sample", "3")
    assert (done.returncode, done.stderr) == (2, "error: sample=3 of nothing\nnext  choose data or inputs as well\n")


def test_damage_that_a_quick_look_does_not_find_is_mended_by_overwrite_and_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(40):
        np.save(tmp_path / "in" / f"{k}.npy", image(k))
    build("in", "out.npy", progress=False)
    with open("out.npy", "r+b") as f:
        f.seek(128 + 4 * 70)
        f.write(b"\xff")
    assert [p.item for p in checked("out.npy").problems] == [4]
    assert build("in", "out.npy", overwrite=True, progress=False).was_there
    assert not build("in", "out.npy", overwrite=True, restart=True, progress=False).was_there
    assert checked("out.npy").status == 0


def test_the_code_is_its_own() -> None:
    import ast

    for module in (Path(daskstack.__file__).parent / "verification").glob("*.py"):
        tree = ast.parse(module.read_text())
        names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        used = {name.split(".")[1] for name in names if name.startswith("daskstack")}
        assert used <= {"errors", "files", "progress", "text", "verification"}
