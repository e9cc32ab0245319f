"""The Zarr 3 group on disk: read equal by programs that are not ours, each shard written once and whole."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from conftest import DATA, Array, Run, image, need_root, published, same
from faultkit import calls_of, struck
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.blosc import decompress

import daskstack
from daskstack import blocks, build, open_stack
from daskstack.errors import BadFilesError, NoSpaceError, OutputError, OutputExistsError, SourceError, UsageError
from daskstack.targets.shard import Compression, chunk_regions, encode_chunk, encode_shard, parse_compression


def read_zarr(out: str | Path) -> Array:
    return np.asarray(zarr.open_group(str(out), mode="r")["data"][:])  # type: ignore[index]


def read_tensorstore(out: str | Path) -> Array:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{os.path.abspath(out)}/data"}}
    return np.asarray(tensorstore.open(spec).result().read().result())


READERS = {"zarr": read_zarr, "tensorstore": read_tensorstore}


def save(folder: Path, items: Array) -> Path:
    folder.mkdir()
    for k, item in enumerate(items):
        np.save(folder / f"{k}.npy", item)
    return folder


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (1, 5, 7)},
        {"chunks": (5, 2, 3)},
        {"chunks": (2, -1, -1), "shards": (4, 5, 7)},
        {"chunks": (99, 99, 99)},
    ],
    ids=str,
)
def test_other_programs_read_it_equal(
    frames: Path, expected: Array, options: dict[str, Any], scheduler: str, reader: str
) -> None:
    report = build("frames", "out.zarr", scheduler=scheduler, progress=False, **options)
    assert same(READERS[reader]("out.zarr"), expected)
    assert str(report).splitlines()[1:] == ['read  zarr.open_group("out.zarr", mode="r")["data"]']
    assert sorted(os.listdir(frames.parent)) == ["frames", "out.zarr"]


def test_zarrs_reads_it_equal(frames: Path, expected: Array) -> None:
    pytest.importorskip("zarrs", reason="its wheels are not there for every version of zarr and Python")
    build("frames", "out.zarr", chunks=(5, 2, 3), progress=False)
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import numpy as np, zarr, zarrs\n"
        "zarr.config.set({'codec_pipeline.path': 'zarrs.ZarrsCodecPipeline'})\n"
        "np.save('found.npy', zarr.open_group('out.zarr', mode='r')['data'][:])"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert same(np.load("found.npy"), expected)


def test_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(DATA / "banana*.tif", "banana.npy", progress=False)
    build(DATA / "banana*.tif", "banana.zarr", progress=False)
    assert same(read_zarr("banana.zarr"), np.load("banana.npy"))
    build(DATA / "membrane_2d_timelapse.tif", "membrane.zarr", join="concat", chunks=(2, 64, 64), progress=False)
    build(DATA / "membrane_2d_timelapse.tif", "membrane.npy", join="concat", progress=False)
    assert same(read_tensorstore("membrane.zarr"), np.load("membrane.npy"))


def test_xarray_opens_it_without_a_warning(frames: Path, expected: Array) -> None:
    build("frames", "out.zarr", labels=r"img_(?P<k>\d+)\.(?P<kind>\w+)", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = xarray.open_zarr("out.zarr")
        assert same(data["data"].values, expected)  # zeros stay zeros
    assert data["data"].dims == ("item", "y", "x")
    assert set(data.coords) == {"k", "kind", "file", "size", "mtime", "checksum"}
    assert data["k"].values.tolist() == list(range(12))
    assert data["kind"].values.tolist() == ["tif"] * 12
    assert data["file"].values.tolist() == [f"img_{k}.tif" for k in range(12)]
    assert data["data"].attrs == {}
    assert data.attrs["daskstack"]["shape"] == [12, 5, 7]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint64", "int32", "float16", "float64", "complex64", "datetime64[s]"],
)
def test_dtypes_and_values_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.chdir(tmp_path)
    items = (image(0, (7, 4, 5), "int64") % 9).astype(dtype)
    save(tmp_path / "in", items)
    build("in", "out.zarr", chunks=(2, 3, 3), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr, that dates are new to the specification
        assert same(read_zarr("out.zarr"), items)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_grid_against_numpy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("grid")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple))
    count = data.draw(st.integers(1, 9))
    items = image(data.draw(st.integers(0, 5)), (count, *shape), "int32")
    save(folder / "in", items)
    chunks = data.draw(st.tuples(*(st.integers(1, n + 1) for n in items.shape)))
    fitted = blocks.fit_chunks(items.shape, chunks)
    shards = tuple(c * data.draw(st.integers(1, 3)) for c in fitted)
    compression = data.draw(st.sampled_from(["none", "zstd", "gzip", "blosc:lz4", None]))
    written: list[str] = []
    real = os.rename

    def rename(source: str, target: str) -> None:
        written.append(os.path.basename(target))
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        build(
            folder / "in", folder / "out.zarr", chunks=chunks, shards=shards, compression=compression,
            scheduler="synchronous", progress=False,
        )  # fmt: skip
    assert same(read_zarr(folder / "out.zarr"), items)
    assert same(read_tensorstore(folder / "out.zarr"), items)
    shards_on_disk = sorted(n for n in os.listdir(folder / "out.zarr" / "data") if n.startswith("c."))
    assert sorted(n for n in written if n.startswith("c.")) == shards_on_disk  # each once
    assert len(shards_on_disk) == int(np.prod([-(-n // s) for n, s in zip(items.shape, shards, strict=True)]))


def test_by_default_an_image_is_a_chunk_of_lz4_and_shuffled_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    y, x = np.indices((128, 128))
    noise = np.random.default_rng(0).normal(0, 6, (70, 128, 128))
    items = (500 + 900 * np.exp(-((y - 50) ** 2 + (x - 70) ** 2) / 900) + noise).astype("uint16")  # as a camera's
    save(tmp_path / "in", items)
    build("in", "out.zarr", progress=False)
    for read in READERS.values():
        assert same(read("out.zarr"), items)
    described = json.loads(Path("out.zarr/data/zarr.json").read_text())
    assert described["chunk_grid"]["configuration"]["chunk_shape"] == [2, 128, 128]
    sharding = described["codecs"][0]["configuration"]
    assert sharding["chunk_shape"] == [1, 128, 128]
    assert sharding["codecs"][1] == {
        "name": "blosc",
        "configuration": {"typesize": 2, "cname": "lz4", "clevel": 1, "shuffle": "bitshuffle", "blocksize": 0},
    }
    stored = sum(path.stat().st_size for path in Path("out.zarr/data").glob("c.*"))
    assert 1.7 < items.nbytes / stored < 1.8  # 1.15 where bytes are shuffled for elements


@pytest.mark.parametrize(
    "text", ["none", "zstd", "zstd:5", "gzip:1", "blosc", "blosc:lz4", "blosc:zstd:5:shuffle", "blosc:zlib:3:none"]
)
def test_compressions(frames: Path, expected: Array, text: str) -> None:
    build("frames", "out.zarr", compression=text, progress=False)
    for read in READERS.values():
        assert same(read("out.zarr"), expected)
    codecs = json.loads(Path("out.zarr/data/zarr.json").read_text())["codecs"][0]["configuration"]["codecs"]
    assert codecs[0]["name"] == "bytes"
    assert codecs[-1]["name"] == "crc32c"
    assert [c["name"] for c in codecs[1:-1]] == [name for name in [text.split(":", maxsplit=1)[0]] if name != "none"]


@pytest.mark.parametrize(
    "text", ["lzw", "zstd:99", "blosc:lzma", "blosc:lz4:5:twist", "none:1", "zstd:1:2", "blosc:lz4:x"]
)
def test_compressions_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=f"compression='{text}'"):
        parse_compression(text)


@pytest.mark.parametrize("dtype", ["u1", "u2", "f8", "V3", "c16", "U100"])
@pytest.mark.parametrize(("shuffle", "flag"), [("none", 0), ("shuffle", 1), ("bitshuffle", 4)])
def test_blosc_shuffles_elements_as_wide_as_the_dtype(dtype: str, shuffle: str, flag: int) -> None:
    chunk = np.repeat(np.arange(64, dtype="u1"), 6 * 400).view(dtype)
    encoded = Compression("blosc", shuffle=shuffle).encode(chunk, chunk.itemsize)
    assert encoded[2] & 5 == flag
    assert encoded[3] == (chunk.itemsize if chunk.itemsize < 256 else 1)  # the widest that blosc knows
    assert decompress(encoded) == chunk.tobytes()
    summed = encode_chunk(chunk, chunk.shape, Compression("blosc", shuffle=shuffle))  # as Zarr 2 has it
    assert decompress(summed)[:-4] == chunk.tobytes()
    assert summed[3] == {"f8": 4, "c16": 4, "V3": 1, "U100": 4}.get(dtype, chunk.itemsize)  # 4 bytes are its checksum's


def test_a_shard_is_what_the_specification_says() -> None:
    part = image(1, (3, 4), "uint8")
    pieces = encode_shard(part, (2, 2), (4, 4), Compression("none"))
    data = b"".join(pieces)
    index = np.frombuffer(data[-4 - 8 * 8 : -4], "<u8").reshape(2, 2, 2)
    assert index.tolist() == [[[0, 8], [8, 8]], [[16, 8], [24, 8]]]
    assert data[:4] == part[:2, :2].tobytes()
    assert data[16:20] == bytes([*part[2, :2].tolist(), 0, 0])  # filled up at the edge of the array
    sparse = b"".join(encode_shard(part[:2, :2], (2, 2), (4, 4), Compression("none")))
    gaps = np.frombuffer(sparse[-4 - 8 * 8 : -4], "<u8").reshape(2, 2, 2)
    assert gaps[0, 0].tolist() == [0, 8]
    assert (gaps.reshape(-1, 2)[1:] == 2**64 - 1).all()
    assert list(chunk_regions((3, 4), (2, 3)))[-1] == (slice(2, 3), slice(3, 4))


def test_a_flipped_byte_is_found_by_the_checksum(frames: Path) -> None:
    build("frames", "out.zarr", chunks=(12, 5, 7), progress=False)
    shard = Path("out.zarr/data/c.0.0.0")
    data = bytearray(shard.read_bytes())
    for at in (0, len(data) // 2, len(data) - 1, len(data) - 10):
        damaged = data.copy()
        damaged[at] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(Exception, match=r"(?i)checksum|crc32c"):
            read_zarr("out.zarr")


def test_unequal_files_joined_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [3, 2, 4, 1, 3]
    whole = image(1, (sum(rows), 6))
    for k, part in enumerate(np.split(whole, np.cumsum(rows)[:-1])):
        np.save(tmp_path / f"c{k}.npy", part)
    for k in range(20):
        build("c*.npy", f"out{k}.zarr", join="concat", chunks=(2, 4), shards=(4, 8), threads=8, progress=False)
        assert same(read_zarr(f"out{k}.zarr"), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": (5, 7)}, "chunks 5,7 for an array of 3 axes"),
        ({"chunks": (1, 0, 7)}, "chunks 1,0,7 for an array of 3 axes"),
        ({"chunks": (2, 2, 2), "shards": (3, 4, 7)}, "the nearest that fits: 4,4,8"),
        ({"compression": "lzw"}, "compression='lzw'"),
    ],
)
def test_grids_that_cannot_be_are_refused_before_anything_is_written(
    frames: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build("frames", "out.zarr", progress=False, **options)
    with pytest.raises(UsageError, match=f"{next(iter(options))} with a .npy output"):
        build("frames", "out.npy", progress=False, **options)
    assert os.listdir(frames.parent) == ["frames"]


def test_a_chunk_over_2_gib_is_split_or_refused() -> None:
    shape = (2, 1 << 16, 1 << 16)
    assert math.prod(blocks.choose_chunks(shape[:1], shape[1:], 1)) <= blocks.MOST_CHUNK_NBYTES
    from daskstack.targets import Tiling, ZarrTarget

    with pytest.raises(UsageError, match=r"takes 4\.3 GB; codecs take 2 GiB"):
        ZarrTarget.make(shape, np.dtype("u1"), ("item", "y", "x"), 1, Tiling(1, chunks=(1, -1, -1)))


def test_what_zarr_cannot_hold_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "in", np.zeros((2, 3), [("a", "<f4"), ("b", "<i2")]))
    with pytest.raises(UsageError, match="no specification for records"):
        build("in", "out.zarr", progress=False)
    save(tmp_path / "more", image(0, (2, 3, 4)))
    with pytest.raises(UsageError, match="label y has the name of an axis"):
        build("more", "out.zarr", labels={"y": r"(\d)"}, progress=False)
    assert sorted(os.listdir(tmp_path)) == ["in", "more"]


# -- what is there already, and what happens in between ---------------------------------------------------------


def test_the_same_build_again_and_overwrite(frames: Path, expected: Array) -> None:
    build("frames", "out.zarr", labels={"k": r"_(\d+)"}, progress=False)
    assert build("frames", "out.zarr", labels={"k": r"_(\d+)"}, progress=False).files == 0
    with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
        build("frames", "out.zarr", limit=5, progress=False)
    build("frames", "out.zarr", limit=5, overwrite=True, progress=False)
    assert same(read_zarr("out.zarr"), expected[:5])
    os.utime(frames / "img_3.tif", ns=(1, 1))
    with pytest.raises(OutputExistsError, match=r"made before 1 file changed: frames/img_3\.tif"):
        build("frames", "out.zarr", limit=5, progress=False)
    assert sorted(os.listdir(frames.parent)) == ["frames", "out.zarr"]


def damage(what: str) -> None:
    shard = Path("out.zarr/data/c.0.0.0")
    if what == "user's file":
        Path("out.zarr/notes.txt").write_bytes(b"mine")
    elif what == "user's array":
        zarr.create_array("out.zarr/mine", shape=(3,), dtype="u1")
    elif what == "user's folder":
        Path("out.zarr/mine").mkdir()
    elif what == "user's link":
        Path("out.zarr/mine").symlink_to("/")
    elif what == "shard gone":
        shard.unlink()
    elif what == "shard changed":
        data = bytearray(shard.read_bytes())
        data[0] ^= 1
        shard.write_bytes(data)
    elif what == "label changed":
        path = Path("out.zarr/k/c/0")
        path.write_bytes(path.read_bytes()[::-1])
    else:
        path = Path("out.zarr/zarr.json")
        path.write_text(path.read_text().replace('"join": "stack"', '"join": "steck"'))


@pytest.mark.parametrize(
    "what",
    [
        "user's file",
        "user's array",
        "user's folder",
        "user's link",
        "shard gone",
        "shard changed",
        "label changed",
        "record",
    ],
)
def test_a_group_that_was_changed_is_not_its_own_any_more(frames: Path, what: str) -> None:
    build("frames", "out.zarr", labels={"k": r"_(\d+)"}, progress=False)
    damage(what)
    before = {p: p.read_bytes() for p in Path("out.zarr").rglob("*") if p.is_file()}
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match="it was not touched"):
            build("frames", "out.zarr", limit=3, overwrite=overwrite, progress=False)
    assert {p: p.read_bytes() for p in Path("out.zarr").rglob("*") if p.is_file()} == before


def test_bad_files_leave_nothing_under_the_final_name(frames: Path) -> None:
    (frames / "img_5.tif").write_bytes(b"")
    with pytest.raises(BadFilesError, match=r"out\.zarr not made"):
        build("frames", "out.zarr", progress=False)
    assert published(frames.parent) == ["frames"]


def test_what_a_killed_run_left_in_the_data_s_folder_is_not_published(frames: Path, expected: Array) -> None:
    from daskstack import staging

    plan = open_stack("frames").plan("out.zarr", chunks=(1, 5, 7))
    manifest = {"plan_id": plan.plan_id, "request": ""}
    held = staging.prepare(plan.out, manifest, open_stack("frames").listing, plan.target)
    plan.target.write(held.place, 0, image(99, (1, 5, 7)))
    place = Path(held.place) / "data.zarr" / "data"
    (place / f"c.1.0.0.{'0' * 32}").write_bytes(b"half a shard")
    (place / "zarr.json").write_bytes(b"old")
    os.close(held.lock)
    build("frames", "out.zarr", chunks=(1, 5, 7), progress=False)
    assert same(read_zarr("out.zarr"), expected)
    assert sorted(os.listdir("out.zarr/data")) == sorted([*(f"c.{k}.0.0" for k in range(12)), "zarr.json"])


def test_a_shard_that_is_missing_is_no_zeros(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from daskstack.targets import ZarrTarget

    real = ZarrTarget.write
    monkeypatch.setattr(
        ZarrTarget, "write", lambda self, folder, start, block: start == 3 or real(self, folder, start, block)
    )
    with pytest.raises(OutputError, match=r"files of the data are missing: c\.3\.0\.0"):
        build("frames", "out.zarr", chunks=(1, 5, 7), progress=False)
    assert published(frames.parent) == ["frames"]


@pytest.mark.parametrize("version", ["3", "2"])
def test_sigkill_before_any_call_leaves_nothing_under_the_final_name(
    frames: Path, expected: Array, version: str
) -> None:
    command = ["build", "frames", "out.zarr", "-q", "--chunks", "1,1,2", "--zarr-format", version]
    command += ["--scheduler", "synchronous"]  # so that each run makes the same calls
    calls = calls_of(*command)
    for n in (*range(1, calls, calls // 5), *range(calls - 6, calls + 1, 3)):
        shutil.rmtree("out.zarr")
        assert struck("SIGKILL", n, *command) == (-signal.SIGKILL, "")
        assert not Path("out.zarr").exists() or same(read_zarr("out.zarr"), expected)
        assert struck("SIGKILL", 0, *command)[0] == 0
        assert same(read_zarr("out.zarr"), expected)
        assert sorted(os.listdir(frames.parent)) == ["frames", "out.zarr"]


@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize("when", ["before", "writing"])
def test_a_full_disk_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, version: int
) -> None:
    need_root("mounts a small file system")
    rng = np.random.default_rng(0)
    save(tmp_path / "in", rng.integers(0, 1 << 16, (8, 256, 1024), dtype="uint16"))
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(disk)], check=True)
    try:
        if when == "writing":
            monkeypatch.setattr("daskstack.files.free_space", lambda _: 1 << 40)
        with pytest.raises(NoSpaceError):
            build(tmp_path / "in", disk / "out.zarr", zarr_format=version, progress=False)
        assert published(disk) == []
        if when == "before":
            assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_on_the_command_line(frames: Path, expected: Array, daskstack: Run) -> None:
    done = daskstack(
        "build", "frames", "out.zarr", "--chunks", "4,5,7", "--compression", "zstd:3", "--shards", "8,-1,-1"
    )
    assert done.returncode == 0, done.stderr
    assert 'read  zarr.open_group("out.zarr", mode="r")["data"]' in done.stdout
    assert same(read_zarr("out.zarr"), expected)
    assert sorted(n for n in os.listdir("out.zarr/data") if n.startswith("c.")) == ["c.0.0.0", "c.1.0.0"]
    assert "array   (item 12, y 5, x 7) uint16, 840 B in out.zarr\n" in daskstack("info", "out.zarr").stdout
    plan = daskstack("plan", "frames", "more.zarr").stdout
    assert "disk    840 B in 11 files; free " in plan
    build("frames", "more.zarr", progress=False)
    assert sum(len(names) for _, _, names in os.walk("more.zarr")) == 11
    assert "write whole numbers with commas" in daskstack("build", "frames", "x.zarr", "--chunks", "a,b").stderr


# -- Zarr 2 -----------------------------------------------------------------------------------------------------

EVERY_COMPRESSION = [
    "none", "zstd:0", "zstd", "zstd:9", "gzip", "gzip:0", "gzip:9", "blosc:lz4", "blosc:lz4hc:3:none",
    "blosc:zstd:5:shuffle", "blosc:zlib", "blosc:blosclz:9:bitshuffle",
]  # fmt: skip


def read_tensorstore_2(out: str | Path) -> Array:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{os.path.abspath(out)}/data"}}
    return np.asarray(tensorstore.open(spec).result().read().result())


@pytest.mark.parametrize("text", [None, *EVERY_COMPRESSION])
def test_zarr_2_is_read_equal_by_zarr_python(frames: Path, expected: Array, text: str | None) -> None:
    build("frames", "out.zarr", zarr_format=2, compression=text, chunks=(5, 3, 7), progress=False)
    array: Any = zarr.open_group("out.zarr", mode="r", zarr_format=2)["data"]
    assert same(array[:], expected)
    assert (array.chunks, array.metadata.zarr_format) == ((5, 3, 7), 2)
    names = sorted(os.listdir("out.zarr/data"))
    assert names == [".zarray", ".zattrs", *sorted(f"{i}.{k}.0" for i in range(3) for k in range(2))]
    if text is None or text.startswith(("zstd", "gzip")):  # it knows of no checksums beside those of the codecs
        assert same(read_tensorstore_2("out.zarr"), expected)
    described = json.loads(Path("out.zarr/data/.zarray").read_text())
    kind = (text or "zstd").split(":")[0]
    assert described["compressor"]["id"] == {"none": "crc32c"}.get(kind, kind)
    assert described["fill_value"] is None
    assert described["filters"] == ([{"id": "crc32c", "location": "end"}] if kind == "blosc" else None)


@pytest.mark.parametrize("text", EVERY_COMPRESSION)
def test_no_flipped_bit_of_any_zarr_2_chunk_gives_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    items = np.random.default_rng(0).integers(0, 4, (3, 8, 12)).astype("uint16")
    save(tmp_path / "in", items)
    build("in", "out.zarr", zarr_format=2, compression=text, chunks=(2, 8, 12), progress=False)
    array: Any = zarr.open_group("out.zarr", mode="r")["data"]
    for chunk in (Path("out.zarr/data/0.0.0"), Path("out.zarr/data/1.0.0")):  # the second is filled up
        data = chunk.read_bytes()
        found = 0
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            chunk.write_bytes(damaged)
            try:
                read = array[:]
            except Exception:  # noqa: BLE001  # each codec has errors of its own
                found += 1
            else:
                assert same(read, items), at  # bits of a codec's header that decide nothing
        assert found > len(data) / 2
        chunk.write_bytes(data)
    assert same(array[:], items)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_zarr_2_chunks_against_numpy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("two")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple))
    items = image(data.draw(st.integers(0, 5)), (data.draw(st.integers(1, 9)), *shape), "int32")
    save(folder / "in", items)
    chunks = data.draw(st.none() | st.tuples(*(st.sampled_from([-1, 1, 2, 3, n, n + 1]) for n in items.shape)))
    compression = data.draw(st.sampled_from([None, "none", "gzip", "blosc"]))
    build(
        folder / "in", folder / "out.zarr", zarr_format=2, chunks=chunks, compression=compression,
        scheduler="synchronous", progress=False,
    )  # fmt: skip
    assert same(read_zarr(folder / "out.zarr"), items)
    array: Any = zarr.open_group(str(folder / "out.zarr"), mode="r")["data"]
    if chunks is not None:
        assert array.chunks == tuple(n if c == -1 else min(c, n) for c, n in zip(chunks, items.shape, strict=True))
    files = [n for n in os.listdir(folder / "out.zarr" / "data") if not n.startswith(".")]
    assert len(files) == int(np.prod([-(-n // c) for n, c in zip(items.shape, array.chunks, strict=True)]))


@pytest.mark.parametrize("compression", [None, "none", "blosc"])
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "float16", "complex64", "datetime64[s]", "U3", "S5", "V7", [("a", "<f4"), ("b", "<i2")]],
    ids=str,
)
def test_zarr_2_dtypes_and_values_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, compression: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    size = np.dtype(dtype).itemsize
    numbers = image(1, (7, 4, 5), "int64") % 9
    items: Array = numbers.astype(dtype) if isinstance(dtype, str) and dtype != "V7" else np.zeros((7, 4, 5), dtype)
    if items.dtype.names or dtype == "V7":
        items = np.frombuffer((np.arange(140 * size) % 100).astype("u1").tobytes(), dtype).reshape(7, 4, 5)
    save(tmp_path / "in", items)
    build("in", "out.zarr", zarr_format=2, chunks=(2, 3, 3), compression=compression, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of zarr, that some kinds of texts and dates are not those of version 3
        found = read_zarr("out.zarr")
        assert daskstack.open("out.zarr").dtype == items.dtype
    assert found.dtype == items.dtype
    assert found.tobytes() == items.tobytes()


SUBARRAYS = [("a", "<f8", (4,))]
APART = np.dtype({"names": ["a", "b"], "formats": ["<f8", "<i2"], "offsets": [0, 8], "itemsize": 16})


@pytest.mark.parametrize(
    ("dtype", "version", "message"),
    [
        (SUBARRAYS, 2, "Zarr cannot hold [('a', '<f8', (4,))]: "),
        (APART, 2, f"Zarr cannot hold {APART}: it would become [('a', '<f8'), ('b', '<i2')]"),
        (SUBARRAYS, 3, "Zarr 3 has no specification for records"),
    ],
    ids=str,
)
def test_what_would_be_read_as_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, version: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "in", np.zeros((2, 3), dtype))
    with pytest.raises(UsageError) as caught:
        build("in", "out.zarr", zarr_format=version, progress=False)
    assert str(caught.value).startswith(message)
    assert os.listdir(tmp_path) == ["in"]


def labels_of_every_kind(path: str) -> dict[str, Any]:
    k = int(path[4:].split(".", maxsplit=1)[0])
    return {"text": f"n\N{LATIN SMALL LETTER E WITH ACUTE}{k}", "even": k % 2 == 0, "k": k, "half": k / 2}


@pytest.mark.parametrize("version", [2, 3])
def test_labels_of_every_kind_are_coordinates_for_xarray(frames: Path, expected: Array, version: int) -> None:
    build("frames", "out.zarr", labels=labels_of_every_kind, zarr_format=version, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = xarray.open_zarr("out.zarr")
        assert same(data["data"].values, expected)
        assert data["data"].dims == ("item", "y", "x")
        assert set(data.coords) == {"text", "even", "k", "half", "file", "size", "mtime", "checksum"}
        assert data["text"].values.tolist() == [f"n\N{LATIN SMALL LETTER E WITH ACUTE}{k}" for k in range(12)]
        assert data["even"].dtype == bool
        assert data["even"].values.tolist() == [k % 2 == 0 for k in range(12)]
        assert data["k"].dtype == np.int64
        assert data["k"].values.tolist() == list(range(12))
        assert data["half"].values.tolist() == [k / 2 for k in range(12)]
    out = daskstack.open("out.zarr")
    assert {name: v.dtype.kind for name, v in out.labels.items()} == {"text": "U", "even": "b", "k": "i", "half": "f"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shards": (2, 5, 7)},
            "shards with Zarr 2, which has none\nnext  leave shards out; each chunk is a file",
        ),
        ({"zarr_format": 4}, "zarr_format=4\nnext  choose 2 or 3"),
        ({"chunks": (0, 1, 1)}, "chunks 0,1,1 for an array of 3 axes\nnext  give a size, or -1, for each axis"),
    ],
    ids=str,
)
def test_zarr_2_options_that_cannot_be_meant(frames: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build("frames", "out.zarr", progress=False, **{"zarr_format": 2, **options})
    assert str(caught.value) == message
    assert os.listdir(frames.parent) == ["frames"]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 2)])
def test_one_version_replaces_the_other(frames: Path, expected: Array, before: int, after: int) -> None:
    build("frames", "out.zarr", zarr_format=before, progress=False)
    assert build("frames", "out.zarr", zarr_format=before, progress=False).was_there
    limit = 5 if before == after else None
    with pytest.raises(OutputExistsError, match="was made from other files or with other options"):
        build("frames", "out.zarr", zarr_format=after, limit=limit, progress=False)
    assert same(read_zarr("out.zarr"), expected)
    build("frames", "out.zarr", zarr_format=after, limit=limit, overwrite=True, progress=False)
    assert same(read_zarr("out.zarr"), expected[:limit])
    assert Path("out.zarr/zarr.json").exists() == (after == 3)
    assert Path("out.zarr/.zgroup").exists() == (after == 2)
    assert daskstack.open("out.zarr").record["zarr_format"] == after
    assert sorted(os.listdir(frames.parent)) == ["frames", "out.zarr"]


def damage_2(what: str) -> None:
    group: Any = zarr.open_group("out.zarr", mode="r+")
    if what == "attribute":
        group.attrs["mine"] = 1
    elif what == "attribute of the data":
        group["data"].attrs["mine"] = 1
    elif what == "user's file":
        Path("out.zarr/data/notes.txt").write_bytes(b"mine")
    elif what == "user's array":
        group.create_array("mine", shape=(3,), chunks=(3,), dtype="u1")
    elif what == "value":
        group["data"][0, 0, 0] = 9
    elif what == "label":
        group["k"][0] = 9
    elif what == "chunk gone":
        next(p for p in Path("out.zarr/data").iterdir() if p.name in ("0.0.0", "c.0.0.0")).unlink()
    else:
        path = Path("out.zarr", "zarr.json" if Path("out.zarr/zarr.json").exists() else ".zattrs")
        path.write_text(path.read_text().replace('"join": "stack"', '"join": "steck"'))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "what",
    [
        "attribute",
        "attribute of the data",
        "user's file",
        "user's array",
        "value",
        "label",
        "chunk gone",
        "record",
    ],
)
def test_a_group_of_either_version_that_zarr_changed_is_not_its_own_any_more(
    frames: Path, what: str, version: int
) -> None:
    build("frames", "out.zarr", labels={"k": r"_(\d+)"}, zarr_format=version, progress=False)
    damage_2(what)
    before = {p: p.read_bytes() for p in Path("out.zarr").rglob("*") if p.is_file()}
    with pytest.raises(OutputExistsError, match="it was not touched"):
        build("frames", "out.zarr", limit=3, overwrite=True, progress=False)
    with pytest.raises(SourceError, match=r"^out\.zarr was not made by daskstack, or was changed since"):
        daskstack.open("out.zarr")
    assert {p: p.read_bytes() for p in Path("out.zarr").rglob("*") if p.is_file()} == before


def test_the_plan_of_a_zarr_2_counts_its_files(frames: Path, daskstack: Run) -> None:
    options = ("--zarr-format", "2", "--chunks", "4,5,7", "--labels", r"_(?P<k>\d+)")
    plan = daskstack("plan", "frames", "out.zarr", *options)
    assert plan.returncode == 0, plan.stderr
    assert daskstack("build", "frames", "out.zarr", *options).returncode == 0
    files = sum(len(names) for _, _, names in os.walk("out.zarr"))
    assert f"disk    840 B in {files} files; free " in plan.stdout
    done = daskstack("build", "frames", "more.zarr", "--zarr-format", "2", "--shards", "4,5,7")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: shards with Zarr 2, which has none\nnext  leave shards out; each chunk is a file\n"
    )  # fmt: skip
