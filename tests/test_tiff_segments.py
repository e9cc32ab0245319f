"""Strips and tiles that are decoded without tifffile: its pixels exactly, or the file is left to it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from conftest import Array, image
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_path import both_ways

from daskstack.readers import Header, TiffReader
from daskstack.readers.tiff_segments import SegmentLayout

CODECS: list[str | int | None] = ["lzw", "zlib", "deflate", "packbits", "zstd", None]
DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8"]


def pixels(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Of every size and sign, with runs that compress."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-3, 4, shape).cumsum(-1) * rng.integers(1, 99)
    return steps.astype(dtype)


@st.composite
def written(draw: st.DrawFn) -> tuple[tuple[int, ...], str, dict[str, Any]]:
    """A shape, a dtype and the options of a file in strips or tiles."""
    dtype = draw(st.sampled_from(DTYPES))
    compression = draw(st.sampled_from(CODECS))
    shape: tuple[int, ...] = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    options: dict[str, Any] = {
        "compression": compression,
        "byteorder": draw(st.sampled_from("<>")),
        "bigtiff": draw(st.booleans()),
        "photometric": "minisblack",
        "metadata": None,
    }
    if draw(st.booleans()):
        options["tile"] = draw(st.sampled_from([(16, 16), (32, 16), (16, 48)]))
    else:
        options["rowsperstrip"] = draw(st.integers(1, 45))
    colour = draw(st.sampled_from(["none", "contig", "separate"]))
    if colour != "none":
        shape = (3, *shape) if colour == "separate" else (*shape, 3)
        options |= {"photometric": "rgb", "planarconfig": colour}
    if compression is not None and dtype[0] != "c":
        options["predictor"] = draw(st.sampled_from([1, 3 if dtype[0] == "f" else 2]))
    return shape, dtype, options


@settings(max_examples=250, deadline=None)
@given(
    file=written(), edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), max_size=3), cut=st.integers(-3, 9)
)
def test_it_gives_what_tifffile_gives_of_whole_and_of_damaged_files(
    tmp_path_factory: pytest.TempPathFactory,
    file: tuple[tuple[int, ...], str, dict[str, Any]],
    edits: list[tuple[float, int]],
    cut: int,
) -> None:
    shape, dtype, options = file
    folder = tmp_path_factory.mktemp("segments")
    paths = [folder / f"{k}.tif" for k in range(3)]
    for k, path in enumerate(paths[:2]):
        tifffile.imwrite(path, pixels(k, shape, dtype), **options)
    data = bytearray(paths[1].read_bytes())
    for place, bit in edits:
        data[int(place * (len(data) - 1))] ^= 1 << bit
    paths[2].write_bytes(data[: len(data) - max(0, cut)])
    taken = both_ways(TiffReader(), str(paths[0]), [str(p) for p in paths])
    assert taken >= 2 or not isinstance(TiffReader().layout(str(paths[0])), SegmentLayout)


@pytest.mark.parametrize(
    ("compression", "options"),
    [
        ("lzw", {"rowsperstrip": 3}),
        ("zlib", {"tile": (16, 16), "byteorder": ">"}),
        ("packbits", {"rowsperstrip": 3}),
        ("zstd", {"tile": (16, 16), "predictor": 2}),
    ],
    ids=str,
)
def test_every_flipped_byte(tmp_path: Path, compression: str, options: dict[str, Any]) -> None:
    first = tmp_path / "first.tif"
    tifffile.imwrite(first, image(3, (6, 17)), photometric="minisblack", compression=compression, **options)
    data = first.read_bytes()
    paths = [tmp_path / f"{at}.tif" for at in range(len(data))]
    for at, path in enumerate(paths):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
    taken = both_ways(TiffReader(), str(first), list(map(str, paths)))
    assert taken  # of a flipped pixel nothing tells, in some codecs


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, True),
        ({"tile": (16, 16)}, True),
        ({"imagej": True, "compression": None}, True),
        ({"compression": "lzma"}, False),
        ({"compression": "jpeg"}, False),
        ({"dtype": "bool"}, False),
        ({"subifds": 1}, False),
        ({"shape": (2, 20, 30)}, False),
        ({"shape": (3, 20, 30), "photometric": "rgb"}, True),
        ({"shape": (16, 20, 32), "tile": (16, 16, 16), "volumetric": True}, False),
        ({"shape": (20, 30, 3), "photometric": "ycbcr", "compression": "jpeg", "subsampling": (2, 2)}, False),
    ],
    ids=str,
)
def test_which_files_are_taken(tmp_path: Path, options: dict[str, Any], taken: bool) -> None:
    shape, dtype = options.pop("shape", (20, 30)), options.pop("dtype", "uint8")
    given_options = {"photometric": "minisblack", "compression": "zlib", **options}
    with tifffile.TiffWriter(tmp_path / "0.tif", imagej=given_options.pop("imagej", False)) as tif:
        tif.write(image(0, shape, dtype), **given_options)
        if "subifds" in options:
            tif.write(image(0, (10, 15), dtype), photometric="minisblack", subfiletype=1)
    assert (TiffReader().layout(str(tmp_path / "0.tif")) is not None) == taken


def test_a_tile_that_is_not_stored_is_left_to_tifffile(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{k}.tif") for k in range(2)]
    for k, path in enumerate(paths):
        nodata = [(42113, "s", 0, "7", True)]
        tifffile.imwrite(path, image(k, (32, 32)), tile=(16, 16), compression="zlib", metadata=None, extratags=nodata)
    with tifffile.TiffFile(paths[1]) as tif:
        tags = [tif.pages.first.tags[code] for code in (324, 325)]
    data = bytearray(Path(paths[1]).read_bytes())
    for tag in tags:
        size = {3: 2, 4: 4}[int(tag.dtype)]
        data[tag.valueoffset + size : tag.valueoffset + 2 * size] = bytes(size)
    Path(paths[1]).write_bytes(data)
    assert both_ways(TiffReader(), paths[0], paths) == 1
    out = np.empty((2, 32, 32), "u2")
    layout = TiffReader().layout(paths[0])
    assert layout is not None
    assert TiffReader().read_into(paths, out, TiffReader().probe(paths[0]), fast=layout.reader()) == []
    assert (out[1, :16, 16:] == 7).all()


def test_a_tile_much_larger_than_memory_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "0.tif"
    tifffile.imwrite(path, image(0, (5, 7)), tile=(16, 16), compression="zlib", photometric="minisblack")
    with tifffile.TiffFile(path) as tif:
        tags = [tif.pages.first.tags[code] for code in (322, 323)]
    data = bytearray(path.read_bytes())
    for tag in tags:
        struct.pack_into("<HIH" if tag.dtype == 3 else "<HII", data, tag.offset + 2, 4, 1, 1 << 20)
    path.write_bytes(data)
    out = np.empty((1, 5, 7), "u2")
    (bad,) = TiffReader().read_into([str(path)], out, Header(1, (5, 7), np.dtype("u2")))
    due = "due tiles of a sensible size"
    assert bad.problem == f"found tiles of 1048576 x 1048576 pixels in page 0 of (5, 7), {due}"
