"""TIFF kind by kind: what is read, and what is refused by name; which part of each file is read."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from conftest import Array, Run, image

import daskstack
from daskstack.errors import BadFileError, UsageError
from daskstack.readers import TiffReader

GREY: dict[str, Any] = {"photometric": "minisblack"}


def read(path: Path, **parts: Any) -> Array:
    """The one item of a file."""
    reader = TiffReader(**parts)
    due = reader.probe(str(path))
    out = np.empty((due.rows, *due.shape), due.dtype)
    if bad := reader.read_into([str(path)], out, due):
        raise bad[0]
    return np.asarray(out if reader.join == "concat" else out[0])


def refused(path: Path, **parts: Any) -> str:
    with pytest.raises(BadFileError) as caught:
        read(path, **parts)
    return caught.value.problem


def equal(found: Array, due: Array) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (due.dtype, due.shape, due.tobytes())


def packed(path: Path, values: Array, bits: int, byteorder: str) -> None:
    """Most significant bit first, each row from a new byte on; packed here without tifffile."""
    rows = ["".join(f"{v:0{bits}b}" for v in row) for row in values.tolist()]
    data = b"".join(int(r.ljust(-len(r) % 8 + len(r), "0"), 2).to_bytes(-(-len(r) // 8), "big") for r in rows)
    length, width = values.shape
    entries = {256: width, 257: length, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: length, 279: len(data)}
    directory = struct.pack(f"{byteorder}H", len(entries))
    directory += b"".join(struct.pack(f"{byteorder}HHII", code, 4, 1, value) for code, value in entries.items())
    magic = b"II*\0" if byteorder == "<" else b"MM\0*"
    path.write_bytes(magic + struct.pack(f"{byteorder}I", 8 + len(data)) + data + directory + bytes(4))


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 10, 12, 14, 31])
@pytest.mark.parametrize("byteorder", "<>")
def test_packed_integers(tmp_path: Path, bits: int, byteorder: str) -> None:
    due = np.random.default_rng(bits).integers(0, 1 << bits, (5, 7))
    packed(tmp_path / "x.tif", due, bits, byteorder)
    found = read(tmp_path / "x.tif")
    assert found.dtype == ("bool" if bits == 1 else "uint8" if bits <= 8 else "uint16" if bits <= 16 else "uint32")
    assert np.array_equal(found, due)


OPTIONS: list[dict[str, Any]] = [
    {"compression": c, **o}
    for c in ("jpeg2000", "jpegxl", "webp", "png", "lerc", "lzma")
    for o in ({"rowsperstrip": 16}, {"tile": (16, 16)})
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_codecs_without_loss(tmp_path: Path, options: dict[str, Any]) -> None:
    due = image(1, (32, 48, 3), "uint8")
    lossless = {"jpegxl": {"lossless": True}, "webp": {"lossless": True}}.get(options["compression"])
    tifffile.imwrite(tmp_path / "x.tif", due, photometric="rgb", compressionargs=lossless, **options)
    assert equal(read(tmp_path / "x.tif"), due)


@pytest.mark.parametrize("compression", [None, "lzw", "zlib", "packbits"])
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "f4", "f8"])
def test_a_second_reader_agrees(tmp_path: Path, compression: str | None, dtype: str) -> None:
    """libtiff, which shares no code with tifffile."""
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, image(2, (3, 21, 37), dtype), compression=compression, rowsperstrip=4, **GREY)
    pages = [imagecodecs.tiff_decode(path.read_bytes(), index=k) for k in range(3)]
    assert equal(read(path), np.stack(pages))


@pytest.mark.parametrize("byteorder", "<>")
def test_integers_of_24_bits_are_refused(tmp_path: Path, byteorder: str) -> None:
    """imagecodecs takes big-endian ones for others, and libtiff little-endian ones for others than tifffile."""
    packed(tmp_path / "x.tif", image(0), 24, byteorder)
    assert refused(tmp_path / "x.tif").startswith("found page 0 of 24-bit integers, due 8, 16 or 32: ")


# -- OME ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "shape"), [("TZCYX", (2, 3, 2, 5, 7)), ("CYX", (3, 5, 7)), ("TYXS", (2, 5, 7, 3))])
def test_an_ome_tiff_has_the_shape_of_its_description(tmp_path: Path, axes: str, shape: tuple[int, ...]) -> None:
    due = image(1, shape, "uint8")
    colour = "rgb" if "S" in axes else "minisblack"
    tifffile.imwrite(tmp_path / "x.ome.tif", due, photometric=colour, metadata={"axes": axes})
    os.rename(tmp_path / "x.ome.tif", tmp_path / "renamed.tif")
    assert equal(read(tmp_path / "renamed.tif"), due)
    assert TiffReader().probe(str(tmp_path / "renamed.tif")).dims == tuple(axes.lower())
    page = shape[-3:] if "S" in axes else shape[-2:]
    assert equal(read(tmp_path / "renamed.tif", join="concat"), due.reshape(-1, *page))


@pytest.mark.parametrize(
    "edit",
    [
        ('SizeT="2"', 'SizeT="9"'),
        ('SizeT="2"', 'SizeT="1"'),
        ('PlaneCount="6"', 'PlaneCount="4"'),
        ('SizeX="7"', 'SizeX="5"'),
        ('IFD="0"', 'FirstT="8" IFD="0"'),
        ("</OME>", ""),
        ('SizeT="2"', ""),
        ('IFD="0"', 'IFD="2"'),
    ],
    ids=str,
)
def test_a_description_that_is_not_of_the_file_is_none(tmp_path: Path, edit: tuple[str, str]) -> None:
    due = image(1, (2, 3, 5, 7))
    tifffile.imwrite(tmp_path / "x.ome.tif", due, metadata={"axes": "TZYX"}, **GREY)
    xml = str(tifffile.tiffcomment(tmp_path / "x.ome.tif")).replace(*edit)
    assert edit[1] in xml
    tifffile.imwrite(tmp_path / "y.tif", due.reshape(6, 5, 7), description=xml, metadata=None, **GREY)
    assert equal(read(tmp_path / "y.tif"), due.reshape(6, 5, 7))
    assert daskstack.build(tmp_path / "y.tif", tmp_path / "out.npy", progress=False).shape == (1, 6, 5, 7)
    assert daskstack.verify(tmp_path / "out.npy", inputs=True, progress=False).status == 0


def test_planes_in_another_order_than_pages(tmp_path: Path) -> None:
    due = image(1, (3, 5, 7))
    places = "".join(f'<TiffData FirstT="{t}" IFD="{p}" PlaneCount="1"/>' for t, p in enumerate((2, 0, 1)))
    xml = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        '<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="7" SizeY="5" SizeZ="1" SizeC="1" SizeT="3">'
        f"{places}</Pixels></Image></OME>"
    )
    tifffile.imwrite(tmp_path / "x.tif", due, description=xml, metadata=None, compression="zlib", **GREY)
    assert equal(read(tmp_path / "x.tif"), due[[2, 0, 1]])
    daskstack.build(tmp_path / "x.tif", tmp_path / "out.npy", progress=False, join="concat")
    assert np.array_equal(np.load(tmp_path / "out.npy"), due[[2, 0, 1]])
    assert daskstack.verify(tmp_path / "out.npy", inputs=True, progress=False).status == 0


# -- more than 4 GiB, and pages unlike the first ------------------------------------------------------------------


def test_an_imagej_stack_of_more_than_4_gib_in_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    pages, size = 2200, 2_000_000
    text = f"ImageJ=1.53t\nimages={pages}\nframes={pages}\n"
    tifffile.imwrite(path, image(0, (1000, 1000)), metadata=None, description=text, byteorder=">", **GREY)
    with tifffile.TiffFile(path) as tif:
        begin = tif.pages.first.dataoffsets[0]
    with path.open("r+b") as f:
        f.truncate(begin + pages * size)
        f.seek(begin + (pages - 1) * size)
        f.write(b"\x01\x02")
    assert TiffReader("concat").probe(str(path)).rows == pages
    assert read(path, pages="-1")[0, :2].tolist() == [0x0102, 0]
    assert equal(read(path, pages="0"), image(0, (1000, 1000)))
    os.truncate(path, begin + pages * size - 1)
    assert "corrupted file" in refused(path)


@pytest.mark.parametrize("kind", ["ome", "imagej", "shaped", "scanimage"])
@pytest.mark.parametrize("change", ["strips", "width", "place"])
def test_a_page_that_is_not_stored_as_the_first_one(tmp_path: Path, kind: str, change: str) -> None:
    """tifffile reads it as if it were."""
    path = tmp_path / ("x.ome.tif" if kind == "ome" else "x.tif")
    if kind == "scanimage":
        with tifffile.TiffWriter(path) as tif:
            for page in image(1, (3, 8, 16)):
                tif.write(
                    page, metadata=None, contiguous=False, rowsperstrip=4, software="SI.LINE_FORMAT_VERSION=1", **GREY
                )
    else:
        tifffile.imwrite(path, image(1, (3, 8, 16)), rowsperstrip=4, imagej=kind == "imagej", **GREY)
    assert equal(read(path), image(1, (3, 8, 16)))
    with tifffile.TiffFile(path) as tif:
        second: Any = tif.pages[1]
        order, tag = tif.byteorder, second.aspage().tags[273]
        places = (second.offset + 2 + 8, tag.valueoffset)
        offsets = list(second.dataoffsets)
    if change == "strips":
        new, at = offsets[::-1], places[1]
    elif change == "place":
        new, at = [offset - 256 for offset in offsets], places[1]
    else:
        new, at = [8], places[0]
    form = f"{order}{len(new)}{'H' if change != 'width' and int(tag.dtype) == 3 else 'I'}"
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, *new)
    path.write_bytes(data)
    if change == "place" and kind in ("ome", "scanimage"):  # where it lies is its own affair
        assert not equal(read(path)[1], image(1, (3, 8, 16))[1])
        return
    assert (
        refused(path)
        == {
            "strips": "page 1 has its strips in another order than page 0",
            "width": "page 1 is stored in another way than page 0"
            if kind == "ome"
            else "not all pages are stored as page 0 is (incompatible keyframe)",
            "place": "page 1 lies elsewhere than the description of page 0 says",
        }[change]
    )


# -- which part of each file --------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Two files of two series each, the first of three pages with a smaller level."""
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(2):
        with tifffile.TiffWriter(folder / f"{k}.tif") as tif:
            main = image(k, (3, 32, 48))
            tif.write(main, subifds=1, tile=(16, 16), metadata={"name": "main"}, **GREY)
            tif.write(main[:, ::2, ::2], subfiletype=1, tile=(16, 16), metadata={"name": "half"}, **GREY)
            tif.write(image(k + 5, (4, 6), "uint8"), metadata={"name": "label"}, **GREY)
    return folder


PARTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"series": 0}, "stack", lambda k: image(k, (3, 32, 48))),
    ({"series": "main", "level": 1}, "stack", lambda k: image(k, (3, 32, 48))[:, ::2, ::2]),
    ({"series": "label"}, "stack", lambda k: image(k + 5, (4, 6), "uint8")),
    ({"series": 0, "pages": 1}, "stack", lambda k: image(k, (3, 32, 48))[1]),
    ({"series": 0, "pages": slice(None, None, -2)}, "stack", lambda k: image(k, (3, 32, 48))[::-2]),
    ({"series": 0, "pages": "1:", "level": 1}, "concat", lambda k: image(k, (3, 32, 48))[1:, ::2, ::2]),
    ({"series": np.int64(0), "pages": -1}, "concat", lambda k: image(k, (3, 32, 48))[-1:]),
]


@pytest.mark.parametrize(("parts", "join", "item"), PARTS, ids=lambda v: str(v) if isinstance(v, dict) else "")
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_a_part_of_each_file(
    several: Path, tmp_path: Path, parts: dict[str, Any], join: Any, item: Any, suffix: str
) -> None:
    out = tmp_path / f"out{suffix}"
    due = [item(k) for k in range(2)]
    daskstack.build(several, out, join=join, progress=False, **parts)
    found = daskstack.open(out)
    assert np.array_equal(found.array.compute(), np.stack(due) if join == "stack" else np.concatenate(due))
    pages = parts.get("pages")
    given = {**parts, **({"pages": "::-2" if isinstance(pages, slice) else str(pages)} if "pages" in parts else {})}
    assert {name: found.record["options"][name] for name in parts} == given
    report = daskstack.verify(out, inputs=True, progress=False)
    assert (report.status, report.problems) == (0, ())
    assert daskstack.build(several, out, join=join, progress=False, **parts).shape == found.shape  # done: nothing to do
    with pytest.raises(daskstack.errors.OutputExistsError):
        daskstack.build(several, out, join=join, progress=False, series="label" if parts != {"series": "label"} else 0)


def test_the_parts_are_part_of_what_is_hashed(several: Path) -> None:
    chosen: list[dict[str, Any]] = [
        {"series": 0},
        {"series": "main"},
        {"series": 0, "level": 0},
        {"series": 0, "pages": "0:"},
    ]
    assert len({daskstack.open_stack(several, **parts).content_id for parts in chosen}) == 4


def test_on_the_command_line(several: Path, tmp_path: Path, daskstack: Run) -> None:
    options = ["--series", "main", "--level", "1", "--pages", "0:3:2"]
    done = daskstack("build", several, tmp_path / "out.npy", *options)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.load(tmp_path / "out.npy")[1], image(1, (3, 32, 48))[::2, ::2, ::2])
    assert daskstack("verify", tmp_path / "out.npy", "--inputs").returncode == 0


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({}, "found page 3 (4, 6) uint8, due (32, 48) uint16, as page 0; or choose one by series=: {}"),
        ({"series": 3}, "found no series 3, due one of: {}"),
        ({"series": "mian"}, "found no series 'mian', due one of: {}"),
        ({"series": 0, "level": 2}, "found 2 levels, due level 2, counted from 0"),
        ({"series": 0, "pages": "3"}, "found 3 pages, due pages=3, counted from 0"),
        ({"series": 0, "pages": "-4"}, "found 3 pages, due pages=-4, counted from 0"),
        ({"series": 0, "pages": "5:9"}, "found 3 pages, due pages=5:9, counted from 0"),
    ],
    ids=str,
)
def test_a_part_that_is_not_there(several: Path, parts: dict[str, Any], problem: str) -> None:
    listed = "0 'main' (3, 32, 48) uint16, 1 'label' (4, 6) uint8"
    assert refused(several / "0.tif", **parts) == problem.format(listed)


@pytest.mark.parametrize(
    "parts",
    [
        {"series": -1},
        {"series": ""},
        {"series": True},
        {"series": 1.0},
        {"level": -1},
        {"level": "1"},
        {"pages": "1:2:0"},
        {"pages": "1:2:3:4"},
        {"pages": "first"},
        {"pages": ""},
        {"pages": [1, 2]},
    ],
    ids=str,
)
def test_a_part_that_cannot_be_meant(several: Path, parts: dict[str, Any]) -> None:
    (name,) = parts
    with pytest.raises(UsageError, match=f"^{name}="):
        daskstack.open_stack(several, **parts)


def test_parts_of_what_has_none(tmp_path: Path, several: Path) -> None:
    np.save(tmp_path / "0.npy", image(0))
    with pytest.raises(UsageError, match=r"^series of files that are no TIFF"):
        daskstack.open_stack(tmp_path / "0.npy", series=0)
    with pytest.raises(UsageError, match=r"^level, pages of files that are no TIFF, or have a reader"):
        daskstack.open_stack(several, reader=tifffile.imread, level=0, pages=1)


def test_two_alike_series_are_told_apart_by_number(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "x.tif") as tif:
        for k in range(2):
            tif.write(image(k, (2, 5, 7)), metadata={"name": "scan"}, **GREY)
    assert refused(tmp_path / "x.tif", series="scan").startswith("found 2 series named 'scan', due one of: 0 'scan' ")
    assert equal(read(tmp_path / "x.tif", series=1), image(1, (2, 5, 7)))


def test_thumbnails_of_another_kind_are_left_out_when_a_series_is_chosen(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "x.tif") as tif:
        for k in range(3):
            tif.write(image(k, (32, 48)), metadata=None, **GREY)
            tif.write(image(k, (8, 12, 3), "uint8"), photometric="rgb", subfiletype=1, metadata=None)
    assert "choose one by series=: 0 (3, 32, 48) uint16, 1 (3, 8, 12, 3) uint8" in refused(tmp_path / "x.tif")
    assert equal(read(tmp_path / "x.tif", series=0), np.stack([image(k, (32, 48)) for k in range(3)]))


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("pages", [1, 3])
def test_colour_of_one_sample_is_a_plane(tmp_path: Path, pages: int, compression: str | None) -> None:
    """Of such a page tifffile says (5, 7, 1), of the series (5, 7): its rows are not taken for pages."""
    path, due = tmp_path / "x.tif", np.stack([image(k) for k in range(pages)])
    with tifffile.TiffWriter(path) as writer:
        for page in due:
            writer.write(page, photometric="minisblack", metadata=None, compression=compression, contiguous=False)
    with tifffile.TiffFile(path) as tif:
        places = [page.aspage().tags["PhotometricInterpretation"].valueoffset for page in tif.pages]
    data = bytearray(path.read_bytes())
    for at in places:
        data[at : at + 2] = b"\2\0"  # RGB
    path.write_bytes(data)
    daskstack.build(path, tmp_path / "whole.npy", progress=False)
    daskstack.build(path, tmp_path / "joined.npy", join="concat", progress=False)
    assert equal(np.load(tmp_path / "whole.npy"), due[None] if pages > 1 else due)
    assert equal(np.load(tmp_path / "joined.npy"), due)
    last = due[-1:]
    daskstack.build(path, tmp_path / "last.npy", pages="-1:", progress=False)
    assert equal(np.load(tmp_path / "last.npy")[0], last)
