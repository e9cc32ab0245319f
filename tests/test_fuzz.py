"""Damaged PNG, JPEG and .npy files: an error or an array of the shape that the header says; no crash, hang or flood."""

from __future__ import annotations

import faulthandler
import io
import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from conftest import Array, image
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daskstack.errors import BadFileError
from daskstack.readers import Header, choose

MOST_SECONDS = 10
MOST_RESIDENT = 1 << 30


def jpeg(array: Array, **options: Any) -> bytes:
    return bytes(imagecodecs.jpeg_encode(array, **options))


def npy(array: object, version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), version=version)
    return stream.getvalue()


SOUND: list[tuple[str, bytes]] = [
    *((".png", bytes(imagecodecs.png_encode(image(1, shape, dtype)))) for shape, dtype in [
        ((5, 7), "uint8"), ((5, 7), "uint16"), ((5, 7, 3), "uint8"), ((5, 7, 4), "uint16"), ((40, 50), "uint8"),
    ]),
    *((".jpg", jpeg(image(1, shape, dtype), **options)) for shape, dtype, options in [
        ((5, 7), "uint8", {}), ((40, 50, 3), "uint8", {}), ((40, 50, 4), "uint8", {}), ((5, 7), "uint16", {"lossless": True}),
    ]),
    *((".npy", npy(array, version)) for array, version in [
        (image(1), (1, 0)), (np.asfortranarray(image(1)), (2, 0)), (image(1, dtype=">f4"), (3, 0)), (np.float64(1), (1, 0)),
        (np.zeros(3, [("x", ">f4"), ("n", "<i8", (2,))]), (1, 0)),
    ]),
]  # fmt: skip

NUMBERS = [
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\0\0\xff\xff",
    b"\0\1\0\0",
    b"99999999",
    b"\xff\xd9",
    b"\xff\xc0",
]
MUTATION = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 5000), st.integers(1, 255)),
    st.tuples(st.just("put"), st.integers(0, 5000), st.sampled_from(NUMBERS)),
    st.tuples(st.just("insert"), st.integers(0, 5000), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("drop"), st.integers(0, 5000), st.integers(1, 200)),
    st.tuples(st.just("again"), st.integers(0, 5000), st.integers(1, 200)),
    st.tuples(st.just("cut"), st.integers(0, 5000), st.just(0)),
)


def mutated(data: bytes, mutations: list[tuple[str, int, int | bytes]]) -> bytes:
    for kind, place, what in mutations:
        at = place % (len(data) + 1)
        before, rest = data[:at], data[at:]
        if isinstance(what, bytes):
            data = before + what + rest[len(what) if kind == "put" else 0 :]
        elif kind == "flip":
            data = before + bytes(b ^ what for b in rest[:1]) + rest[1:]
        else:
            data = before + {"drop": rest[what:], "again": rest[:what] + rest, "cut": b""}[kind]
    return data


def with_checksums(data: bytes) -> bytes:
    """The chunks of a damaged PNG, as far as they go, with the checksums that are due: the decoder sees the damage."""
    fixed, place = data[:8], 8
    while place + 12 <= len(data):
        length = min(struct.unpack_from(">I", data, place)[0], len(data) - place - 12)
        body = data[place + 4 : place + 8 + length]
        fixed += struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body))
        place += 12 + length
    return fixed


@pytest.fixture
def watched() -> Iterator[None]:
    faulthandler.dump_traceback_later(600, exit=True)  # deadlines are seen only once an example has ended
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.long
@settings(max_examples=20_000, deadline=MOST_SECONDS * 1000, suppress_health_check=list(HealthCheck), database=None)
@given(st.integers(0, len(SOUND) - 1), st.lists(MUTATION, min_size=1, max_size=4), st.booleans())
def test_damaged_files(
    watched: None, tmp_path: Path, which: int, mutations: list[tuple[str, int, int | bytes]], repaired: bool
) -> None:
    suffix, sound = SOUND[which]
    path = str(tmp_path / f"x{suffix}")
    data = mutated(sound, mutations)
    Path(path).write_bytes(with_checksums(data) if repaired and suffix == ".png" else data)
    reader = choose(path, "stack")
    Path(path + "s").write_bytes(sound)
    due = reader.probe(path + "s")
    assert [b.path for b in reader.read_into([path], np.empty((1, *due.shape), due.dtype), due)] in ([], [path])
    try:
        found = reader.probe(path)
    except BadFileError:
        return
    out = np.empty((1, *found.shape), found.dtype)
    assert [b.path for b in reader.read_into([path], out, found)] in ([], [path])
    assert found == Header(1, out.shape[1:], out.dtype, found.dims)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MOST_RESIDENT
