"""The main job, end to end: files in, one array with its labels, index and record out."""

from __future__ import annotations

import csv
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from conftest import DATA, Array, image, published, same

import daskstack
from daskstack import build, open_stack
from daskstack.errors import (
    BadFilesError,
    NoSpaceError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from daskstack.targets import crc32c


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("scheduler", [None, "threads", "synchronous"])
@pytest.mark.parametrize("options", [{}, {"files_per_block": 5}, {"files_per_block": 1}, {"join": "concat"}])
def test_the_array_is_equal_to_its_files(
    frames: Path, expected: Array, scheduler: str | None, options: dict[str, Any]
) -> None:
    report = build("frames", "out.npy", scheduler=scheduler, progress=False, **options)
    assert same(np.load("out.npy"), expected)
    assert same(np.load("out.npy", mmap_mode="r"), expected)
    assert np.load("out.npy").flags.c_contiguous
    np.save("plain.npy", expected)
    assert Path("out.npy").read_bytes() == Path("plain.npy").read_bytes()
    assert (report.shape, report.dtype, report.files) == ((12, 5, 7), np.dtype("uint16"), 12)
    assert listing(frames.parent) == ["frames", "out.npy", "out.npy.index.csv", "out.npy.json", "plain.npy"]


def test_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(DATA / "banana*.tif", "banana.npy", progress=False)
    names = ["banana0002.tif", "banana0003.tif", "banana0010.tif"]
    assert same(np.load("banana.npy"), np.stack([tifffile.imread(DATA / n) for n in names]).astype("uint16"))
    build(DATA / "membrane_2d_timelapse.tif", "membrane.npy", join="concat", progress=False)
    assert same(np.load("membrane.npy"), tifffile.imread(DATA / "membrane_2d_timelapse.tif"))
    build(DATA / "V1.75f3.1250001.tif", "foam.npy", progress=False)
    assert same(np.load("foam.npy"), tifffile.imread(DATA / "V1.75f3.1250001.tif")[None])


def test_inputs_and_a_target_from_the_names_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "samples").mkdir()
    names = [f"{kind}_{k}.npy" for k in range(40) for kind in rng.choice(["cat", "dog", "bird", "hen"], 1)]
    for k, name in enumerate(names):
        np.save(tmp_path / "samples" / name, np.full((3, 4), k, "float32"))
    build("samples", "inputs.npy", labels={"target": "a"}, progress=False)
    inputs, target = np.load("inputs.npy"), np.load("inputs.target.npy")
    assert target.dtype == bool
    assert len(inputs) == len(target) == 40
    for item, is_a in zip(inputs, target, strict=True):
        name = names[int(item[0, 0])]
        assert is_a == ("a" in name)
        assert (item == item[0, 0]).all()


def test_the_index_has_a_row_an_item(frames: Path, expected: Array) -> None:
    build("frames", "out.npy", labels=r"img_(?P<k>\d+)\.(?P<kind>\w+)", progress=False)
    found = rows("out.npy.index.csv")
    assert list(found[0]) == ["item", "file", "k", "kind", "size", "mtime", "checksum"]
    for k, row in enumerate(found):
        status = os.stat(frames / f"img_{k}.tif")
        assert row == {
            "item": str(k),
            "file": f"img_{k}.tif",
            "k": str(k),
            "kind": "tif",
            "size": str(status.st_size),
            "mtime": str(status.st_mtime_ns),
            "checksum": f"{crc32c(expected[k]):08x}",
        }


def test_the_index_of_joined_files_has_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, n in (("a", 2), ("b", 3)):
        np.save(tmp_path / f"{name}.npy", image(1, (n, 4)))
    build("*.npy", "out.npy", join="concat", labels={"is_b": "b"}, progress=False)
    found = [(r["file"], r["page"], r["is_b"]) for r in rows("out.npy.index.csv")]
    assert found == [
        ("a.npy", "0", "False"), ("a.npy", "1", "False"),
        ("b.npy", "0", "True"), ("b.npy", "1", "True"), ("b.npy", "2", "True"),
    ]  # fmt: skip
    assert np.load("out.is_b.npy").tolist() == [False, False, True, True, True]


def test_the_record_says_how_it_was_made(frames: Path) -> None:
    plan = open_stack("frames", labels={"k": r"_(\d+)"}).plan("out.npy")
    build("frames", "out.npy", labels={"k": r"_(\d+)"}, progress=False)
    record = json.loads(Path("out.npy.json").read_text())["daskstack"]
    assert record.pop("created").endswith("+00:00")
    side_files = record.pop("files")
    assert record == {
        "plan_id": plan.plan_id,
        "version": daskstack.__version__,
        "numpy": np.__version__,
        "python": record["python"],
        "format": "npy",
        "shape": [12, 5, 7],
        "axes": ["item"],
        "dtype": "<u2",
        "bytes": os.path.getsize("out.npy"),
        "nbytes": 840,
        "dims": ["item", "y", "x"],
        "labels": ["k"],
        "sources": ["frames"],
        "root": str(frames),
        "join": "stack",
        "options": {"labels": {"k": r"_(\d+)"}},
        "filled": [],
    }
    for name, entry in side_files.items():
        data = Path(name).read_bytes()
        assert entry == {"bytes": len(data), "crc32c": crc32c(data)}


def test_names_of_several_sources_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for f, folder in enumerate(("dogs", "wolves")):
        (tmp_path / folder).mkdir()
        for k in (1, 2):
            np.save(tmp_path / folder / f"{k}.npy", image(10 * f + k))
    for sources in (["dogs", "wolves"], "*/*.npy", ["dogs/1.npy", "dogs/2.npy", "wolves/1.npy", "wolves/2.npy"]):
        stack = open_stack(sources)
        assert stack.names == ("dogs/1.npy", "dogs/2.npy", "wolves/1.npy", "wolves/2.npy")
        assert all(os.path.join(stack.root, name) == path for name, path in zip(stack.names, stack.files, strict=True))


def test_limit_takes_the_first_items(frames: Path, expected: Array) -> None:
    for join in ("stack", "concat"):
        build("frames", f"{join}.npy", join=join, limit=5, progress=False)
        assert same(np.load(f"{join}.npy"), expected[:5])
    with pytest.raises(UsageError, match="limit=0"):
        build("frames", "none.npy", limit=0)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint64", "float16", "complex64", "datetime64[s]", "U3", [("x", "<f4"), ("id", "<i8", (2,))]],
    ids=str,
)
def test_dtypes_and_values_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    whole = np.zeros((3, 4, 5), dtype)
    if whole.dtype.names:
        whole["x"] = image(0, (3, 4, 5), "float32")
    else:
        whole[:] = (image(0, (3, 4, 5), "int64") % 7).astype(dtype)
    for k, item in enumerate(whole):
        np.save(tmp_path / "in" / f"{k}.npy", np.asfortranarray(item) if k == 1 else item)
    build("in", "out.npy", progress=False)
    found = np.load("out.npy")
    assert found.dtype == whole.dtype
    assert found.tobytes() == whole.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 3, 1, 2)], ids=str)
def test_items_of_any_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(3):
        np.save(tmp_path / "in" / f"{k}.npy", image(k, shape))
    build("in", "out.npy", progress=False)
    assert same(np.load("out.npy"), np.stack([image(k, shape) for k in range(3)]))


def test_all_bad_files_come_in_one_report_and_nothing_is_made(frames: Path) -> None:
    (frames / "img_2.tif").write_bytes(b"")
    tifffile.imwrite(frames / "img_5.tif", image(5, (1, 7)), photometric="minisblack")
    tifffile.imwrite(frames / "img_9.tif", image(9, dtype="uint8"), photometric="minisblack")
    (frames / "img_10.tif").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 84\n")
    pointer = "a Git LFS pointer (text, not data); fetch the data with: git lfs pull"
    before = snapshot(frames)
    for options, kept, redo in (
        ({"files_per_block": 4}, "", ""),
        ({"scheduler": "synchronous"}, ", 8 of 12 blocks kept", "4 blocks"),
        ({"threads": 3}, ", 8 of 12 blocks kept", "4 blocks"),
    ):
        with pytest.raises(BadFilesError) as caught:
            build("frames", "out.npy", progress=False, **options)
        bad_list = [f"list  {path}" for path in Path().glob("out.npy.part/*/bad.csv")]
        assert str(caught.value).splitlines() == [
            f"4 of 12 files are bad; out.npy not made{kept}",
            "  frames/img_2.tif  empty file (0 bytes)",
            "  frames/img_5.tif  found (1, 7) uint16, due (5, 7) uint16",
            "  frames/img_9.tif  found uint8, due uint16; or cast all files by dtype=",
            f"  frames/img_10.tif  not a TIFF file but {pointer}",
            *bad_list,
            f"next  mend them, same command (reads only {redo} again); or --on-error fill" if kept
            else "next  mend or leave out these files, then the same command",
        ]  # fmt: skip
        assert len(bad_list) == bool(kept)
        assert published(frames.parent) == ["frames"]
    assert snapshot(frames) == before


def test_a_bad_file_that_is_listed_twice_is_named_once(frames: Path) -> None:
    (frames / "img_2.tif").write_bytes(b"")
    paths = [frames / f"img_{k}.tif" for k in (0, 2, 2, 1)]
    with pytest.raises(BadFilesError, match="1 of 4 files is bad"):
        build(paths, "out.npy", progress=False)


def test_what_its_size_alone_condemns_is_named_before_the_first_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(6):
        np.save(tmp_path / "in" / f"{k}.npy", image(k))
    data = (tmp_path / "in" / "3.npy").read_bytes()
    (tmp_path / "in" / "3.npy").write_bytes(data[:-9])
    (tmp_path / "in" / "4.npy").write_bytes(b"")
    with open(tmp_path / "in" / "5.npy", "wb") as f:  # longer by its header, and good
        np.lib.format.write_array(f, image(5), version=(2, 0))
        f.truncate()
    monkeypatch.setattr("daskstack.staging.prepare", lambda *_, **__: pytest.fail("stop here"))
    with pytest.raises(pytest.fail.Exception, match="stop here"):
        build("in", "out.npy", progress=False)
    found = [r.getMessage() for r in caplog.records]
    assert found == [
        "bad   in/3.npy  found 189 bytes, due 198 for (5, 7) uint16 as its header says",
        "bad   in/4.npy  empty file (0 bytes)",
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_file_that_changes_or_goes_between_listing_and_reading_is_named(frames: Path) -> None:
    stack = open_stack("frames")
    (frames / "img_3.tif").unlink()
    tifffile.imwrite(frames / "img_4.tif", image(4, (5, 8)), photometric="minisblack")
    with pytest.raises(BadFilesError) as caught:
        stack.to_npy("out.npy", progress=False)
    assert [f.problem for f in caught.value.files] == [
        "no such file (it was there when the files were listed)",
        "found (5, 8) uint16, due (5, 7) uint16",
    ]


# -- what is there already --------------------------------------------------------------------------------------


def make_taken(kind: str, path: Path) -> None:
    if kind == "file":
        path.write_bytes(b"mine")
    elif kind == "array":
        with path.open("wb") as f:
            np.save(f, image(7))
    elif kind == "folder":
        path.mkdir()
        (path / "mine").write_bytes(b"mine")
    elif kind == "link":
        path.symlink_to("elsewhere.npy")
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "array", "folder", "link", "loop"])
@pytest.mark.parametrize("name", ["out.npy", "out.npy.json", "out.npy.index.csv", "out.k.npy"])
def test_what_daskstack_did_not_make_is_not_touched(frames: Path, name: str, kind: str, *, overwrite: bool) -> None:
    path = frames.parent / name
    make_taken(kind, path)
    before = snapshot(frames.parent)
    with pytest.raises(OutputExistsError) as caught:
        build("frames", "out.npy", labels={"k": r"_(\d+)"}, overwrite=overwrite, progress=False)
    assert caught.value.message == f"{name} exists and was not made by daskstack; it was not touched"
    assert snapshot(frames.parent) == before
    assert sorted(os.listdir(frames.parent)) == sorted(["frames", name])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["itself", "link", "hard link", "side file"])
def test_an_output_that_is_an_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, *, overwrite: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for k in range(3):
        np.save(tmp_path / f"a{k}.npy", image(k))
    if how == "link":
        (tmp_path / "out.npy").symlink_to("a1.npy")
    elif how == "hard link":
        os.link("a1.npy", "out.npy")
    before = snapshot(tmp_path)
    out, labels = ("a.npy", {"1": "a.1"}) if how == "side file" else ("out.npy" if "link" in how else "a1.npy", None)
    if how == "side file":
        os.rename("a1.npy", "a.1.npy")
        before = snapshot(tmp_path)
    sources = sorted(p.name for p in tmp_path.glob("a*.npy"))
    with pytest.raises(OutputExistsError, match="is one of the inputs; it was not touched"):
        build(sources, out, labels=labels, overwrite=overwrite, progress=False)
    assert snapshot(tmp_path) == before


def test_the_same_build_again_does_nothing_and_succeeds(frames: Path) -> None:
    build("frames", "out.npy", progress=False)
    before = snapshot(frames.parent)
    for overwrite in (False, True):
        report = build("frames", "out.npy", threads=1, overwrite=overwrite, progress=False)
        assert report.files == 0
        assert "was there already, made from these files" in str(report)
    assert snapshot(frames.parent) == before


def test_the_same_build_after_a_file_changed_is_refused_and_names_it(frames: Path, expected: Array) -> None:
    build("frames", "out.npy", progress=False)
    os.utime(frames / "img_3.tif", ns=(1, 1))
    tifffile.imwrite(frames / "img_4.tif", image(40), photometric="minisblack")
    before = snapshot(frames.parent)
    with pytest.raises(OutputExistsError) as caught:
        build("frames", "out.npy", progress=False)
    assert caught.value.message == (
        "out.npy exists and was made before 2 files changed: frames/img_3.tif, frames/img_4.tif; it was not touched"
    )
    assert snapshot(frames.parent) == before
    build("frames", "out.npy", overwrite=True, progress=False)
    expected[4] = image(40)
    assert same(np.load("out.npy"), expected)


def test_overwrite_replaces_an_output_of_its_own_and_its_old_labels(frames: Path, expected: Array) -> None:
    build("frames", "out.npy", labels={"old": "1"}, progress=False)
    with pytest.raises(OutputExistsError, match="was made from other files or with other options; it was not touched"):
        build("frames", "out.npy", labels={"new": "2"}, limit=4, progress=False)
    build("frames", "out.npy", labels={"new": "2"}, limit=4, overwrite=True, progress=False)
    assert same(np.load("out.npy"), expected[:4])
    assert listing(frames.parent) == ["frames", "out.new.npy", "out.npy", "out.npy.index.csv", "out.npy.json"]


@pytest.mark.parametrize("at", [0, 8, 60, 200, -1])
def test_an_output_that_was_changed_is_not_its_own_any_more(frames: Path, at: int) -> None:
    build("frames", "out.npy", progress=False)
    data = bytearray(Path("out.npy").read_bytes())
    data[at] ^= 1
    Path("out.npy").write_bytes(data)
    with pytest.raises(OutputExistsError, match=r"out\.npy exists and was changed since daskstack made it"):
        build("frames", "out.npy", limit=3, overwrite=True, progress=False)
    assert Path("out.npy").read_bytes() == data


def test_a_label_file_that_was_changed_is_not_overwritten(frames: Path) -> None:
    build("frames", "out.npy", labels={"k": r"_(\d+)"}, progress=False)
    np.save("out.k.npy", np.arange(12) + 1)
    before = snapshot(frames.parent)
    with pytest.raises(OutputExistsError, match=r"out\.k\.npy exists and was changed since daskstack made it"):
        build("frames", "out.npy", labels={"k": r"_(\d+)"}, limit=3, overwrite=True, progress=False)
    assert snapshot(frames.parent) == before


def test_what_an_interrupted_publication_left_is_replaced(frames: Path, expected: Array) -> None:
    """The record comes first and lists the others, so that what is there can be told from a user's files."""
    build("frames", "out.npy", labels={"k": r"_(\d+)"}, progress=False)
    for gone in (["out.npy"], ["out.npy", "out.k.npy"], ["out.npy", "out.k.npy", "out.npy.index.csv"]):
        for name in gone:
            Path(name).unlink()
        build("frames", "out.npy", labels={"k": r"_(\d+)"}, progress=False)
        assert same(np.load("out.npy"), expected)
        assert np.load("out.k.npy").tolist() == list(range(12))


def test_a_user_s_file_that_appears_during_the_build_is_kept(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from daskstack.targets import NpyTarget

    real = NpyTarget.finish

    def finish(self: NpyTarget, *args: Any) -> list[tuple[str, str]]:
        Path("out.npy").write_bytes(b"mine")
        return real(self, *args)

    monkeypatch.setattr(NpyTarget, "finish", finish)
    with pytest.raises(OutputExistsError, match=r"out\.npy appeared during the build and was not touched"):
        build("frames", "out.npy", progress=False)
    assert Path("out.npy").read_bytes() == b"mine"


def test_a_user_s_folder_beside_the_output_survives(frames: Path, expected: Array) -> None:
    mine = frames.parent / "out.npy.part"
    mine.mkdir()
    (mine / "precious").write_bytes(b"mine")
    build("frames", "out.npy", progress=False)
    assert same(np.load("out.npy"), expected)
    assert listing(mine) == ["precious"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_where_the_staging_folder_should_be(frames: Path, kind: str) -> None:
    make_taken(kind, frames.parent / "out.npy.part")
    with pytest.raises(OutputError, match=r"out\.npy\.part is in the way: it is no folder"):
        build("frames", "out.npy", progress=False)


def test_a_staging_folder_of_a_killed_run_is_taken_over(frames: Path, expected: Array) -> None:
    plan = open_stack("frames").plan("out.npy")
    from daskstack import staging

    manifest = {"plan_id": plan.plan_id, "request": ""}
    held = staging.prepare(plan.out, manifest, open_stack("frames").listing, plan.target)
    plan.target.write(held.place, 3, image(99, (2, 5, 7)))
    os.close(held.lock)
    build("frames", "out.npy", progress=False)
    assert same(np.load("out.npy"), expected)
    assert listing(frames.parent) == ["frames", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_a_staging_folder_that_is_none_is_refused(frames: Path) -> None:
    plan = open_stack("frames").plan("out.npy")
    folder = frames.parent / "out.npy.part" / plan.plan_id
    folder.mkdir(parents=True)
    (folder / "precious").write_bytes(b"mine")
    with pytest.raises(OutputError, match="is no staging folder of this build"):
        build("frames", "out.npy", progress=False)
    assert listing(folder) == ["precious"]


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ("out", UsageError, "the output '.*out' has no known suffix"),
        ("out.hdf5", UsageError, r"let it end in \.npy"),
        ("nowhere/out.npy", OutputError, "there is no folder nowhere"),
    ],
)
def test_outputs_that_cannot_be(frames: Path, out: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build("frames", out, progress=False)
    with pytest.raises(UsageError, match=r"does not end in \.npy"):
        open_stack("frames").to_npy("out.zarr")


# -- the plan ---------------------------------------------------------------------------------------------------


def test_a_plan_prints_what_would_happen(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskstack.files.free_space", lambda _: 212_000_000_000)
    stack = open_stack("frames", files_per_block=5, labels={"k": r"_(\d+)"})
    size = sum(os.path.getsize(path) for path in stack.files)
    assert str(stack.plan("out.npy", threads=2)).splitlines() == [
        f"files   12 in frames ({size / 1000:.1f} kB)",
        "order   natural: img_0.tif, img_1.tif, img_2.tif ... img_11.tif",
        "array   (item 12, y 5, x 7) uint16, 840 B; item from img_0.tif",
        "labels  k (0 to 11)",
        "work    3 blocks of up to 5 files, 2 threads, at most 980 B memory",
        "disk    840 B in 4 files; free 212 GB",
    ]
    assert listing(frames.parent) == ["frames"]


def test_the_plan_id_is_that_of_the_bytes(frames: Path) -> None:
    def plan_id(stack: daskstack.Stack | None = None, **options: Any) -> str:
        return (stack or open_stack("frames")).plan("out.npy", **options).plan_id

    first = plan_id()
    assert plan_id(threads=1) == plan_id(scheduler="synchronous") == plan_id(overwrite=True) == first
    os.utime(frames / "img_3.tif", ns=(1, 1))
    assert plan_id() == first
    others = [
        plan_id(open_stack("frames")[::-1]),
        plan_id(open_stack("frames")[:5]),
        plan_id(open_stack("frames", files_per_block=5)),
        plan_id(open_stack("frames", labels={"k": "1"})),
        plan_id(open_stack("frames", labels={"k": "2"})),
        plan_id(open_stack("frames", join="concat")),
    ]
    assert len({first, *others}) == 7


def test_memory_limit_bounds_threads_and_blocks(tmp_path: Path) -> None:
    for k in range(200):
        np.save(tmp_path / f"{k}.npy", np.zeros((100, 100), "uint8"))
    stack = open_stack(tmp_path)
    free = stack.plan("out.npy", threads=8)
    assert (free.threads, int(np.diff(free.bounds).max()), free.memory) == (8, 4, 8 * 60_000)
    fewer = stack.plan("out.npy", threads=8, memory_limit="125 kB")
    assert (fewer.threads, int(np.diff(fewer.bounds).max()), fewer.memory) == (2, 4, 120_000)
    small = stack.plan("out.npy", threads=8, memory_limit=45_000)
    assert (small.threads, int(np.diff(small.bounds).max()), small.memory) == (1, 2, 40_000)
    with pytest.raises(UsageError, match=r"one block takes 30\.0 kB"):
        stack.plan("out.npy", memory_limit="29 kB")


def tifs(folder: Path, number: int) -> Path:
    folder.mkdir()
    for k in range(number):
        tifffile.imwrite(folder / f"{k}.tif", image(k), photometric="minisblack")
    return folder


def test_threads_are_the_cores_that_may_be_used_and_some_that_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = open_stack(tifs(tmp_path / "in", 40))
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert stack.plan("out.npy").threads == cores + min(cores, 4)
    for given, threads in (("1", 2), ("3", 6), ("7", 11), ("60", 40)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert stack.plan("out.npy").threads == threads
        assert stack.plan("out.npy", scheduler="processes").threads == min(40, int(given))
        assert stack.plan("out.npy", threads=5).threads == 5


def test_blocks_that_wait_for_the_disk_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    stack = open_stack(tifs(tmp_path / "in", 6))
    large = replace(stack, header=replace(stack.header, shape=(1 << 13, 1 << 12)))  # 64 MiB an item, 192 with scratch
    assert large.plan("out.npy").threads == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"scheduler": "twisted"}, "choose from: threads, synchronous, processes, tcp://"),
        ({"scheduler": "threads", "workers": 2}, "scheduler and workers are both given"),
        ({"workers": 0}, "workers=0"),
        ({"memory_limit": "lots"}, "'lots' is no number of bytes"),
        ({"memory_limit": 0}, "0 is no number of bytes"),
    ],
)
def test_options_that_cannot_be_meant(frames: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_stack("frames").plan("out.npy", **options)


def test_too_little_room_is_said_before_anything_is_written(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskstack.files.free_space", lambda _: 3000)
    with pytest.raises(NoSpaceError, match=r"out\.npy needs 3\.2 kB; 3\.0 kB are free on its disk \(or in its quota\)"):
        build("frames", "out.npy", progress=False)
    assert listing(frames.parent) == ["frames"]


def test_the_report_says_what_was_made(frames: Path) -> None:
    text = str(build("frames", "out.npy", labels={"k": r"_(\d+)"}, progress=False)).splitlines()
    assert text[0].startswith("done  out.npy (12, 5, 7) uint16, 840 B in 0.")
    assert text[1:] == [
        "      out.npy.index.csv (row to file)",
        "      out.npy.json (how it was made)",
        "      out.k.npy (label)",
        'read  np.load("out.npy", mmap_mode="r")',
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 5}, "chunks=5"),
        ({"chunks": "a"}, "chunks='a'"),
        ({"chunks": (1.5, 2, 7)}, r"chunks=\(1\.5, 2, 7\)"),
        ({"shards": 7}, "shards=7"),
        ({"compression": 3}, "compression=3"),
        ({"axes": 5}, "axes=5"),
        ({"zarr_format": 1}, "zarr_format=1"),
        ({"labels": {"zarr.json": "a"}}, "label 'zarr.json' would hide"),
        ({"on_error": "skip"}, "on_error='skip'"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named(frames: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        build("frames", "out.zarr", progress=False, **options)
    assert listing(frames.parent) == ["frames"]
