"""What notebooks show: pictures of items against plain NumPy, cards of HTML, contact sheets."""

from __future__ import annotations

import base64
import os
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from conftest import Array, image
from hypothesis import given, settings
from hypothesis import strategies as st

import daskstack
from daskstack import Stack, open_stack
from daskstack.display import MOST_NBYTES, SIDE, THUMBNAILS
from daskstack.errors import OutputError, OutputExistsError, UsageError
from daskstack.pictures import NAN_COLOUR, Look, contrast, painted, png, shrunk


def saved(folder: Path, items: list[Array]) -> Stack:
    folder.mkdir(parents=True)
    for k, item in enumerate(items):
        np.save(folder / f"{k}.npy", item)
    return open_stack(folder)


def pictures(html: str) -> list[Array]:
    """The thumbnails of a card."""
    found = re.findall(r'<img src="data:image/png;base64,([^"]*)"', html)
    return [imagecodecs.png_decode(base64.b64decode(text)) for text in found]


def bytes_read() -> int:
    """What this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def text(html: str) -> str:
    """What people read of a card."""
    return unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 4, 3)], ids=str)
def test_a_png_reads_as_its_pixels(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype="uint8")
    assert np.array_equal(imagecodecs.png_decode(png(pixels)), pixels)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.one_of(st.tuples(st.integers(1, 30), st.integers(1, 30)), st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(3))),
    side=st.integers(4, 12),
)  # fmt: skip
def test_a_shrunk_plane_is_the_means_of_its_boxes(shape: tuple[int, ...], side: int) -> None:
    plane = np.random.default_rng(0).random(shape)
    box = next(k for k in range(1, 31) if max(-(-n // k) for n in shape[:2]) <= side)
    rows, columns = (range(0, n, box) for n in shape[:2])
    expected = [[plane[y : y + box, x : x + box].mean(axis=(0, 1)) for x in columns] for y in rows]
    assert np.allclose(shrunk(plane, side), expected)


SHAPES: list[tuple[int, ...]] = [(), (6,), (4, 6), (3, 4, 6), (3, 5, 4, 6), (2, 3, 2, 4, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bool", "uint16", "float32", "complex64", "datetime64[s]"])
def test_the_middle_plane_of_items_of_any_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    """The same from the files, from a .npy and from a group in small chunks."""
    monkeypatch.chdir(tmp_path)
    items = [(image(k, shape, "int64") % 7 * (1 + 2j if dtype == "complex64" else 1)).astype(dtype) for k in range(3)]
    stack = saved(tmp_path / "in", items)
    expected = []
    for item in items:
        plane = item[tuple(n // 2 for n in item.shape[:-2])].reshape((1,) * (2 - item.ndim) + item.shape[-2:])
        expected.append(np.abs(plane) if dtype == "complex64" else plane.astype("int64"))
    outputs = []
    if dtype == "uint16" or len(shape) == 3:
        chunks = [min(2, n) for n in stack.shape]
        outputs = [stack.to_npy("out.npy", progress=False), stack.to_zarr("out.zarr", chunks=chunks, progress=False)]
    shown_by: list[Any] = [stack, *(daskstack.open(report.out) for report in outputs)]
    for one in shown_by:
        looks = list(one.looks(5, SIDE))
        assert [look.name for look in looks] == ["0.npy", "1.npy", "2.npy"]
        assert all(np.array_equal(look.plane, plane) for look, plane in zip(looks, expected, strict=True))
        shown = pictures(one._repr_html_())
        assert len(shown) == 3
        assert shown[0].shape == expected[0].shape


@pytest.mark.parametrize(("samples", "planar"), [(3, "contig"), (4, "contig"), (3, "separate")])
@pytest.mark.parametrize("join", ["stack", "concat"])
def test_colours_are_shown_as_colours(tmp_path: Path, samples: int, planar: str, join: Any) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (9, 8, samples), dtype="uint8")
    stored = pixels if planar == "contig" else np.moveaxis(pixels, -1, 0)
    extra = {"extrasamples": ["unassalpha"]} if samples == 4 else {}
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="rgb", planarconfig=planar, **extra)  # type: ignore[arg-type]
    html = open_stack(tmp_path / "a.tif", join=join)._repr_html_()
    assert np.array_equal(pictures(html)[0], pixels[..., :3])
    assert "1 of 1 item, colours as stored" in text(html)


def test_colours_of_unnamed_axes_and_of_more_bits(tmp_path: Path) -> None:
    stack = saved(tmp_path / "in", [np.linspace(0, 1, 9 * 8 * 3).reshape(9, 8, 3)])
    (shown,) = pictures(stack._repr_html_())
    assert shown.shape == (9, 8, 3)
    assert (shown[0, 0, 0], shown[-1, -1, -1]) == (0, 255)
    (plane,) = pictures(saved(tmp_path / "volume", [np.zeros((4, 4, 3))])._repr_html_())
    assert plane.shape == (4, 3)


@pytest.mark.parametrize(
    ("values", "caption"),
    [
        ([[7, 7]], "7 everywhere"),
        ([[np.nan, 7]], "7 everywhere; NaN red"),
        ([[np.nan]], "no finite value"),
        ([[np.inf, 1.0, 3.0]], "black 1.01, white 2.99 (percentiles 0.5 and 99.5 of what is shown)"),
        ([[0.0] * 999 + [5.0]], "black 0, white 5 (all there is)"),
    ],
)
def test_one_contrast_for_all(values: list[list[float]], caption: str) -> None:
    look = Look("a", plane=np.array(values, float))
    made = contrast([look])
    assert made.caption == caption
    pixels = painted(look, made)
    assert pixels.shape[:2] == (1, len(values[0]))
    for pixel, value in zip(pixels[0], values[0], strict=True):
        if np.isnan(value):
            assert tuple(pixel) == NAN_COLOUR
        elif made.low == made.high:
            assert np.all(pixel == 128)
        elif value >= made.high or value <= made.low:
            assert np.all(pixel == (255 if value >= made.high else 0))


def test_a_card_tells_what_a_stack_is(frames: Path) -> None:
    (frames / "notes.txt").touch()
    html = open_stack("frames", labels=r"img_(?P<k>\d+)", files_per_block=5)._repr_html_()
    lines = re.sub(r" +", " ", text(html.replace("</td></tr>", "\n").replace("</small>", "\n"))).splitlines()
    assert lines[0].startswith(" daskstack.Stack (12, 5, 7) uint16 files 12 in frames (")
    assert [line.strip() for line in lines[1:5]] == [
        "order natural: img_0.tif, img_1.tif, img_2.tif ... img_11.tif",
        "array (item 12, y 5, x 7) uint16, 840 B; item from img_0.tif",
        "labels k (0 to 11)",
        "chunks (5, 5, 7): 3 reads in Dask",
    ]
    assert "left out: notes.txt" in lines[0]
    assert lines[5].strip() == (
        "img_0.tif img_1.tif img_3.tif img_4.tif img_6.tif img_7.tif img_9.tif img_11.tif "
        "8 of 12 items, black 1.395, white 1133 (percentiles 0.5 and 99.5 of what is shown)"
    )
    assert 'title="img_9.tif: k 9"' in html
    shown = pictures(html)
    assert [p.shape for p in shown] == [(5, 7)] * THUMBNAILS
    assert (shown[0][0, 0], shown[-1][-1, -1]) == (0, 255)


def test_a_card_reads_few_files_and_little_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for k in range(3):  # of a gigabyte each, all but one plane a hole
        shape = (1000, 1000, 1000)
        file = np.lib.format.open_memmap(folder / f"{k}.npy", "w+", "uint8", shape)
        file[500, 3, 4] = 255
        del file
    before = bytes_read()
    html = open_stack(folder)._repr_html_()
    assert 3 * 1000 * 1000 <= bytes_read() - before < 4_000_000
    assert [p.shape for p in pictures(html)] == [(72, 72)] * 3
    assert "3 of 3 items, black 0, white" in text(html)
    np.lib.format.open_memmap(tmp_path / "large.npy", "w+", "uint8", (2, MOST_NBYTES // 1000, 1001))
    large = open_stack(tmp_path / "large.npy")
    assert "1 without a picture, large.npy: large: not read for a thumbnail" in text(large._repr_html_())
    for k in range(3, 100):
        (folder / f"{k}.npy").touch()
    opened: list[str] = []
    real = os.open

    def logged(path: str, *rest: Any) -> int:
        opened.append(os.path.basename(path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", logged)
    open_stack(folder)._repr_html_()
    assert opened[-8:] == [f"{k * 99 // 7}.npy" for k in range(8)]


def test_bad_files_are_crossed_boxes(frames: Path) -> None:
    stack = open_stack("frames")
    (frames / "img_3.tif").write_bytes(b"")
    (frames / "img_11.tif").unlink()
    html = stack._repr_html_()
    assert (len(pictures(html)), html.count("<svg")) == (6, 2)
    assert 'title="img_3.tif: empty file (0 bytes)"' in html
    assert 'title="img_11.tif: no such file (it was there when the files were listed)"' in html
    assert "; 2 without a picture, first img_3.tif: empty file (0 bytes) " in text(html)
    for path in frames.iterdir():
        path.unlink()
    html = stack._repr_html_()
    assert (len(pictures(html)), html.count("<svg")) == (0, 8)
    assert "8 of 12 items, nothing to see; 8 without a picture, first img_0.tif: no such file" in text(html)


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (np.zeros(3, [("a", "i4")]), "TypeError: no picture of [('a', '<i4')]"),
        (np.array(["a"]), "TypeError: no picture of <U1"),
        (np.zeros((0, 4)), "ValueError: no pixels"),
        (np.zeros((3, 0, 4)), "ValueError: no pixels"),
    ],
)
def test_what_is_no_picture_says_so(tmp_path: Path, item: Array, problem: str) -> None:
    assert f"without a picture, 0.npy: {problem}" in text(saved(tmp_path / "in", [item])._repr_html_())


def test_a_reader_that_fails_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    (tmp_path / "b.bin").touch()

    def read(path: str) -> Array:
        return {"a.bin": np.zeros((2, 2))}[os.path.basename(path)]

    html = open_stack(tmp_path / "*.bin", reader=read)._repr_html_()
    assert (len(pictures(html)), html.count("<svg")) == (1, 1)
    assert "b.bin: cannot be read: KeyError: 'b.bin'" in text(html)


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"<script>alert(1)<\"&'.npy", b"b\xff\n.npy", "c\u202e.npy".encode()):
        with open(os.path.join(os.fsencode(folder), name), "wb") as f:
            np.save(f, image(0))
    html = open_stack(folder, labels={"<i>": "script"})._repr_html_()
    assert len(pictures(html)) == 3
    assert "<script" not in html
    assert "<i>" not in html
    assert html.isprintable() or set(html) - {c for c in html if c.isprintable()} == {"\n"}
    for escaped in ("<script>alert(1)<\"&'.npy", r"b\udcff\n.npy", r"c\u202e.npy"):
        assert escaped in text(html)


def test_cards_need_nothing_from_elsewhere(frames: Path) -> None:
    html = open_stack("frames")._repr_html_()
    assert re.findall(r"https?:|url\(|@import|<script|<link", html) == []
    assert set(re.findall(r'(?:src|href)="(.{22})', html)) == {"data:image/png;base64,"}
    assert re.findall(r"[{;](?:color|background):([^;}!]*)", html) == ["inherit", "none", "inherit"]


def test_plans_reports_and_outputs_have_cards(frames: Path) -> None:
    stack = open_stack("frames", labels=r"img_(?P<k>\d+)")
    made = stack.plan("out.npy")
    assert text(made._repr_html_()).split() == f"daskstack.StorePlan: out.npy {made}".split()
    report = stack.to_npy("out.npy", progress=False)
    assert text(report._repr_html_()).split() == f"daskstack: out.npy {report}".split()
    out = daskstack.open("out.npy")
    html = out._repr_html_()
    assert text(html).split()[:10] == repr(out)[1:].replace(">", "").split()[:10]
    assert 'title="img_9.tif: k 9"' in html
    assert len(pictures(html)) == THUMBNAILS
    for path in ("out.npy", "out.npy.index.csv", "out.k.npy"):
        os.unlink(path)
    assert (
        daskstack.Output(out.path, out.record)
        ._repr_html_()
        .startswith("<pre>&lt;daskstack.Output out.npy&gt; cannot be shown: ")
    )


def test_grids_show_the_labels_of_each_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for k in range(6):
        np.save(f"t{k // 3}_c{k % 3}.npy", image(k))
    stack = open_stack("*.npy", labels=r"t(?P<t>\d)_c(?P<c>\d)", axes=("t", "c"))
    expected = [f"t {k // 3}, c {k % 3}" for k in range(6)]
    assert [look.about for look in stack.looks(6, 9)] == expected
    for out in ("out.npy", "out.zarr"):
        daskstack.build("*_c*.npy", out, labels=r"t(?P<t>\d)_c(?P<c>\d)", axes=("t", "c"), progress=False)
        looks = list(daskstack.open(out).looks(6, 9))
        assert [look.about for look in looks] == expected
        assert all(np.array_equal(look.plane, image(k)) for k, look in enumerate(looks))  # type: ignore[arg-type]


def test_a_contact_sheet(frames: Path) -> None:
    stack = open_stack("frames", labels=r"img_(?P<k>\d+)")
    (frames / "img_11.tif").write_bytes(b"")
    sheet = stack.preview(5)
    assert repr(sheet) == (
        "<daskstack.Preview: 5 of 12 items, black 0.695, white 833.3 (percentiles 0.5 and 99.5 of what is shown); "
        "1 without a picture, img_11.tif: empty file (0 bytes)>"
    )
    pixels = imagecodecs.png_decode(sheet._repr_png_())
    assert pixels.shape[2] == 4
    assert {(0, 0, 0, 255), (255, 255, 255, 255)} <= {tuple(p) for p in pixels.reshape(-1, 4).tolist()}
    sheet.save("sheet.png")
    assert Path("sheet.png").read_bytes() == sheet.png
    other = stack[:4].preview()
    assert other.caption.startswith("4 of 4 items, ")
    other.save("sheet.png")
    assert Path("sheet.png").read_bytes() == other.png


def test_a_contact_sheet_replaces_nothing_but_its_like(frames: Path) -> None:
    sheet = open_stack("frames").preview(1)
    Path("mine.png").write_bytes(png(np.zeros((2, 2), "uint8")))
    os.symlink("nowhere", "link.png")
    for name in ("mine.png", "link.png"):
        with pytest.raises(OutputExistsError, match=f"{name} exists and is no contact sheet of daskstack's"):
            sheet.save(name)
    assert Path("mine.png").read_bytes() == png(np.zeros((2, 2), "uint8"))
    with pytest.raises(UsageError, match=r"the picture 'a.jpg' does not end in \.png"):
        sheet.save("a.jpg")
    with pytest.raises(OutputError):
        sheet.save("nowhere/a.png")
    for n in (0, 401):
        with pytest.raises(UsageError, match=f"n={n}\nnext  give a number of items, from 1 to 400"):
            open_stack("frames").preview(n)


def test_what_is_not_installed_is_named(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = open_stack("frames")
    for module, call, extra in (("matplotlib", stack.preview, "notebook"), ("xarray", stack.to_xarray, "xarray")):
        for name in [name for name in sys.modules if name.partition(".")[0] == module] + [module]:
            monkeypatch.setitem(sys.modules, name, None)  # as Python has it for what must not be imported
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.message == f"{call.__name__} needs {module}, which is not installed"
        assert caught.value.advice == f"pip install 'daskstack[{extra}]'"
    assert "8 of 12 items" in stack._repr_html_()


@pytest.mark.parametrize(("axes", "join"), [(None, "concat"), (("t", "c"), "stack")])
def test_a_dataset_is_what_xarray_opens_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axes: tuple[str, ...] | None, join: Any
) -> None:
    import dask.array as da
    import xarray

    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(6):
        tifffile.imwrite(f"in/t{k // 3}_c{k % 3}_{'dark' if k % 2 else 'é'}.tif", image(k), photometric="minisblack")
    stack = open_stack("in", labels=r"t(?P<t>\d)_c(?P<c>\d)_(?P<kind>\w+)\.", axes=axes, join=join)
    stack.to_zarr("out.zarr", progress=False)
    found = stack.to_xarray()
    assert isinstance(found["data"].data, da.Array)
    with xarray.open_zarr("out.zarr") as opened:
        assert set(opened.coords) - set(found.coords) == {"checksum"}
        assert set(opened.attrs) == {"daskstack", "crc32c"}
        expected = opened.drop_vars("checksum").drop_attrs()
        xarray.testing.assert_identical(expected.load(), found.load())
        assert {n: v.dims for n, v in found.variables.items()} == {n: v.dims for n, v in expected.variables.items()}
        assert {n: v.attrs for n, v in opened.variables.items()} == {n: {} for n in opened.variables}


def test_of_a_very_large_plane_a_part_is_made_numbers() -> None:
    plane = np.broadcast_to(np.uint8(9), (100_000, 200_000))  # of 160 GB as float64
    assert shrunk(plane, 4).tolist() == [[9.0] * 4] * 2


def test_long_names_are_told_apart_by_their_ends(tmp_path: Path) -> None:
    for k in range(3):
        np.save(tmp_path / f"a_name_as_an_instrument_gives_{k}.npy", image(k))
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", open_stack(tmp_path)._repr_html_())
    assert captions == [f"…_gives_{k}.npy" for k in range(3)]
