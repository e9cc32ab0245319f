"""Files made to do harm, or broken at any byte: an error that names the file, or what its library decodes from it."""

from __future__ import annotations

import os
import socket
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import Array, image
from forkserver import python

from daskstack import build
from daskstack.errors import BadFileError, SourceError
from daskstack.readers import Header, NpyReader, Reader, TiffReader

DUE = Header(1, (5, 7), np.dtype("uint16"))
GIB = 1 << 30


def attempt(reader: Reader, path: Path) -> Array | None:
    """The item as daskstack reads it, or nothing where that is an error, which must name the file."""
    out = np.full((1, *DUE.shape), 0xABAB, DUE.dtype)
    bad = reader.read_into([str(path)], out, DUE)
    if not bad:
        return np.asarray(out[0])
    assert [type(b) for b in bad] == [BadFileError]
    assert bad[0].message.startswith(f"{path}  ")
    return None


def test_every_flipped_byte_of_a_npy(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, image(3))
    data = path.read_bytes()
    taken = 0
    for at in range(len(data)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            found = attempt(NpyReader(), path)
            if found is not None:
                due = np.load(path)
                assert (due.shape, due.dtype.newbyteorder("=")) == (DUE.shape, DUE.dtype)
                assert np.array_equal(found, due)
                taken += 1
    assert taken >= 4 * image(3).nbytes  # nothing in a .npy tells of flipped pixels


@pytest.mark.parametrize("compression", [None, "zlib", "lzw", "zstd", "packbits"])
def test_every_truncation_of_a_tiff(tmp_path: Path, compression: str | None) -> None:
    """A file that is cut short has lost pixels, or what says where they lie."""
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, image(3), photometric="minisblack", metadata=None, compression=compression)
    data = path.read_bytes()
    whole = attempt(TiffReader(), path)
    assert whole is not None
    assert np.array_equal(whole, image(3))
    for size in range(len(data)):
        path.write_bytes(data[:size])
        found = attempt(TiffReader(), path)
        assert found is None or np.array_equal(found, image(3)), size  # padding at the end may go


@pytest.mark.parametrize("compression", ["zlib", "lzw", "zstd", "packbits"])
def test_every_flipped_byte_of_a_compressed_tiff(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, image(3), photometric="minisblack", metadata=None, compression=compression)
    data = path.read_bytes()
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            found = attempt(TiffReader(), path)
            if found is not None:
                assert np.array_equal(found, tifffile.imread(path)), at
                assert found.any(), f"a zero plane at {at}"


# -- what claims more than it holds ------------------------------------------------------------------------------


def npy(shape: tuple[int, ...]) -> bytes:
    text = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def tiff(width: int, length: int, pixels: bytes, *, compression: int = 1, claimed: int | None = None) -> bytes:
    """A TIFF of one strip of bytes, whose directory says what it is told to say."""
    entries = {256: width, 257: length, 258: 8, 259: compression, 262: 1, 273: 8, 277: 1, 278: length}
    entries[279] = len(pixels) if claimed is None else claimed
    directory = struct.pack("<H", len(entries))
    directory += b"".join(struct.pack("<HHII", code, 4, 1, value) for code, value in entries.items())
    at = 8 + len(pixels) + len(pixels) % 2
    return b"II*\0" + struct.pack("<I", at) + pixels.ljust(at - 8, b"\0") + directory + struct.pack("<I", 0)


def zstd_of_zeros(size: int) -> bytes:
    """A frame of RLE blocks: 4 bytes for each 128 KiB."""
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"\0"
    last = struct.pack("<I", (128 << 10) << 3 | 1 << 1 | 1)[:3] + b"\0"
    head = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", size)
    return head + block * (size // (128 << 10) - 1) + last


def zlib_of_zeros(size: int) -> bytes:
    return zlib.compress(bytes(size), 9)


CLAIMS = {
    "x.npy": npy((100_000, 1_000_000)),
    "joined.npy": npy((100_000, 1000, 1000)),
    "size.tif": tiff(100_000, 1_000_000, b"pixels"),
    "count.tif": tiff(100_000, 1_000_000, b"pixels", claimed=2**32 - 1),
    "strip.tif": tiff(7, 5, b"pixels", claimed=4_000_000_000),
    "zlib.tif": tiff(100_000, 1_000_000, zlib.compress(b"pixels"), compression=8),
    "lzw.tif": tiff(100_000, 1_000_000, b"pixels", compression=5),
    "zstd.tif": tiff(100_000, 1_000_000, zstd_of_zeros(1 << 20), compression=50000),
    "packbits.tif": tiff(100_000, 1_000_000, b"\x81\0" * 9, compression=32773),
    "bomb.tif": tiff(7, 5, zlib_of_zeros(2 * GIB), compression=8),
    "zbomb.tif": tiff(7, 5, zstd_of_zeros(4 * GIB), compression=50000),
}


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("claims")
    for name, data in CLAIMS.items():
        (folder / name).write_bytes(data)
    return folder


LIMITED = """
import json, os, resource, sys
import daskstack, tifffile, imagecodecs, dask.threaded, dask.array
from daskstack.errors import BadFilesError
folder, good, join = sys.argv[1:]
with open("/proc/self/statm") as f:
    now = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), now + (1 << 30)))
for name in sorted(os.listdir(folder)):
    sources = [os.path.join(folder, name)]
    if good:
        sources.insert(0, good + name[-4:])
    try:
        daskstack.build(sources, f"{name}.npy", join=join, progress=False, threads=1, restart=True)
    except BadFilesError as exc:
        print(name, os.path.basename(exc.files[0].path), len(exc.files), os.path.exists(f"{name}.npy"))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < 1 << 30
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space by /proc")
@pytest.mark.parametrize("join", ["stack", "concat"])
@pytest.mark.parametrize("second", [False, True], ids=["alone", "second"])
def test_what_claims_more_than_it_holds_takes_no_memory(
    claims: Path, tmp_path: Path, join: str, *, second: bool
) -> None:
    """Within 1 GiB of address space, whether it is the file that says what all others must be, or another."""
    good = tmp_path / "good"
    np.save(f"{good}.npy", np.ones((5, 7), "u1"))
    tifffile.imwrite(f"{good}.tif", np.ones((5, 7), "u1"), photometric="minisblack")
    done = python("-c", LIMITED, claims, good if second else "", join, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {name} 1 False" for name in sorted(CLAIMS)]


# -- what is no regular file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".tif", ".npy"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "zero", "null", "folder"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_what_is_no_regular_file_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, kind: str, *, first: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    odd, good = Path("in", f"{1 if first else 3}{suffix}"), Path("in", f"2{suffix}")
    if suffix == ".npy":
        np.save(good, image(2))
    else:
        tifffile.imwrite(good, image(2), photometric="minisblack")
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(odd))
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to(f"/dev/{kind}")
    what = "no usable file in the folder" if kind == "folder" else "not a regular file"
    with pytest.raises(SourceError, match=rf"{what}.*in/{odd.name}"):
        build([odd, good] if first else [good, odd], "out.npy", progress=False)
    if kind != "folder":  # below a folder it is no input, and in a list of earlier days it is a bad one
        with pytest.raises(BadFileError, match=r"in/.*  (not a regular file|no such device or address)"):
            (NpyReader() if suffix == ".npy" else TiffReader()).probe(str(odd))
