"""Files of several programs, each read equal by daskstack and by other readers; where those differ, why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import imagecodecs
import numpy as np
import pytest
import tifffile
from conftest import DATA, Array, same
from PIL import Image

from daskstack import build

Kind = tuple[tuple[int, ...], str]
GREY, COLOUR, ALPHA = (5, 7), (5, 7, 3), (5, 7, 4)


def noise(k: int, kind: Kind) -> Array:
    """Never 0: some writers of WebP lose the colours of what cannot be seen."""
    return (np.random.default_rng(k).random(kind[0]) * 250 + 1).astype(kind[1])


def opencv_order(array: Array) -> Array:
    """OpenCV keeps colours as blue, green, red."""
    return array if array.ndim == 2 else array[..., [2, 1, 0, 3][: array.shape[2]]]


def by_tifffile(path: Path, array: Array) -> None:
    tifffile.imwrite(path, array, photometric="minisblack" if array.ndim == 2 else "rgb")


def by_pillow(path: Path, array: Array) -> None:
    lossless: dict[str, Any] = {"lossless": True, "exact": True} if path.suffix == ".webp" else {}
    Image.fromarray(array).save(path, **lossless)


def by_libtiff(path: Path, array: Array) -> None:
    Image.fromarray(array).save(path, compression="tiff_lzw")  # Pillow alone writes none that is compressed


def by_opencv(path: Path, array: Array) -> None:
    assert cv2.imwrite(
        str(path), opencv_order(array), [cv2.IMWRITE_WEBP_QUALITY, 101] if path.suffix == ".webp" else []
    )


TIFF_KINDS: list[Kind] = [(GREY, "uint8"), (GREY, "uint16"), (GREY, "float32"), (COLOUR, "uint8"), (ALPHA, "uint8")]
MORE_KINDS: list[Kind] = [
    (GREY, "int16"),
    (GREY, "float64"),
    (COLOUR, "uint16"),
    (ALPHA, "uint16"),
]  # Pillow writes none
PNG_KINDS: list[Kind] = [(GREY, "uint8"), (GREY, "uint16"), (COLOUR, "uint8"), (ALPHA, "uint8")]
DEEP: list[Kind] = [(COLOUR, "uint16"), (ALPHA, "uint16")]
WRITERS: list[tuple[str, Callable[[Path, Array], None], list[Kind]]] = [
    (".tif", by_tifffile, TIFF_KINDS + MORE_KINDS),
    (".tif", by_pillow, TIFF_KINDS),
    (".tif", by_libtiff, TIFF_KINDS),
    (".tif", by_opencv, TIFF_KINDS + MORE_KINDS),
    (".png", by_pillow, PNG_KINDS),
    (".png", by_opencv, PNG_KINDS + DEEP),
    (".bmp", by_pillow, [(GREY, "uint8"), (COLOUR, "uint8")]),
    (".bmp", by_opencv, [(GREY, "uint8"), (COLOUR, "uint8"), (ALPHA, "uint8")]),
    (".webp", by_pillow, [(COLOUR, "uint8"), (ALPHA, "uint8")]),
    (".webp", by_opencv, [(COLOUR, "uint8"), (ALPHA, "uint8")]),
    (".jp2", by_pillow, PNG_KINDS),
]


def from_pillow(path: Path) -> Array:
    with Image.open(path) as opened:
        return np.asarray(opened)


def from_opencv(path: Path) -> Array:
    return opencv_order(np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)))


def from_imagecodecs(path: Path) -> Array:
    decode = getattr(imagecodecs, {".tif": "tiff", ".jp2": "jpeg2k"}.get(path.suffix, path.suffix[1:]) + "_decode")
    return np.asarray(decode(path.read_bytes()))


READERS: dict[str, Callable[[Path], Array]] = {
    "tifffile": tifffile.imread,
    "Pillow": from_pillow,
    "OpenCV": from_opencv,
    "libraries that imagecodecs holds": from_imagecodecs,
}


def differs(reader: str, path: Path, kind: Kind, found: Array | None) -> str:
    """Why a reader gives other pixels than those that were written; nothing where it should not."""
    shape, dtype = kind
    if found is None and reader == "tifffile" and path.suffix != ".tif":
        return "it reads TIFF alone"
    if reader == "Pillow" and found is None and dtype == "float64":
        return "it has no mode for them"
    if reader == "Pillow" and found is not None:
        if dtype == "int16" and found.dtype == "int32":
            return "its one mode of signed integers has 32 bits"
        if dtype == "uint16" and len(shape) == 3 and found.dtype == "uint8":
            return "its modes of colour have 8 bits"
    if kind == (ALPHA, "uint8") and path.suffix == ".bmp":
        if reader.endswith("imagecodecs holds") and found is None:
            return "its older versions read no BMP with an alpha plane"
        if found is not None and found.shape[-1] == 3:
            return "its older versions leave the alpha plane of a BMP out"
    if reader == "OpenCV" and kind == (ALPHA, "uint8") and path.suffix == ".tif" and found is not None:
        return "libtiff multiplies colours by alpha for it"
    return ""


@pytest.mark.parametrize(
    ("suffix", "write", "kind"), [(suffix, write, kind) for suffix, write, kinds in WRITERS for kind in kinds]
)
def test_all_read_what_was_written(tmp_path: Path, suffix: str, write: Callable[..., None], kind: Kind) -> None:
    (tmp_path / "in").mkdir()
    due = np.stack([noise(k, kind) for k in range(3)])
    paths = [tmp_path / "in" / f"{k}{suffix}" for k in range(3)]
    for path, array in zip(paths, due, strict=True):
        write(path, array)
    build(tmp_path / "in", tmp_path / "out.npy", progress=False)
    assert same(np.load(tmp_path / "out.npy"), due)
    agree, due_to_age = 0, 0
    for name, read in READERS.items():
        found: Array | None
        try:
            found = read(paths[1])
        except Exception:  # noqa: BLE001  # each has its own
            found = None
        if found is not None and same(found, due[1]):
            agree += 1
        else:
            why = differs(name, paths[1], kind, found)
            assert why, f"{name} reads it otherwise: {found}"
            due_to_age += "older versions" in why
    assert agree >= 2 - due_to_age


def test_imagej_s_own_files_are_read_equal_by_all(tmp_path: Path) -> None:
    paths = sorted(DATA.glob("banana*.tif"))
    build(paths, tmp_path / "out.npy", progress=False)
    found = np.load(tmp_path / "out.npy")
    assert found.shape == (3, 384, 384)
    for read in READERS.values():
        assert same(np.stack([read(path) for path in paths]), found)


BITS = np.eye(5, 9, dtype=bool)
INDICES = noise(1, (GREY, "uint8"))
COLOURS = np.random.default_rng(2).integers(0, 256, (3, 256), "uint16") * 257


def test_min_is_white_is_turned_by_the_others_but_not_by_tifffile(tmp_path: Path) -> None:
    """What is stored is taken, not what it looks like."""
    for k, array in enumerate((BITS, INDICES)):
        path = tmp_path / f"{k}.tif"
        tifffile.imwrite(path, array, photometric="miniswhite")
        build(path, tmp_path / f"{k}.npy", progress=False)
        assert same(np.load(tmp_path / f"{k}.npy")[0], array)
        assert same(tifffile.imread(path), array)
        assert same(from_pillow(path), ~array)  # of bits and of bytes
    assert same(from_opencv(tmp_path / "0.tif"), np.where(BITS, 0, 255).astype("uint8"))
    assert same(from_opencv(tmp_path / "1.tif"), ~INDICES)


def test_palettes_become_colours_in_opencv_alone(tmp_path: Path) -> None:
    path = tmp_path / "palette.tif"
    tifffile.imwrite(path, INDICES, photometric="palette", colormap=COLOURS)
    build(path, tmp_path / "out.npy", progress=False)
    for found in (np.load(tmp_path / "out.npy")[0], tifffile.imread(path), from_pillow(path)):
        assert same(found, INDICES)
    assert same(from_opencv(path), (COLOURS // 257).astype("uint8").T[INDICES])


def test_of_several_pages_the_others_read_the_first_unless_they_are_asked(tmp_path: Path) -> None:
    path, due = tmp_path / "pages.tif", np.stack([noise(k, (GREY, "uint16")) for k in range(3)])
    with tifffile.TiffWriter(path) as writer:
        for page in due:
            writer.write(page, photometric="minisblack", metadata=None)
    build(path, tmp_path / "out.npy", progress=False)
    assert same(np.load(tmp_path / "out.npy")[0], due)
    assert same(tifffile.imread(path), due)
    assert same(from_pillow(path), due[0])
    assert same(from_opencv(path), due[0])
    assert same(np.stack(cv2.imreadmulti(str(path), flags=cv2.IMREAD_UNCHANGED)[1]), due)


def test_two_samples_without_a_colour_are_a_plane_and_alpha_or_two_planes(tmp_path: Path) -> None:
    """What Pillow calls LA: others give one of the two, or make colours of them."""
    path, due = tmp_path / "la.png", noise(1, ((5, 7, 2), "uint8"))
    Image.fromarray(due).save(path)
    build(path, tmp_path / "out.npy", progress=False)
    assert same(np.load(tmp_path / "out.npy")[0], due)
    assert same(from_pillow(path), due)
    assert same(from_opencv(path), due[..., [0, 0, 0, 1]])
