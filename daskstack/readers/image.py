"""PNG, JPEG, JPEG 2000, JPEG XL, WebP and BMP: one image a file, its stored values.

imagecodecs decodes all but BMP.  Some of its codecs are lenient (a JPEG that was cut short becomes grey)
and some change values (palettes become colours, 4 bits are spread over 8): what a file's own structure
can tell is checked here before they are called, and what they give is held against the header.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, TypeAlias

import numpy as np

from daskstack.errors import BadFileError
from daskstack.readers.base import Array, Contents, Header, Reader, open_regular, refuse_foreign
from daskstack.text import shape_text

Shape: TypeAlias = tuple[int, ...]

HEAD = 64
# An image may take this much unasked; a larger one must have bytes to show for it: Deflate, the format's most
# effective codec that has a bound, makes 1 byte of 1032.
MOST_UNASKED = 256 << 20
MOST_EXPANDED = 1040

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of each colour type
PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
PALETTE = 3
JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # tables have these three
JPEG_START, JPEG_END, JPEG_SCAN = 0xD8, 0xD9, 0xDA
JPEG_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")  # within a scan: no stuffed byte, no restart
J2K_MAGIC = b"\xff\x4f\xff\x51"
BOXED = b"\x00\x00\x00\x0c"
JXL_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
BMP_BY_MASKS = 3
BMP_MASKS = (0xFF0000, 0xFF00, 0xFF)


@dataclass(frozen=True)
class Image:
    """What a file's header says, and how its pixels are decoded."""

    shape: Shape
    dtype: np.dtype[Any]
    decode: Callable[[], Array]


class ImageReader(Reader):
    """Reads files that hold one image each; with ``join="concat"`` too that one image is the item."""

    kind: ClassVar[str]
    magics: ClassVar[tuple[bytes, ...]]

    @abstractmethod
    def image(self, file: BinaryIO, size: int) -> Image:
        """Parse the header of an open file of ``size`` bytes; ValueError says what is wrong."""

    def scratch(self, items: int, due: Header, file_nbytes: int) -> int:
        # OpenJPEG holds 32 bits for each sample of 8; a PNG's pixels are put together from its chunks
        return 4 * super().scratch(items, due, file_nbytes) + 2 * file_nbytes

    @contextmanager
    def open(self, path: str) -> Iterator[Contents]:
        """Open the file and parse its header."""
        with open_regular(path) as (descriptor, size), os.fdopen(descriptor, "rb", closefd=False) as file:
            head = file.read(HEAD)
            if not head.startswith(self.magics):
                raise refuse_foreign(path, head, self.kind)
            with _blaming(path):
                image = self.image(file, size)
                _refuse_vast(image, size)

            def read(out: Array, start: int) -> None:
                with _blaming(path):
                    array = image.decode()
                    if (array.shape, array.dtype) != (image.shape, image.dtype):
                        found = f"{shape_text(array.shape)} {array.dtype}"
                        raise BadFileError(path, found, f"{shape_text(image.shape)} {image.dtype}, as its header says")
                    out[...] = array

            yield Contents(image.shape, image.dtype, len(image.shape), read, dims=("y", "x", "s")[: len(image.shape)])


@contextmanager
def _blaming(path: str) -> Iterator[None]:
    """Name the file in what its parser says."""
    try:
        yield
    except BadFileError:
        raise
    except struct.error as exc:
        raise BadFileError(path, "it ends within its header") from exc
    except ValueError as exc:
        raise BadFileError(path, str(exc)) from exc


def _refuse_vast(image: Image, size: int) -> None:
    """A file of some bytes cannot make the decoder take all memory."""
    nbytes = math.prod(image.shape) * image.dtype.itemsize
    if not nbytes:
        raise ValueError(f"its header says {shape_text(image.shape)} {image.dtype}")
    if nbytes > max(MOST_UNASKED, size * MOST_EXPANDED):
        raise ValueError(f"its header says {shape_text(image.shape)} {image.dtype}, which {size} bytes cannot hold")


def _shape(height: int, width: int, samples: int) -> Shape:
    return (height, width) if samples == 1 else (height, width, samples)


def _at(file: BinaryIO, place: int, layout: str) -> tuple[Any, ...]:
    """Values at a place in a file, as struct reads them; struct.error where it ends before them."""
    file.seek(place)
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _whole(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


# -- PNG --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PngReader(ImageReader):
    """PNG of 1 to 16 bits: grey values and palette indices as they are stored, alpha as a plane.

    Each chunk's checksum is compared.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".png",)
    kind: ClassVar[str] = "a PNG image"
    magics: ClassVar[tuple[bytes, ...]] = (PNG_MAGIC,)

    def image(self, file: BinaryIO, size: int) -> Image:
        file.seek(len(PNG_MAGIC))
        begin = file.read(25)
        width, height, depth, colour = struct.unpack(">IIBB", begin[8:18])
        if begin[:8] != b"\x00\x00\x00\x0dIHDR" or begin[21:] != struct.pack(">I", zlib.crc32(begin[4:21])):
            raise ValueError("a damaged PNG header: its checksum differs")
        if depth not in PNG_DEPTHS.get(colour, ()):
            raise ValueError(f"a PNG image of colour type {colour} and {depth} bits, which there is none")
        if _at(file, size - 12, "12s") != (_png_chunk(b"IEND", b""),):
            raise ValueError("a PNG image that was cut short, or is followed by something else")
        _refuse_animation(file)
        dtype = "bool" if (colour, depth) == (0, 1) else "uint16" if depth == 16 else "uint8"
        shape = _shape(height, width, PNG_SAMPLES[colour])
        return Image(shape, np.dtype(dtype), lambda: _decode_png(_whole(file), depth, colour).astype(dtype, copy=False))


def _refuse_animation(file: BinaryIO) -> None:
    """An animation says so before its first pixels."""
    place, kind = len(PNG_MAGIC), b""
    while kind != b"IDAT":
        length, kind = _at(file, place, ">I4s")
        if kind == b"acTL":
            frames, _ = _at(file, place + 8, ">II")
            raise ValueError(f"an animated PNG of {frames} frames; split it into files of one image each")
        place += length + 12


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png_chunks(data: bytes) -> list[tuple[bytes, int, int]]:
    """Kind of each chunk and where it begins and ends, its checksum compared."""
    view = memoryview(data)
    chunks, place = [], len(PNG_MAGIC)
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if end > len(data) or zlib.crc32(view[place + 4 : end - 4]) != int.from_bytes(view[end - 4 : end]):
            raise ValueError(f"a damaged chunk at byte {place}: its checksum differs")
        chunks.append((kind, place, end))
        place = end
    return chunks


def _decode_png(data: bytes, depth: int, colour: int) -> Array:
    """The stored values: where libpng would expand them it is given the same pixels as plain grey, or no key colour."""
    import imagecodecs

    chunks = _png_chunks(data)
    if colour == PALETTE or any(kind == b"tRNS" for kind, _, _ in chunks):
        header = bytearray(data[16:29])
        header[9] = 0 if colour == PALETTE else colour
        pixels = [data[begin:end] for kind, begin, end in chunks if kind in (b"IDAT", b"IEND")]
        data = b"".join([PNG_MAGIC, _png_chunk(b"IHDR", bytes(header)), *pixels])
    array: Array = imagecodecs.png_decode(data)
    if depth < 8:  # libpng has spread them over 0 to 255
        array //= 255 // (2**depth - 1)
    return array


# -- JPEG -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JpegReader(ImageReader):
    """JPEG of 8 to 16 bits: grey, RGB (from YCbCr, as the format defines), or the four planes of CMYK as stored.

    The format has no checksums: that the file runs on to its end marker is all that can be known.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jpg", ".jpeg")
    kind: ClassVar[str] = "a JPEG image"
    magics: ClassVar[tuple[bytes, ...]] = (b"\xff\xd8\xff",)

    def image(self, file: BinaryIO, size: int) -> Image:
        place = 2
        while True:
            mark, code, length = _at(file, place, ">BBH")
            if mark != 0xFF or code in (JPEG_START, JPEG_SCAN, JPEG_END) or not length >= 2:
                raise ValueError(f"a JPEG image without a header: found marker {mark:02x}{code:02x} at byte {place}")
            if code in JPEG_FRAMES:
                break
            place += 1 if code == 0xFF else 2 + length  # markers may be padded
        bits, height, width, samples = _at(file, place + 4, ">BHHB")
        dtype = np.dtype("uint8" if bits <= 8 else "uint16")
        return Image(_shape(height, width, samples), dtype, lambda: _decode_jpeg(_whole(file)))


def _decode_jpeg(data: bytes) -> Array:
    import imagecodecs

    end = _jpeg_end(data)
    if data.startswith(b"\xff\xd8\xff", end) and b"MPF\x00" not in data[:end]:  # which announces previews
        raise ValueError("several JPEG images one after another; split them into files of one image each")
    array: Array = imagecodecs.jpeg_decode(data)
    return array


def _jpeg_end(data: bytes) -> int:
    """Where the end marker ends; libjpeg makes grey pixels of what is missing before it."""
    place, frames = 2, 0
    while found := JPEG_MARKER.match(data, place):
        code = found[1][0]
        if code == JPEG_END:
            return found.end()
        frames += code in JPEG_FRAMES
        if frames > 1 or code == JPEG_START:
            raise ValueError(f"a JPEG image within the JPEG image, at byte {place}")
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
        if code == JPEG_SCAN:
            following = JPEG_MARKER.search(data, place)
            place = following.start() if following else len(data)
    raise ValueError("a JPEG image that was cut short: it has no end marker")


# -- JPEG 2000, JPEG XL -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jpeg2000Reader(ImageReader):
    """JPEG 2000 files and bare codestreams, of samples of one size; no checksums, but nothing may be missing."""

    suffixes: ClassVar[tuple[str, ...]] = (".jp2", ".j2k")
    kind: ClassVar[str] = "a JPEG 2000 image"
    magics: ClassVar[tuple[bytes, ...]] = (BOXED + b"jP  \r\n\x87\n", J2K_MAGIC)

    def image(self, file: BinaryIO, size: int) -> Image:
        begin = 0
        for kind, place, end in _boxes(file, size):
            if kind == b"jp2h" and any(k == b"pclr" for k, _, _ in _boxes(file, end, place)):
                raise ValueError("a JPEG 2000 image of a palette, whose indices cannot be had")
            if kind == b"jp2c":
                begin = place
                break
        magic, _, _, right, bottom, left, top = _at(file, begin, ">4sHHIIII")
        (samples,) = _at(file, begin + 40, ">H")
        kinds = [_at(file, begin + 42 + 3 * k, ">BBB") for k in range(min(samples, 16))]
        if magic != J2K_MAGIC or not kinds:
            raise ValueError("a JPEG 2000 image without a codestream that can be read")
        if len(set(kinds)) > 1 or kinds[0][1:] != (1, 1):
            raise ValueError("a JPEG 2000 image whose samples differ in size or kind")
        bits, signed = (kinds[0][0] & 0x7F) + 1, kinds[0][0] >> 7
        if bits > 16:
            raise ValueError(f"a JPEG 2000 image of {bits} bits, which its codec does not hold exactly")
        dtype = np.dtype(f"{'u' * (not signed)}int{8 if bits <= 8 else 16}")
        return Image(_shape(bottom - top, right - left, samples), dtype, lambda: _decode_jpeg2000(_whole(file)))


def _decode_jpeg2000(data: bytes) -> Array:
    import imagecodecs

    array: Array = imagecodecs.jpeg2k_decode(data, numthreads=1)
    return array


def _boxes(file: BinaryIO, stop: int, place: int = 0) -> Iterator[tuple[bytes, int, int]]:
    """The boxes of a file of ISO's kind: what each is, and where its contents begin and end."""
    file.seek(place)
    if place == 0 and file.read(4) != BOXED:
        return
    while place + 8 <= stop:
        length, kind = _at(file, place, ">I4s")
        begin = place + 8
        if length == 1:
            (length,) = _at(file, begin, ">Q")
            begin += 8
        end = stop if length == 0 else place + length
        if not begin <= end <= stop:
            raise ValueError(f"it is cut short: its part at byte {place} ends at byte {end}, the file at {stop}")
        yield kind, begin, end
        place = end


@dataclass(frozen=True)
class JpegXlReader(ImageReader):
    """JPEG XL, decoded as soon as it is opened, since only its size is found simply in its header; no checksums."""

    suffixes: ClassVar[tuple[str, ...]] = (".jxl",)
    kind: ClassVar[str] = "a JPEG XL image"
    magics: ClassVar[tuple[bytes, ...]] = (b"\xff\x0a", BOXED + b"JXL \r\n\x87\n")

    def image(self, file: BinaryIO, size: int) -> Image:
        import imagecodecs

        begin = 0
        for kind, place, _ in _boxes(file, size):
            if kind in (b"jxlc", b"jxlp"):
                begin = place + 4 * (kind == b"jxlp")
                break
        magic, bits = _at(file, begin, "<2sQ")
        if magic != b"\xff\x0a":
            raise ValueError("a JPEG XL image without a codestream that can be read")
        height, width = _jxl_size(bits)
        _refuse_vast(Image((height, width), np.dtype("uint8"), lambda: array), size)
        array: Array = imagecodecs.jpegxl_decode(_whole(file), keeporientation=True, numthreads=1)
        if array.shape[:2] != (height, width) or array.ndim > 3:
            what = f"{shape_text(array.shape)} {array.dtype}, where its header says {(height, width)}"
            raise ValueError(f"a JPEG XL image of several frames ({what}); split it into files of one image each")
        return Image(array.shape, array.dtype, lambda: array)


def _jxl_size(bits: int) -> tuple[int, int]:
    """Height and width from the first bits of a codestream (SizeHeader of ISO/IEC 18181-1)."""

    def take(number: int) -> int:
        nonlocal bits
        value = bits & ((1 << number) - 1)
        bits >>= number
        return value

    def side() -> int:
        return 8 * (take(5) + 1) if small else take((9, 13, 18, 30)[take(2)]) + 1

    small = take(1)
    height = side()
    ratio = take(3)
    if not ratio:
        return height, side()
    over, under = JXL_RATIOS[ratio - 1]
    return height, height * over // under


# -- WebP -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WebpReader(ImageReader):
    """WebP: RGB, or RGBA where it has alpha; no checksums, but the file must be as long as it says."""

    suffixes: ClassVar[tuple[str, ...]] = (".webp",)
    kind: ClassVar[str] = "a WebP image"
    magics: ClassVar[tuple[bytes, ...]] = (b"RIFF",)

    def image(self, file: BinaryIO, size: int) -> Image:
        length, webp, first = _at(file, 4, "<I4s4s")
        if webp != b"WEBP":
            raise ValueError(f"not a WebP image but another RIFF file ({webp!r})")
        if length + 8 != size:
            raise ValueError(f"{size} bytes where its header says {length + 8}")
        height, width, alpha = _webp_header(file, first)
        return Image((height, width, 4 if alpha else 3), np.dtype("uint8"), lambda: _decode_webp(_whole(file)))


def _webp_header(file: BinaryIO, first: object) -> tuple[int, int, bool]:
    """Height, width and whether there is alpha, of the three kinds of first chunk."""
    if first == b"VP8X":
        flags, w, wide, h, high = _at(file, 20, "<B3xHBHB")
        if flags & 2:
            raise ValueError("an animated WebP; split it into files of one image each")
        return h + (high << 16) + 1, w + (wide << 16) + 1, bool(flags & 0x10)
    if first == b"VP8L":
        (bits,) = _at(file, 21, "<I")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, bool(bits >> 28 & 1)
    if first == b"VP8 ":
        width, height = _at(file, 26, "<HH")
        return height & 0x3FFF, width & 0x3FFF, False
    raise ValueError(f"a WebP image that begins with {first!r}")


def _decode_webp(data: bytes) -> Array:
    import imagecodecs

    array: Array = imagecodecs.webp_decode(data)
    return array


# -- BMP --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BmpReader(ImageReader):
    """BMP, uncompressed: palette indices (1, 4 or 8 bits), RGB, or of 32 bits the fourth byte too, alpha or not.

    Read here: the codec reads beyond a damaged file, and makes colours of indices.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".bmp",)
    kind: ClassVar[str] = "a BMP image"
    magics: ClassVar[tuple[bytes, ...]] = (b"BM",)

    def image(self, file: BinaryIO, size: int) -> Image:
        offset, length, width, height, _, bits, compression = _at(file, 10, "<IIiiHHI")
        known = compression == 0 and bits in (1, 4, 8, 24, 32)
        known |= compression == BMP_BY_MASKS and bits == 32 and _at(file, 54, "<III") == BMP_MASKS
        if length < 40 or not known or width < 1:
            raise ValueError(f"a BMP image of {bits} bits and compression {compression}, which is not read")
        stride = (width * bits + 31) // 32 * 4
        if offset + stride * abs(height) > size:
            raise ValueError(f"{size} bytes where its header says {offset + stride * abs(height)}")

        def decode() -> Array:
            file.seek(offset)
            rows = np.frombuffer(file.read(stride * abs(height)), np.uint8).reshape(abs(height), stride)
            return _unpacked(rows[::-1] if height > 0 else rows, width, bits)

        return Image(_shape(abs(height), width, max(1, bits // 8)), np.dtype("uint8"), decode)


def _unpacked(rows: Array, width: int, bits: int) -> Array:
    """Rows of bytes as pixels: indices, or red, green, blue and what follows."""
    if bits > 8:
        pixels = rows[:, : width * bits // 8].reshape(len(rows), width, bits // 8)
        return pixels[..., [2, 1, 0, 3][: bits // 8]]
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    spread: Array = (rows[..., None] >> shifts) & np.uint8(2**bits - 1)
    return spread.reshape(len(rows), -1)[:, :width]
