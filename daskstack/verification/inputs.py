"""What the libraries make of an input: NumPy, tifffile and imagecodecs, one item's file at a time."""

from __future__ import annotations

import logging
import math
import os
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.verification.finished import Finished

BMP_FIELDS = ((10, 14), (18, 22), (22, 26), (28, 30))  # where pixels begin, width, height, bits


class Decoder:
    """Reads one item's file with the library of its format; keeps the last file, which often holds the next item."""

    def __init__(self, finished: Finished) -> None:
        self.finished = finished
        self.path = ""
        self.array: NDArray[Any] | str = ""
        self.changed = False

    def __call__(self, item: int) -> NDArray[Any] | str:
        """The item as its file holds it, or why nobody can say."""
        finished = self.finished
        path = os.path.join(finished.record["root"], finished.file_of(item))
        if path != self.path:
            self.path, self.array = path, _decoded(path, finished.record["options"])
            found = os.stat(path) if os.path.exists(path) else None
            listed = (finished.column("size")[item], finished.column("mtime")[item])
            self.changed = found is not None and (str(found.st_size), str(found.st_mtime_ns)) != listed
        if isinstance(self.array, str):
            return self.array
        array = _cast(self.array.astype(self.array.dtype.newbyteorder("="), copy=False), finished)
        if finished.record["join"] == "concat":
            pages = array.reshape(-1, *finished.item_shape)
            return np.ascontiguousarray(pages[int(finished.column("page")[item])])
        return np.ascontiguousarray(array).reshape(array.shape)


def _cast(array: NDArray[Any], finished: Finished) -> NDArray[Any]:
    """A file's numbers as the dtype that was asked for, if it holds them all; else as they are."""
    dtype = finished.dtype
    if "dtype" not in finished.record["options"] or array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    if np.can_cast(array.dtype, dtype) and (array.dtype.kind == dtype.kind or array.itemsize < 8):
        return cast
    numbers, after = array.ravel().tolist(), cast.ravel().tolist()  # Python compares numbers of any kind exactly
    unlike = [(a, b) for a, b in zip(numbers, after, strict=True) if a != b]
    return cast if all(np.isnan(a) and np.isnan(b) for a, b in unlike) else array


def _decoded(path: str, options: dict[str, Any]) -> NDArray[Any] | str:
    """A file's array, or the part of it that was asked for, as its library gives it; or why there is none."""
    if not os.path.isfile(path):
        return "its file is not there any more" if not os.path.lexists(path) else "it is no regular file any more"
    try:
        if path.lower().endswith(".npy"):
            return np.asarray(np.load(path, allow_pickle=False))
        if not path.lower().endswith((".tif", ".tiff")):
            return _decoded_image(path)
        return _decoded_tiff(path, **{name: options.get(name) for name in ("series", "level", "pages")})
    except Exception as exc:  # noqa: BLE001  # whatever a damaged file makes a library raise
        return f"its file cannot be read: {type(exc).__name__}: {exc}"


def _decoded_image(path: str) -> NDArray[Any]:
    """An image as its codec gives it, but for what the codec would make colours of."""
    import imagecodecs

    with open(path, "rb") as f:
        data = f.read()
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".png":
        return _decoded_png(data)
    if suffix == ".bmp":
        return _decoded_bmp(data)
    if suffix == ".jxl":
        return np.asarray(imagecodecs.jpegxl_decode(data, keeporientation=True))
    codecs = {".jp2": "jpeg2k", ".j2k": "jpeg2k", ".webp": "webp"}
    return np.asarray(getattr(imagecodecs, f"{codecs.get(suffix, 'jpeg')}_decode")(data))


def _decoded_png(data: bytes) -> NDArray[Any]:
    """A PNG without its palette and key colour: the indices are decoded as grey, and fewer than 8 bits unscaled."""
    import imagecodecs

    kept, at = [data[:8]], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        kept += [data[at:end]] if data[at + 4 : at + 8] not in (b"PLTE", b"tRNS") else []
        at = end
    depth, colour = kept[1][16], kept[1][17]
    if colour == 3:
        header = kept[1][4:17] + b"\0" + kept[1][18:21]
        kept[1] = b"\0\0\0\x0d" + header + zlib.crc32(header).to_bytes(4, "big")
    array = np.asarray(imagecodecs.png_decode(b"".join(kept)))
    if depth < 8:
        array = np.round(array * ((2**depth - 1) / 255)).astype("bool" if (depth, colour) == (1, 0) else "uint8")
    return array


def _decoded_bmp(data: bytes) -> NDArray[Any]:
    """A BMP row by row."""
    begin, width, height, bits = (int.from_bytes(data[a:b], "little", signed=True) for a, b in BMP_FIELDS)
    length = -(-width * bits // 32) * 4
    rows = [np.frombuffer(data, np.uint8, length, begin + k * length) for k in range(abs(height))]
    rows = rows[::-1] if height > 0 else rows
    if bits <= 8:
        spread = [np.unpackbits(row).reshape(-1, bits) @ (1 << np.arange(bits)[::-1]) for row in rows]
        return np.stack(spread)[:, :width].astype(np.uint8)
    blue, green, red, *fourth = (np.stack(rows)[:, k : width * bits // 8 : bits // 8] for k in range(bits // 8))
    return np.stack([red, green, blue, *fourth], axis=-1)


def _decoded_tiff(
    path: str, *, series: int | str | None, level: int | None, pages: str | None, ome: bool | None = None
) -> NDArray[Any]:
    """A series of pages; of an OME-TIFF whose description is not of its own pages alone, as if it had none."""
    from tifffile import TiffFile

    flags: dict[str, Any] = {"is_ome": ome, "is_mmstack": False, "is_ndtiff": False, "is_mdgel": False}
    with TiffFile(path, _multifile=False, **flags) as tif:
        if tif.is_ome and _tells_of_others(tif):
            return _decoded_tiff(path, series=series, level=level, pages=pages, ome=False)
        numbers = {one.name: k for k, one in enumerate(tif.series)}
        chosen = tif.series[numbers[series] if isinstance(series, str) else series or 0].levels[level or 0]
        array = np.asarray(tif.asarray(series=chosen))
        if pages is None:
            return array
        size, ndim = chosen.keyframe.size, chosen.keyframe.ndim
        while math.prod(array.shape[array.ndim - ndim :]) < size:  # axes of length 1 within a page
            ndim += 1
        array = array.reshape(-1, *array.shape[array.ndim - ndim :])
        ends = [int(end) if end else None for end in pages.split(":")]
        return np.asarray(array[slice(*ends) if len(ends) > 1 else ends[0]])


def _tells_of_others(tif: Any) -> bool:
    """Whether an OME description misses pages of the file, or tells of more than there are."""
    logger = logging.getLogger("tifffile")
    before, logger.disabled = logger.disabled, True  # that pages are missing is what is asked here
    try:
        held = [None if page is None else page.index for series in tif.series for page in series]
    except Exception:  # noqa: BLE001  # whatever odd XML leads to
        return True
    finally:
        logger.disabled = before
    return any(series.kind != "ome" for series in tif.series) or set(held) != set(range(len(tif.pages)))
