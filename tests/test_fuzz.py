"""Damaged files among sound ones: an error that names the file, or the pixels that its own library gives.

No crash, no hang, no flood of memory, no wrong shape; and what lies beside the damaged file is read as if it
were not there.
"""

from __future__ import annotations

import faulthandler
import io
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import PIL.Image
import pytest
import tifffile
from conftest import Array, image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskstack.errors import BadFileError
from daskstack.readers import Header, Join, Reader, choose

MOST_SECONDS = 10
MOST_RESIDENT = 1 << 30
Sound = tuple[str, list[bytes]]  # a suffix, and three files that are alike


def three(write: Callable[[Any], bytes], shape: tuple[int, ...], dtype: str) -> list[bytes]:
    return [write(image(k, shape, dtype)) for k in range(3)]


def png(array: Array) -> bytes:
    return bytes(imagecodecs.png_encode(array))


def jpeg(**options: Any) -> Callable[[Array], bytes]:
    return lambda array: bytes(imagecodecs.jpeg_encode(array, **options))


def npy(version: tuple[int, int] = (1, 0), order: Any = "C") -> Callable[[object], bytes]:
    def write(array: object) -> bytes:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.array(array, order=order), version=version)
        return stream.getvalue()

    return write


def tiff(**options: Any) -> Callable[[Array], bytes]:
    def write(array: Array) -> bytes:
        stream = io.BytesIO()
        tifffile.imwrite(stream, array, **{"photometric": "minisblack", "metadata": None, **options})
        return stream.getvalue()

    return write


def one_directory(array: Array) -> bytes:
    """As ImageJ writes what is longer than 4 GiB."""
    data = bytearray(tiff(imagej=True, byteorder="<", metadata={"axes": "ZYX"})(array))
    (begin,) = struct.unpack_from("<I", data, 4)
    (number,) = struct.unpack_from("<H", data, begin)
    struct.pack_into("<I", data, begin + 2 + 12 * number, 0)
    return bytes(data)


def pyramid(array: Array) -> bytes:
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as writer:
        writer.write(array, subifds=1, photometric="minisblack", metadata=None)
        writer.write(array[::2, ::2], subfiletype=1, photometric="minisblack", metadata=None)
    return stream.getvalue()


RECORD: Any = [("x", ">f4"), ("n", "<i8", (2,))]
COLOURS = np.arange(768, dtype="uint16").reshape(3, 256)
TIFF_KINDS: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
    ((5, 7), "uint16", {}),
    ((5, 7), "uint16", {"byteorder": ">", "rowsperstrip": 2}),
    ((5, 7), "float32", {"bigtiff": True}),
    ((3, 5, 7), "uint16", {"metadata": {}}),
    ((3, 5, 7), "uint8", {"imagej": True, "metadata": {"axes": "ZYX"}}),
    ((2, 3, 5, 7), "uint16", {"ome": True, "metadata": {"axes": "TZYX"}}),
    ((3, 5, 7), "uint16", {}),
    ((9, 16), "bool", {}),
    ((5, 7, 3), "uint8", {"photometric": "rgb"}),
    ((3, 5, 7), "uint8", {"photometric": "rgb", "planarconfig": "separate"}),
    ((5, 7), "uint8", {"photometric": "palette", "colormap": COLOURS}),
    ((20, 30), "uint16", {"tile": (16, 16)}),
    ((20, 30), "uint16", {"compression": "zlib", "predictor": True, "rowsperstrip": 8}),
    ((20, 30), "uint16", {"compression": "lzw", "byteorder": ">"}),
    ((20, 30), "float32", {"compression": "zstd", "predictor": 3}),
    ((20, 30), "uint8", {"compression": "packbits"}),
    ((20, 30), "uint8", {"compression": "lzw", "tile": (16, 16), "predictor": True}),
    ((16, 16, 3), "uint8", {"compression": "jpeg", "photometric": "rgb", "tile": (16, 16)}),
    ((3, 20, 30), "uint16", {"compression": "zlib"}),
]
TIFFS = [three(tiff(**options), shape, dtype) for shape, dtype, options in TIFF_KINDS]
SOUND: dict[str, list[Sound]] = {
    "tiff": [(".tif", files) for files in [*TIFFS, three(one_directory, (3, 5, 7), "uint16"), three(pyramid, (8, 12), "uint8")]],
    "png": [(".png", three(png, shape, dtype)) for shape, dtype in [
        ((5, 7), "uint8"), ((5, 7), "uint16"), ((5, 7, 3), "uint8"), ((5, 7, 4), "uint16"), ((40, 50), "uint8"),
    ]],
    "jpeg": [(".jpg", three(jpeg(**options), shape, dtype)) for shape, dtype, options in [
        ((5, 7), "uint8", {}), ((40, 50, 3), "uint8", {}), ((40, 50, 4), "uint8", {}), ((5, 7), "uint16", {"lossless": True}),
    ]],
    "npy": [(".npy", files) for files in [
        three(npy(), (5, 7), "uint16"), three(npy((2, 0), "F"), (5, 7), "uint16"), three(npy((3, 0)), (5, 7), ">f4"),
        [npy()(np.float64(k)) for k in range(3)], [npy()(np.full(3, k).astype(RECORD)) for k in range(3)],
    ]],
}  # fmt: skip

NUMBERS = [
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\xff\xff",
    b"\0\1\0\0",
    b"\1\0\0\0",
    b"\2\0",
    b"\0\2",
    b"99999999",
    b"\xff\xd9",
    b"\xff\xc0",
]
ANYWHERE = st.integers(0, 5000)
MUTATION = st.one_of(
    st.tuples(st.just("flip"), ANYWHERE, st.integers(1, 255)),
    st.tuples(st.just("put"), ANYWHERE, st.sampled_from(NUMBERS)),
    st.tuples(st.just("tag"), ANYWHERE, st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 32773, 50000, 1 << 31]))),
    st.tuples(st.just("insert"), ANYWHERE, st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("drop"), ANYWHERE, st.integers(1, 200)),
    st.tuples(st.just("again"), ANYWHERE, st.integers(1, 200)),
    st.tuples(st.just("cut"), ANYWHERE, st.just(0)),
)  # fmt: skip
Mutations = list[tuple[str, int, int | bytes]]


def mutated(data: bytes, mutations: Mutations) -> bytes:
    for kind, place, what in mutations:
        at = place % (len(data) + 1)
        before, rest = data[:at], data[at:]
        if isinstance(what, bytes):
            data = before + what + rest[len(what) if kind == "put" else 0 :]
        elif kind == "flip":
            data = before + bytes(b ^ what for b in rest[:1]) + rest[1:]
        elif kind == "tag":
            data = with_another_number(data, place, what)
        else:
            data = before + {"drop": rest[what:], "again": rest[:what] + rest, "cut": b""}[kind]
    return data


def with_another_number(data: bytes, place: int, number: int) -> bytes:
    """Code, type, count or value of an entry of the first directory of a classic TIFF becomes another number."""
    order = "<" if data[:2] == b"II" else ">"
    if data[:4] not in (b"II*\0", b"MM\0*") or len(data) < 8:
        return data
    (begin,) = struct.unpack_from(f"{order}I", data, 4)
    if begin + 2 > len(data) or not (entries := struct.unpack_from(f"{order}H", data, begin)[0]):
        return data
    entry, field = divmod(place % (4 * entries), 4)
    at, code = begin + 2 + 12 * entry + (0, 2, 4, 8)[field], "HHII"[field]
    packed = struct.pack(order + code, number % (1 << 16 if code == "H" else 1 << 32))
    return data[:at] + packed + data[at + len(packed) :]


def with_checksums(data: bytes) -> bytes:
    """The chunks of a damaged PNG, as far as they go, with the checksums that are due: the decoder sees the damage."""
    fixed, place = data[:8], 8
    while place + 12 <= len(data):
        length = min(struct.unpack_from(">I", data, place)[0], len(data) - place - 12)
        body = data[place + 4 : place + 8 + length]
        fixed += struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body))
        place += 12 + length
    return fixed


def by_tifffile(path: str) -> Iterator[Array]:
    """A file's own pages, in the ways in which tifffile reads them: as it describes them, and one by one."""
    for options in ({"_multifile": False}, {"is_ome": False}):
        with tifffile.TiffFile(path, is_mmstack=False, is_ndtiff=False, is_mdgel=False, **options) as tif:  # type: ignore[arg-type]
            with suppress(Exception):  # of odd descriptions
                yield tif.asarray(maxworkers=1)
            with suppress(Exception):  # of odd pages
                yield np.stack([page.asarray(maxworkers=1) for page in tif.pages])


def by_pillow(path: str) -> Iterator[Array]:
    with PIL.Image.open(path) as opened:
        array = np.asarray(opened)
        yield array.astype("u1") > 0 if array.dtype == bool else array  # its True may be 255


def assert_as_its_library_reads_it(path: str, found: Array) -> None:
    """Hold what was taken of a damaged file against another reader, as far as that one takes it."""
    readers: Callable[[str], Iterator[Array]]
    if path.endswith(".npy"):
        readers = lambda path: iter([np.load(path)])  # noqa: E731
    else:
        readers = by_tifffile if path.endswith(".tif") else by_pillow
    others: list[Array] = []
    with suppress(Exception):  # what it says of damage is not the question
        others.extend(readers(path))
    assert others or not path.endswith(".tif"), "tifffile does not read this"
    if not others:
        return
    widened = path.endswith(".png") and others[0].dtype.itemsize != found.dtype.itemsize
    if widened or path.endswith(".jpg"):  # Pillow decodes in its own way
        assert found.shape[:2] == others[0].shape[:2]
    else:
        assert any(found.tobytes() == other.astype(other.dtype.newbyteorder("=")).tobytes() for other in others)


@contextmanager
def watched() -> Iterator[None]:
    """No hang, no flood."""
    faulthandler.dump_traceback_later(
        6 * MOST_SECONDS, exit=True
    )  # the deadline is seen only once an example has ended
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MOST_RESIDENT


def read(reader: Reader, paths: list[str], due: Header, *, alike: bool) -> tuple[Array, list[str]]:
    """All items of all files, and the files that are bad."""
    layout = None
    if alike:
        with suppress(Exception):  # a header so odd that only the library copes
            layout = reader.layout(paths[0])
    out = np.zeros((due.rows * len(paths), *due.shape), due.dtype)
    bad = reader.read_into(paths, out, due, fast=layout.reader() if layout else None)
    return out.reshape(len(paths), due.rows, *due.shape), [b.path for b in bad]


@pytest.mark.long
@settings(max_examples=2_000, deadline=MOST_SECONDS * 1000, suppress_health_check=list(HealthCheck), database=None)
@given(
    which=st.integers(0, 1000),
    place=st.integers(0, 2),
    mutations=st.lists(MUTATION, min_size=1, max_size=4),
    repaired=st.booleans(),
    join=st.sampled_from(["stack", "concat"]),
)
@pytest.mark.parametrize("kind", SOUND)
def test_damaged_files(
    tmp_path: Path, kind: str, which: int, place: int, mutations: Mutations, repaired: bool, join: Join
) -> None:
    suffix, sound = SOUND[kind][which % len(SOUND[kind])]
    damaged = mutated(sound[place], mutations)
    if repaired and suffix == ".png":
        damaged = with_checksums(damaged)
    paths = [str(tmp_path / f"{k}{suffix}") for k in range(3)]
    for k, path in enumerate(paths):
        Path(path).write_bytes(damaged if k == place else sound[k])
    with watched():
        reader = choose(paths[0], join)
        try:
            due = reader.probe(paths[0])
        except BadFileError:
            assert place == 0 or sound[0] == npy()(np.float64(0))
            return
        found, bad = read(reader, paths, due, alike=False)
        again, bad_again = read(reader, paths, due, alike=True)
        assert bad == bad_again
        assert set(bad) <= {paths[place]} or place == 0
        for k, path in enumerate(paths):
            if path not in bad:
                assert found[k].tobytes() == again[k].tobytes()
                assert_as_its_library_reads_it(path, found[k, 0] if due.rows == 1 else found[k])
