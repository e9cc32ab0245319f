"""Whether a finished output is what its record says, by code that shares nothing with what wrote it.

The record and index beside an output (or in a Zarr group) hold the checksum of every side file and of every
item.  Here they are compared with what lies on disk: plain reads for a ``.npy``, zarr-python for a group,
and for the inputs a plain loop over NumPy, tifffile and imagecodecs.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from daskstack.errors import UsageError
from daskstack.files import absolute
from daskstack.inspection import Finished, Problem, inspected
from daskstack.progress import Progress
from daskstack.text import count, plural, printable, shown

EQUAL, DIFFERENT, UNCHECKED = 0, 1, 3
SHOWN = 20
BMP_FIELDS = ((10, 14), (18, 22), (22, 26), (28, 30))  # where pixels begin, width, height, bits
AT_ONCE = 16 << 20  # bytes read at a time


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What was compared, and what differs; print it.

    Attributes
    ----------
    out : str
        The output.
    checked : tuple of str
        What was compared, in words.
    problems : tuple of Problem
        What differs: item, file and what is wrong.
    unchecked : tuple of str
        What could not be compared, and why.
    """

    out: str
    checked: tuple[str, ...]
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]

    @property
    def status(self) -> int:
        """0 equal, 1 different, 3 could not check all that was asked for."""
        return DIFFERENT if self.problems else UNCHECKED if self.unchecked else EQUAL

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        words = {EQUAL: "equal", DIFFERENT: "different", UNCHECKED: "not checked"}
        return {"result": words[self.status], "status": self.status, **asdict(self)}

    def __str__(self) -> str:
        lines = [*self.checked]
        if self.problems:
            lines.append(f"different: {plural(len(self.problems), 'problem')} in {shown(self.out)}")
            lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
            if len(self.problems) > SHOWN:
                lines.append(f"  and {count(len(self.problems) - SHOWN)} more")
            lines.append("next  move it away and build it anew")
        lines += [f"not checked: {text}" for text in self.unchecked]
        if self.status == EQUAL:
            lines.append(f"equal: {shown(self.out)}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass
class _Findings:
    checked: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def verified(
    out: str,
    *,
    data: bool = False,
    inputs: bool = False,
    sample: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> VerifyReport:
    """Compare an output with its record: its structure always; its items and its inputs where asked.

    Raises
    ------
    UsageError
        ``sample`` is no number of items.
    """
    if sample is not None and sample < 1:
        raise UsageError(f"sample={sample}", "give a number of items, at least 1")
    if sample is not None and not (data or inputs):
        raise UsageError(f"sample={sample} of nothing", "choose data or inputs as well")
    full = absolute(out)
    found = _Findings()
    finished = inspected(full, found.problems, found.unchecked)
    if finished is None:
        return VerifyReport(full, (), tuple(found.problems), tuple(found.unchecked))
    found.checked.append(f"structure  {finished.summary}")
    if not finished.broken:
        items = _chosen(finished.items, sample, seed)
        if data:
            _compare_data(finished, items, found, progress=progress)
        if inputs:
            _compare_inputs(finished, items, found, progress=progress)
    elif data or inputs:
        found.unchecked.append("the items, since the array itself is not as recorded")
    return VerifyReport(full, tuple(found.checked), tuple(found.problems), tuple(found.unchecked))


def _chosen(items: int, sample: int | None, seed: int) -> NDArray[np.int64]:
    """All items, or so many of them at random, in order."""
    if sample is None or sample >= items:
        return np.arange(items)
    return np.sort(np.random.default_rng(seed).choice(items, sample, replace=False))


def _compare_data(finished: Finished, items: NDArray[np.int64], found: _Findings, *, progress: bool | None) -> None:
    """Each item's checksum beside the one in the index."""
    if finished.checksums is None:
        found.unchecked.append("the data: the index has no checksums that can be read")
        return
    different = 0
    with Progress(len(items), "items", wanted=progress) as bar:
        for item, stored in _stored_items(finished, items):
            problem = stored if isinstance(stored, str) else ""
            if not isinstance(stored, str):
                checksum = f"{google_crc32c.value(stored.tobytes()):08x}"
                if checksum != finished.checksums[item]:
                    problem = f"its checksum is {checksum}, due {finished.checksums[item]}"
            if problem:
                different += 1
                found.problems.append(Problem(problem, item, finished.file_of(item)))
            bar.update(1, finished.item_nbytes, bool(problem))
    whole = "" if len(items) == finished.items else f" of {count(finished.items)}"
    found.checked.append(f"data       {count(len(items))}{whole} items, {_different(different)}")


def _different(number: int) -> str:
    return "all as recorded" if not number else f"{count(number)} not as recorded"


def _stored_items(finished: Finished, items: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[Any] | str]]:
    """Items as they are stored, some at a time; where they cannot be read, one by one, and why."""
    at_once = max(1, min(finished.tile_items, AT_ONCE // max(1, finished.item_nbytes)))
    runs = np.flatnonzero((np.diff(items, prepend=-2) != 1) | (items % at_once == 0))
    for begin, end in zip(runs, [*runs[1:], len(items)], strict=True):
        start, stop = int(items[begin]), int(items[end - 1]) + 1
        try:
            yield from enumerate(finished.read(start, stop), start)
        except Exception:  # noqa: BLE001  # whatever damaged chunks make a library raise
            for item in range(start, stop):
                yield item, _one(finished, item)


def _one(finished: Finished, item: int) -> NDArray[Any] | str:
    try:
        return np.asarray(finished.read(item, item + 1)[0])
    except Exception as exc:  # noqa: BLE001
        return f"cannot be read: {type(exc).__name__}: {exc}"


# -- the inputs -------------------------------------------------------------------------------------------------


def _compare_inputs(finished: Finished, items: NDArray[np.int64], found: _Findings, *, progress: bool | None) -> None:
    """Each item beside what the library makes of its file."""
    record = finished.record
    if "derived" in record:
        found.unchecked.append("the inputs: the array was computed from them, not read")
        return
    if "reader" in record["options"]:
        found.unchecked.append(f"the inputs: they were read by a function of yours ({record['options']['reader']})")
        return
    needed = ["file", "size", "mtime", *(["page"] if record["join"] == "concat" else [])]
    if any(len(finished.index.get(name, ())) != finished.items for name in needed):
        found.unchecked.append("the inputs: the index does not tell the file of each item")
        return
    filled = {entry["item"]: entry["problem"] for entry in record["filled"]}
    read = _Decoder(finished)
    different = missing = 0
    with Progress(len(items), "items", wanted=progress) as bar:
        for item, stored in _stored_items(finished, items):
            if item in filled:
                problem = _filled_problem(stored)
            else:
                due = read(item)
                if isinstance(due, str):
                    missing += 1
                    found.unchecked.append(f"{printable(finished.file_of(item))}  {due}")
                    continue
                problem = _unlike(stored, due, changed=read.changed)
            if problem:
                different += 1
                found.problems.append(Problem(problem, item, finished.file_of(item)))
            bar.update(1, finished.item_nbytes, bool(problem))
    whole = "" if len(items) == finished.items else f" of {count(finished.items)}"
    text = f"inputs     {count(len(items) - missing)}{whole} items beside their files, "
    found.checked.append(text + ("all equal" if not different else f"{count(different)} different"))


def _filled_problem(stored: NDArray[Any] | str) -> str:
    """An item of a bad file holds NaN or NaT where its dtype has it, else zero."""
    if isinstance(stored, str):
        return stored
    if stored.dtype.kind in "mM":
        holds = np.isnat(stored)
    else:
        holds = np.isnan(stored) if stored.dtype.kind in "fc" else stored == np.zeros((), stored.dtype)
    return "" if np.all(holds) else "it does not hold the fill value"


def _unlike(stored: NDArray[Any] | str, due: NDArray[Any], *, changed: bool) -> str:
    """What is wrong with an item; nothing where its bytes are those of its file."""
    if isinstance(stored, str):
        return stored
    since = "; the file changed since it was stored" if changed else ""
    if stored.shape != due.shape or stored.dtype != due.dtype:
        return f"is {stored.shape} {stored.dtype}, its file {due.shape} {due.dtype}{since}"
    if stored.tobytes() == due.tobytes():
        return ""
    equal = np.frombuffer(stored.tobytes(), np.uint8) == np.frombuffer(due.tobytes(), np.uint8)
    return f"{count(int((~equal).sum()))} bytes of {count(stored.nbytes)} differ from its file{since}"


class _Decoder:
    """Reads one item's file with the library of its format; keeps the last file, which often holds the next item."""

    def __init__(self, finished: Finished) -> None:
        self.finished = finished
        self.path = ""
        self.array: NDArray[Any] | str = ""
        self.changed = False

    def __call__(self, item: int) -> NDArray[Any] | str:
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
