"""The fast path gives exactly what the library gives: the same pixels, or the same refusal."""

from __future__ import annotations

import os
import struct
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from conftest import DATA, Array, image
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from daskstack import open_stack
from daskstack.ahead import opened_ahead
from daskstack.readers import NpyReader, Reader, TiffReader
from daskstack.readers.layout import LayoutReader


def taken_by(reader: LayoutReader, path: str, out: Array) -> bool:
    with closing(opened_ahead([path])) as opened:
        return any(reader.read(descriptor, out) for descriptor in opened)


def both_ways(reader: Reader, first: str, paths: list[str]) -> int:
    """Read files with and without the layout of the first; all must agree. How many the fast path took."""
    due, layout = reader.probe(first), reader.layout(first)
    assert layout is not None
    taken = 0
    for path in paths:
        fast, slow = np.zeros((2, due.rows, *due.shape), due.dtype)
        took = taken_by(layout.reader(), path, fast)
        bad = reader.read_into([path], slow, due)
        assert not (took and bad), f"{path} was taken, though: {bad}"
        if took:
            assert np.array_equal(fast, slow)
            taken += 1
        through_both = np.zeros_like(slow)
        assert [b.message for b in reader.read_into([path], through_both, due, fast=layout.reader())] == [
            b.message for b in bad
        ]
        assert bad or np.array_equal(through_both, slow)
        part = np.zeros_like(slow[1:])
        if not bad and len(part):
            assert reader.read_into([path], part, due, [(due.rows, 1, due.rows)], layout.reader()) == []
            assert np.array_equal(part, slow[1:])
    return taken


def tiffs(
    folder: Path, options: list[dict[str, Any]], shape: tuple[int, ...] = (9, 14), dtype: str = "uint16"
) -> list[str]:
    paths = [str(folder / f"{k}.tif") for k in range(len(options))]
    for k, (path, more) in enumerate(zip(paths, options, strict=True)):
        tifffile.imwrite(path, image(k, shape, dtype), **{"photometric": "minisblack", **more})
    return paths


IMAGEJ = [
    {"imagej": True, "byteorder": ">", "metadata": {"Info": "note; " * k, "min": 3.0 * 10**k, "max": 70.5}}
    for k in range(5)
]
SOFTWARE = [{"software": f"v{k}", "metadata": None} for k in range(3)]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ([{}] * 4, 4),
        ([{"byteorder": ">"}] * 4, 4),
        ([{"bigtiff": True}] * 4, 4),
        ([{"bigtiff": True, "byteorder": ">"}] * 4, 4),
        ([{"rowsperstrip": 2}] * 4, 4),
        ([{"metadata": None, "rowsperstrip": 9}] * 3, 3),
        ([{"datetime": f"2026:01:0{k + 1} 00:00:00"} for k in range(4)], 4),
        ([{"resolution": (10 + k, 3)} for k in range(4)], 4),
        (IMAGEJ, 5),
        (SOFTWARE, 1),
        ([{"description": f"sample {k}", "metadata": None} for k in range(3)], 1),
        (
            [
                {},
                {"byteorder": ">"},
                {"bigtiff": True},
                {"compression": "zlib"},
                {"tile": (16, 16)},
                {"rowsperstrip": 1},
            ],
            1,
        ),
        ([{}, {"photometric": "miniswhite"}, {"extratags": [(65000, "s", 0, "mine", True)]}], 1),
    ],
)
def test_kinds_of_tiff(tmp_path: Path, options: list[dict[str, Any]], taken: int) -> None:
    paths = tiffs(tmp_path, options)
    assert both_ways(TiffReader(), paths[0], paths) == taken


@pytest.mark.parametrize(("join", "rows"), [("stack", 1), ("concat", 3)])
@pytest.mark.parametrize("options", [{}, {"metadata": None}, {"imagej": True}, {"bigtiff": True, "byteorder": ">"}])
def test_pages_in_one_run_of_files_whose_every_other_byte_is_the_same(
    tmp_path: Path, options: dict[str, Any], join: Any, rows: int
) -> None:
    paths = [str(tmp_path / f"{k}.tif") for k in range(5)]
    for k, path in enumerate(paths):
        tifffile.imwrite(path, image(k, (3, 9, 14)), photometric="minisblack", **options)
    with tifffile.TiffFile(paths[0]) as tif:
        places = [tif.pages[k].offset for k in range(len(tif.pages))]
    layout = TiffReader(join).layout(paths[0])
    assert layout is not None
    assert layout.rows == rows
    with open(paths[3], "r+b") as f:  # another size of its last page
        f.seek(places[-1] + 40)
        f.write(b"\x07")
    with open(paths[4], "ab") as f:
        f.write(b"more")
    assert both_ways(TiffReader(join), paths[0], paths) == (3 if len(places) > 1 else 4)


def test_pages_of_which_one_lies_among_the_pixels_are_no_one_run(tmp_path: Path) -> None:
    """What is not around the pixels is not compared."""
    path = tmp_path / "0.tif"
    tifffile.imwrite(path, image(0, (3, 40, 40)), photometric="minisblack", metadata=None)
    assert TiffReader().layout(str(path)) is not None
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as tif:
        first, second = tif.pages.first, tif.pages[1].offset
        link = first.offset + 2 + 12 * len(first.tags)
        begin = first.dataoffsets[0] + 100
    length = 2 + 12 * int.from_bytes(data[second : second + 2], "little") + 4
    data[begin : begin + length] = data[second : second + length]
    struct.pack_into("<I", data, link, begin)
    path.write_bytes(data)
    assert tifffile.imread(path).shape == (3, 40, 40)
    assert TiffReader().layout(str(path)) is None


def test_pages_in_one_directory_as_imagej_writes_them(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{k}.tif") for k in range(3)]
    for k, path in enumerate(paths):
        metadata = {"Info": "note; " * k}
        tifffile.imwrite(path, image(k, (3, 9, 14)), photometric="minisblack", imagej=True, metadata=metadata)
        with tifffile.TiffFile(path) as tif:
            at = tif.pages.first.offset + 2 + 12 * len(tif.pages.first.tags)
        data = bytearray(Path(path).read_bytes())
        struct.pack_into("<I", data, at, 0)
        Path(path).write_bytes(data)
    for join, rows in (("stack", 1), ("concat", 3)):
        reader = TiffReader(join)  # type: ignore[arg-type]
        layout = reader.layout(paths[0])
        assert layout is not None
        assert layout.rows == rows
        assert both_ways(reader, paths[0], paths) == 3


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "float32", "float64", "complex64"])
@pytest.mark.parametrize("byteorder", "<>")
def test_dtypes_in_both_orders(tmp_path: Path, dtype: str, byteorder: str) -> None:
    paths = tiffs(tmp_path, [{"byteorder": byteorder}] * 3, dtype=dtype)
    assert both_ways(TiffReader(), paths[0], paths) == 3


def test_real_files_are_taken() -> None:
    """ImageJ's own: big-endian, the pixels at another place in each."""
    names = ["banana0002.tif", "banana0003.tif", "banana0010.tif"]
    assert both_ways(TiffReader(), str(DATA / names[0]), [str(DATA / n) for n in names]) == 3
    stack = open_stack(DATA / "banana*.tif")
    assert np.array_equal(np.asarray(stack.array), np.stack([tifffile.imread(DATA / n) for n in names]))


def test_a_directory_behind_the_pixels(tmp_path: Path) -> None:
    """As libtiff writes: header, pixels, directory."""
    paths = []
    for k in range(3):
        pixels = image(k).tobytes()
        begin = 8 + len(pixels) + k * 2  # at another place in each
        entries = [
            (256, 4, 7),
            (257, 4, 5),
            (258, 3, 16),
            (259, 3, 1),
            (262, 3, 1),
            (273, 4, 8),
            (278, 4, 5),
            (279, 4, 70),
        ]
        directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", c, t, 1, v) for c, t, v in entries)
        paths.append(str(tmp_path / f"{k}.tif"))
        Path(paths[-1]).write_bytes(
            b"II*\0" + struct.pack("<I", begin) + pixels + bytes(k * 2) + directory + struct.pack("<I", 0)
        )
        assert np.array_equal(tifffile.imread(paths[-1]), image(k))
    assert both_ways(TiffReader(), paths[0], paths) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byteorder": ">", "rowsperstrip": 2},
        {"bigtiff": True, "metadata": None, "datetime": "2026:01:01 00:00:00"},
        {"imagej": True, "byteorder": ">", "metadata": {"Info": "a note", "min": 1.0, "max": 9.0}},
    ],
    ids=str,
)
def test_every_flipped_byte_and_every_cut_of_a_header(tmp_path: Path, options: dict[str, Any]) -> None:
    (first,) = tiffs(tmp_path, [options], (5, 7))
    data = Path(first).read_bytes()
    flipped = [
        data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
        for at in range(len(data) - image(0).nbytes)
        for flip in (0x01, 0x20, 0x80, 0xFF)
    ]
    mutants = [*flipped, *(data[:size] for size in range(0, len(data), 3)), data + b"more"]
    paths = [str(tmp_path / f"mutant.{k}.tif") for k in range(len(mutants))]
    for path, mutant in zip(paths, mutants, strict=True):
        Path(path).write_bytes(mutant)
    both_ways(TiffReader(), first, paths[:-1])
    assert both_ways(TiffReader(), first, paths[-1:]) == 1


def written(path: Path, pixels: Array, writer: str, options: dict[str, Any]) -> None:
    if writer == "pillow":
        Image.fromarray(pixels[0] if pixels.ndim == 3 else pixels).save(path, format="TIFF")
    elif writer == "libtiff":
        path.write_bytes(imagecodecs.tiff_encode(pixels, compression=1))
    else:
        tifffile.imwrite(path, pixels, photometric="minisblack", **options)


def options_of(draw: Any, dtype: str) -> dict[str, Any]:
    """Options of tifffile, such as those of files that people have."""
    kind = draw(st.sampled_from(["shaped", "bare", "described", "imagej" if dtype in IMAGEJ_DTYPES else "bare"]))
    options: dict[str, Any] = {"byteorder": draw(st.sampled_from("<>"))}
    if kind == "imagej":
        info = {"Info": "i" * draw(st.integers(0, 30)), "min": draw(st.integers(0, 99)), "max": 250.5}
        return {**options, "imagej": True, "metadata": draw(st.sampled_from([info, {}]))}
    if kind != "shaped":
        options["metadata"] = None
    if kind == "described":
        options["description"] = draw(st.sampled_from(["exposure 3", "exposure 40", "{}", "ImageJ=1"]))
    options["bigtiff"] = draw(st.booleans())
    options["rowsperstrip"] = draw(st.sampled_from([None, 1, 4, 100]))
    options["datetime"] = draw(st.sampled_from([None, "2026:01:02 03:04:05", "2025:11:12 13:14:15"]))
    options["software"] = draw(st.sampled_from([None, "mine"]))
    return options


IMAGEJ_DTYPES = ("uint8", "uint16", "float32")
OTHER_WRITERS = ["pillow"]
with suppress(NotImplementedError):  # by older versions
    imagecodecs.tiff_encode(np.zeros((2, 2), "uint8"))
    OTHER_WRITERS.append("libtiff")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_generated_files_of_several_writers(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Each of them is the first in turn, and the others are held against it."""
    folder = tmp_path_factory.mktemp("generated")
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "int16", "float32", "float64"]))
    shape = data.draw(st.sampled_from([(9, 14), (9, 14), (3, 9, 14)]))
    writers = ["tifffile"] * 3 + (OTHER_WRITERS if dtype in IMAGEJ_DTYPES else [])
    same_options = data.draw(st.booleans())
    options = options_of(data.draw, dtype) if same_options else {}
    paths = []
    for k in range(3):
        paths.append(folder / f"{k}.tif")
        one = options if same_options else options_of(data.draw, dtype)
        written(paths[-1], image(k, shape, dtype), data.draw(st.sampled_from(writers)), one)
    names = [str(path) for path in paths]
    for join in ("stack", "concat"):
        for first in names:
            if TiffReader(join).layout(first) is not None:
                both_ways(TiffReader(join), first, names)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["plain", "imagej", "big"]),
    edits=st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 600)),
)
def test_any_damage(
    tmp_path_factory: pytest.TempPathFactory, kind: str, edits: list[tuple[int, bytes]], cut: int | None
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "imagej": IMAGEJ[1], "big": {"bigtiff": True}}
    (first,) = tiffs(folder, [kinds[kind]], (5, 7))
    data = bytearray(Path(first).read_bytes())
    for at, new in edits:
        data[at : at + len(new)] = new
    path = str(folder / "damaged.tif")
    Path(path).write_bytes(data[:cut])
    both_ways(TiffReader(), first, [path])


@pytest.mark.parametrize("join", ["stack", "concat"])
def test_npy(tmp_path: Path, join: Any) -> None:
    def save(name: str, array: Array, version: tuple[int, int] = (1, 0)) -> str:
        with open(tmp_path / name, "wb") as f:
            np.lib.format.write_array(f, array, version=version)
        return str(tmp_path / name)

    first = save("0.npy", image(0))
    alike = [first, save("1.npy", image(1))]
    others = [
        save("2.npy", image(2).astype(">u2")),
        save("3.npy", np.asfortranarray(image(3))),
        save("4.npy", image(4), (2, 0)),
        save("5.npy", image(5, (4, 7))),
        save("6.npy", image(6, dtype="int16")),
        str(tmp_path / "gone.npy"),
    ]
    Path(tmp_path / "7.npy").write_bytes(Path(first).read_bytes() + b"x")
    Path(tmp_path / "8.npy").write_bytes(Path(first).read_bytes()[:-1])
    others += [str(tmp_path / "7.npy"), str(tmp_path / "8.npy")]
    assert both_ways(NpyReader(join), first, [*alike, *others]) == 2
    foreign = save("9.npy", image(9).astype(">u2"))
    assert both_ways(NpyReader(join), foreign, [foreign, *others]) == 2
    assert NpyReader(join).layout(others[1]) is None


BY_HEADER = ["open", "preadv", "fstat", "preadv", "fstat", "close"]


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ([{}] * 3, ["open", "preadv", "fstat", "close"]),
        ([{"imagej": True, "metadata": {"Info": "note; " * 20 * k}} for k in range(3)], BY_HEADER),
    ],
)
def test_few_system_calls_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[dict[str, Any]], due: list[str]
) -> None:
    """One read; two, of which the first is small, where the file before had its pixels elsewhere."""
    paths = tiffs(tmp_path, options)
    layout = TiffReader().layout(paths[0])
    assert layout is not None
    reader, out = layout.reader(), np.zeros((1, 9, 14), "uint16")
    assert taken_by(reader, paths[1], out)
    calls: list[str] = []

    def logged(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, call)

    for name in ("open", "stat", "fstat", "preadv", "pread", "close"):
        logged(name)
    assert taken_by(reader, paths[2], out)
    monkeypatch.undo()
    assert calls == due


@pytest.mark.parametrize("kind", [1, 7, 11])
def test_odd_types_of_offsets_go_through_the_library(tmp_path: Path, kind: int) -> None:
    (path,) = tiffs(tmp_path, [{"metadata": None}])
    with tifffile.TiffFile(path) as tif:
        at = tif.pages.first.tags[273].offset
    data = bytearray(Path(path).read_bytes())
    struct.pack_into("<H", data, at + 2, kind)
    Path(path).write_bytes(data)
    assert TiffReader().layout(path) is None


def test_a_long_way_to_the_pixels_is_no_fast_path(tmp_path: Path) -> None:
    """What lies before the pixels travels with each block, or is read from each file."""
    options: list[dict[str, Any]] = [{"extratags": [(65000, 7, 100_000, bytes(100_000), True)], "metadata": None}] * 2
    paths = tiffs(tmp_path, options)
    assert TiffReader().layout(paths[0]) is None
    assert len(open_stack(paths).block(0, 2).packed) < 1000
