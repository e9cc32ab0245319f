"""Images that are one a file: PNG, JPEG, JPEG 2000, JPEG XL, WebP and BMP."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal

import imagecodecs
import numpy as np
import pytest
from conftest import Array, image
from test_readers import ReaderContract

from daskstack.errors import BadFileError
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
