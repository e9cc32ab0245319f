"""Images that are one a file: PNG, JPEG, JPEG 2000, JPEG XL, WebP and BMP."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal

import imagecodecs
import numpy as np
import pytest
from conftest import Array, image
from PIL import Image
from test_readers import ReaderContract

import daskstack
from daskstack.errors import BadFileError, BadFilesError
from daskstack.readers import (
    BmpReader,
    Jpeg2000Reader,
    JpegReader,
    JpegXlReader,
    PngReader,
    Reader,
    WebpReader,
)

Join = Literal["stack", "concat"]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(array: Array, depth: int = 8, colour: int = 0, before: bytes = b"", **about: int) -> bytes:
    """A PNG file written by a few plain lines, so that pixels are known to lie in it as they are given."""
    height, width = array.shape[:2]
    rows = array.reshape(height, -1)
    if depth == 16:
        lines = [row.astype(">u2").tobytes() for row in rows]
    else:
        bits = np.unpackbits(rows.astype("uint8")[..., None], axis=-1)[..., 8 - depth :]
        lines = [np.packbits(row).tobytes() for row in bits.reshape(height, -1)]
    header = struct.pack(
        ">IIBBBBB", about.get("width", width), about.get("height", height), depth, colour, 0, 0, about.get("laced", 0)
    )
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines))
    half = len(pixels) // 2
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + before
        + chunk(b"IDAT", pixels[:half])
        + chunk(b"IDAT", pixels[half:])
        + chunk(b"IEND", b"")
    )


class OneImage(ReaderContract):
    """The contract of readers of one image a file."""

    suffix = codec = ""
    reader: type[Reader]
    encode: ClassVar[dict[str, Any]] = {}

    def make(self, join: Join = "stack") -> Reader:
        return self.reader(join)

    def write(self, path: Path, array: Array) -> None:
        codec = getattr(imagecodecs, f"{self.codec}_encode")
        path.write_bytes(codec(array, **self.encode))

    def test_one_image_is_one_item_joined_or_not(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [self.item(3)])
        assert self.make("concat").probe(path) == self.make().probe(path)
        out = self.room(1)
        assert self.make("concat").read_into([path], out, self.due()) == []
        assert np.array_equal(out[0], self.item(3))

    def test_what_a_header_claims_is_refused_before_it_is_decoded(self, tmp_path: Path) -> None:
        path = tmp_path / f"vast{self.suffix}"
        path.write_bytes(self.vast())
        with pytest.raises(BadFileError, match=r"\(\d+, \d+(, \d)?\) \w+, which \d+ bytes cannot hold|bytes where its"):
            self.make().probe(str(path))

    def vast(self) -> bytes:
        """A file that claims many more pixels than its bytes can hold."""
        raise NotImplementedError

    def test_no_flipped_byte_gives_another_shape(self, tmp_path: Path) -> None:
        (path,) = self.files(tmp_path, [self.item(3)])
        data = Path(path).read_bytes()
        for at in range(0, len(data), 1 + len(data) // 300):
            broken = bytearray(data)
            broken[at] ^= 1 << at % 8
            Path(path).write_bytes(broken)
            bad = self.make().read_into([path], self.room(1), self.due())
            assert [b.path for b in bad] in ([], [path])


class TestPng(OneImage):
    suffix, codec, reader = ".png", "png", PngReader
    dtypes = ("uint8", "uint16")
    shapes = ((1, 7), (7, 5), (1, 35), (10, 7), (5, 7, 2), (5, 7, 3), (5, 7, 4))

    def vast(self) -> bytes:
        return png(image(0, (2, 2)), width=30_000, height=30_000)


class TestJpeg(OneImage):
    suffix, codec, reader = ".jpg", "jpeg", JpegReader
    dtypes = ("uint8", "uint16")
    shapes = ((1, 7), (7, 5), (1, 35), (10, 7))
    encode: ClassVar[dict[str, Any]] = {"lossless": True}

    def vast(self) -> bytes:
        data = bytearray(imagecodecs.jpeg_encode(image(0, dtype="uint8")))
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = b"\xff\xff\xff\xff"
        return bytes(data)


class TestJpeg2000(OneImage):
    suffix, codec, reader = ".jp2", "jpeg2k", Jpeg2000Reader
    dtypes = ("uint8", "uint16", "int16")
    shapes = ((1, 7), (7, 5), (1, 35), (10, 7), (5, 7, 3), (5, 7, 4))
    encode: ClassVar[dict[str, Any]] = {"level": 0}

    def vast(self) -> bytes:
        data = bytearray(imagecodecs.jpeg2k_encode(image(0), level=0))
        at = data.index(b"\xff\x4f\xff\x51") + 8
        data[at : at + 8] = b"\0\1\0\0" * 2
        return bytes(data)


class TestJpegXl(OneImage):
    suffix, codec, reader = ".jxl", "jpegxl", JpegXlReader
    dtypes = ("uint8", "uint16", "float32")
    shapes = ((1, 7), (7, 5), (1, 35), (10, 7), (5, 7, 3), (5, 7, 4))
    encode: ClassVar[dict[str, Any]] = {"lossless": True}

    def vast(self) -> bytes:
        bits = 0 | 3 << 1 | 100_000 << 3 | 1 << 33  # not small, 30 bits of height, as wide as high
        return b"\xff\x0a" + struct.pack("<Q", bits) + bytes(100)


class TestWebp(OneImage):
    suffix, codec, reader = ".webp", "webp", WebpReader
    dtype, shape = "uint8", (5, 7, 3)
    dtypes = ("uint8",)
    shapes = ((1, 7, 3), (7, 5, 3), (1, 35, 3), (10, 7, 3), (5, 7, 4))
    encode: ClassVar[dict[str, Any]] = {"lossless": True}

    def vast(self) -> bytes:
        data = bytearray(imagecodecs.webp_encode(image(0, (5, 7, 3), "uint8"), lossless=True))
        data[21:25] = struct.pack("<I", 0x0FFFFFFF)
        return bytes(data)


class TestBmp(OneImage):
    suffix, codec, reader = ".bmp", "bmp", BmpReader
    dtype = "uint8"
    dtypes = ("uint8",)
    shapes = ((1, 7), (7, 5), (1, 35), (10, 7), (5, 7, 3))

    def vast(self) -> bytes:
        data = bytearray(imagecodecs.bmp_encode(image(0, dtype="uint8")))
        data[18:26] = struct.pack("<ii", 1 << 20, 1 << 20)
        return bytes(data)


def encoded(codec: str, array: Array, **options: Any) -> bytes:
    return bytes(getattr(imagecodecs, f"{codec}_encode")(array, **options))


def saved(array: Array, kind: str, mode: str | None = None, **options: Any) -> bytes:
    """A file as Pillow writes it."""
    stream = io.BytesIO()
    picture = Image.fromarray(array)
    if mode == "P":
        picture = Image.frombytes("P", array.shape[::-1], array.tobytes())
        picture.putpalette([255 - k // 3 for k in range(768)])
    elif mode:
        picture = Image.frombytes(mode, array.shape[1::-1], array.tobytes())
    picture.save(stream, kind, **options)
    return stream.getvalue()


def pillow(data: bytes) -> Array:
    """The pixels as Pillow reads them: indices where there is a palette."""
    return np.asarray(Image.open(io.BytesIO(data)))


def noise(samples: int, high: int = 256, dtype: str = "uint8") -> Array:
    shape = (19, 37) if samples == 1 else (19, 37, samples)
    return np.random.default_rng(samples).integers(0, high, shape).astype(dtype)


def smooth(samples: int) -> Array:
    y, x = np.ogrid[:19, :37]
    planes = [(5 * y + (3 + k) * x).astype("uint8") for k in range(samples)]
    return planes[0] if samples == 1 else np.stack(planes, axis=-1)


RAMP = chunk(b"PLTE", bytes(range(255, -1, -1)) * 3)
KEY = chunk(b"tRNS", b"\0\3")
# Name of the file -> its bytes and the array that is due.
KINDS: dict[str, tuple[bytes, Array]] = {
    "1 bit.png": (png(noise(1, 2), 1), noise(1, 2, "bool")),
    "2 bits.png": (png(noise(1, 4), 2), noise(1, 4)),
    "4 bits.png": (png(noise(1, 16), 4), noise(1, 16)),
    "16 bits.png": (png(noise(1, 65536, "uint16"), 16), noise(1, 65536, "uint16")),
    "16 bits with alpha.png": (png(noise(2, 65536, "uint16"), 16, 4), noise(2, 65536, "uint16")),
    "16 bits of colour.png": (png(noise(3, 65536, "uint16"), 16, 2), noise(3, 65536, "uint16")),
    "16 bits of colour with alpha.png": (png(noise(4, 65536, "uint16"), 16, 6), noise(4, 65536, "uint16")),
    "1 bit of a palette.png": (png(noise(1, 2), 1, 3, RAMP[:8] + RAMP[8:]), noise(1, 2)),
    "4 bits of a palette.png": (png(noise(1, 16), 4, 3, chunk(b"PLTE", bytes(48))), noise(1, 16)),
    "palette.png": (png(noise(1), 8, 3, RAMP), noise(1)),
    "palette with alpha.png": (png(noise(1), 8, 3, RAMP + KEY), noise(1)),
    "grey with a key.png": (png(noise(1), 8, 0, KEY), noise(1)),
    "colour with a key.png": (png(noise(3), 8, 2, chunk(b"tRNS", bytes(6))), noise(3)),
    "colour with a gamma.png": (png(noise(3), 8, 2, chunk(b"gAMA", b"\0\0\xff\xff")), noise(3)),
    "grey with alpha.png": (saved(noise(2), "PNG", "LA"), noise(2)),
    "colour with alpha.png": (saved(noise(4), "PNG"), noise(4)),
    "palette of pillow.png": (saved(noise(1), "PNG", "P"), noise(1)),
    **{
        f"{name}.jpg": (data, pillow(data))
        for name, data in {
            "grey": saved(smooth(1), "JPEG"),
            "colour": saved(smooth(3), "JPEG", quality=90),
            "colour by RGB": saved(smooth(3), "JPEG", keep_rgb=True),
            "progressive": saved(smooth(3), "JPEG", progressive=True),
            "restarts": saved(smooth(3), "JPEG", restart_marker_rows=1),
            "turned": saved(smooth(3), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
        }.items()
    },
    "four planes.jpg": ((cmyk := saved(smooth(4), "JPEG", "CMYK")), 255 - pillow(cmyk)),  # Pillow turns Adobe's
    "12 bits.jpg": (
        encoded("jpeg", noise(1, 4096, "uint16"), bitspersample=12, lossless=True),
        noise(1, 4096, "uint16"),
    ),
    "bare.j2k": (encoded("jpeg2k", noise(3), level=0, codecformat="j2k"), noise(3)),
    "12 bits.jp2": (
        encoded("jpeg2k", noise(1, 4096, "uint16"), level=0, bitspersample=12),
        noise(1, 4096, "uint16"),
    ),
    "lossy.jp2": ((lossy := saved(smooth(3), "JPEG2000", quality_layers=[20])), pillow(lossy)),
    "container.jxl": (encoded("jpegxl", noise(3), lossless=True, usecontainer=True), noise(3)),
    "small.jxl": (encoded("jpegxl", noise(3)[:16, :24], lossless=True), noise(3)[:16, :24]),
    "wide.jxl": (encoded("jpegxl", np.tile(noise(1), (1, 30)), lossless=True), np.tile(noise(1), (1, 30))),
    "lossy.webp": ((soft := saved(smooth(3), "WEBP")), pillow(soft)),
    "lossy with alpha.webp": ((clear := saved(smooth(4), "WEBP")), pillow(clear)),
    "lossless with alpha.webp": (saved(noise(4), "WEBP", lossless=True, exact=True), noise(4)),
    "with a profile.webp": (saved(noise(3), "WEBP", lossless=True, icc_profile=b"profile"), noise(3)),
    "1 bit.bmp": (saved(noise(1, 2, "bool"), "BMP"), noise(1, 2)),
    "palette.bmp": (saved(noise(1), "BMP", "P"), noise(1)),
    "grey.bmp": (saved(noise(1), "BMP"), noise(1)),
    "colour.bmp": (saved(noise(3), "BMP"), noise(3)),
    "alpha.bmp": (saved(noise(4), "BMP"), noise(4)),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_stored_as_they_are_and_verified(tmp_path: Path, name: str) -> None:
    data, due = KINDS[name]
    stem, _, suffix = name.rpartition(".")
    for k in range(2):
        (tmp_path / f"{k} {stem}.{suffix.upper()}").write_bytes(data)
    stack = daskstack.open_stack(tmp_path)
    assert stack.dims == ("item", "y", "x", "s")[: due.ndim + 1]
    stack.check()
    out = tmp_path / "out.npy"
    stack.to_npy(out, progress=False)
    found = np.load(out)
    assert found.dtype == due.dtype
    assert np.array_equal(found, np.stack([due, due]))
    assert daskstack.verify(out, data=True, inputs=True, progress=False).status == 0


def frames_of(kind: str) -> bytes:
    stream = io.BytesIO()
    pictures = [Image.fromarray(noise(3)), Image.fromarray(noise(3)[::-1])]
    pictures[0].save(stream, kind, save_all=True, append_images=pictures[1:])
    return stream.getvalue()


PLAIN = png(noise(1))
PHOTO = saved(smooth(3), "JPEG")
REFUSED: dict[str, tuple[bytes, str]] = {
    "frames.png": (frames_of("PNG"), "an animated PNG of 2 frames; split it into files of one image each"),
    "frames.webp": (frames_of("WEBP"), "an animated WebP; split it into files of one image each"),
    "frames.jxl": (
        encoded("jpegxl", np.stack([noise(3)] * 2), lossless=True, photometric="rgb"),
        "a JPEG XL image of several frames ((2, 19, 37, 3) uint8, where its header says (19, 37))",
    ),
    "two.jpg": (PHOTO + PHOTO, "several JPEG images one after another"),
    "inner.jpg": (PHOTO[:2] + PHOTO, "found marker ffd8 at byte 2"),
    "more.png": (PLAIN + b"\0", "cut short, or is followed by something else"),
    "two.png": (PLAIN + PLAIN, "at byte"),
    "checksum.png": (PLAIN.replace(b"IDATx", b"IDATy"), "a damaged chunk at byte 33: its checksum differs"),
    "header.png": (
        png(noise(1)).replace(b"\0\0\0\x25", b"\0\0\0\x24", 1),
        "a damaged PNG header: its checksum differs",
    ),
    "depth.png": (png(noise(1), 8, 5), "colour type 5 and 8 bits, which there is none"),
    "rows.png": (png(noise(1), height=20), "PngError"),
    "none.png": (png(noise(1), height=0), "its header says (0, 37) uint8"),
    "grey.jpg": (PHOTO[: len(PHOTO) // 2] + bytes(len(PHOTO) // 2), "cut short: it has no end marker"),
    "a.jpg": (PLAIN, "not a JPEG image but a PNG image"),
    "lines.png": (PLAIN.replace(b"\r\n", b"\n", 1), r"a PNG image whose first bytes are damaged: b'\x89PNG\n\x1a\n"),
    "a.png": (PHOTO, "not a PNG image but a JPEG image"),
    "gif.png": (frames_of("GIF"), "not a PNG image but a GIF image; save its frames as PNG or TIFF files"),
    "cut.webp": (KINDS["lossy.webp"][0][:-1], "bytes where its header says"),
    "wave.webp": (b"RIFF" + struct.pack("<I", 92) + b"WAVEfmt " + bytes(84), "not a WebP image but another RIFF file"),
    "16 bits.bmp": (KINDS["grey.bmp"][0][:28] + b"\x10" + KINDS["grey.bmp"][0][29:], "a BMP image of 16 bits"),
    "palette.jp2": (
        KINDS["12 bits.jp2"][0].replace(b"colr", b"pclr"),
        "a JPEG 2000 image of a palette, whose indices cannot be had",
    ),
    "32 bits.jp2": (
        encoded("jpeg2k", noise(1).astype("uint32") << 20, level=0),
        "bits, which its codec does not hold exactly",
    ),
    "head.jp2": (KINDS["12 bits.jp2"][0][:40], "cut short"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_single_whole_image_is_refused(tmp_path: Path, name: str) -> None:
    data, message = REFUSED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadFilesError) as caught:
        daskstack.build(tmp_path / name, tmp_path / "out.npy", progress=False)
    (bad,) = caught.value.files
    assert message in bad.problem
    assert name in bad.message
    assert not (tmp_path / "out.npy").exists()


def test_what_follows_a_photograph_is_left_alone(tmp_path: Path) -> None:
    preview = PHOTO[:2] + b"\xff\xe2\0\6MPF\0" + PHOTO[2:] + PHOTO
    for k, data in enumerate([PHOTO, preview, PHOTO + b"a video"]):
        (tmp_path / f"{k}.jpg").write_bytes(data)
    found = daskstack.open_stack(tmp_path).array.compute()
    assert np.array_equal(found, np.stack([pillow(PHOTO)] * 3))
