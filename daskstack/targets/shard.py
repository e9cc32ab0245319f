"""One Zarr v3 shard: its inner chunks encoded, one after another, and behind them the index of where each lies.

Along the specification of the sharding codec (zarr-specs, "Sharding codec (version 1.0)"): the index
holds for each inner chunk, in C order of the grid, its offset and length as little-endian uint64, and
2**64 - 1 twice for one that is not there; it is followed by its crc32c.  Each encoded chunk ends with
its own crc32c, the last of the inner codecs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.blocks import as_bytes
from daskstack.errors import UsageError
from daskstack.targets.base import crc32c

NOT_THERE = 2**64 - 1
BLOSC_COMPRESSORS = ("zstd", "lz4", "lz4hc", "zlib", "blosclz")
SHUFFLES = {"none": 0, "shuffle": 1, "bitshuffle": 2}
KINDS = ("none", "zstd", "gzip", "blosc")


@dataclass(frozen=True)
class Compression:
    """How chunks are compressed; a checksum follows always.

    By default by blosc with lz4 after shuffling bits: on images of cameras two to three times as fast as
    zstd, both ways, for 6 to 22 % more bytes (``tests/benchmarks/compressions.py``).

    Parameters
    ----------
    kind : {"none", "zstd", "gzip", "blosc"}
        The codec.
    level : int
        Its level.
    inner : str
        For blosc its compressor: zstd, lz4, lz4hc, zlib or blosclz.
    shuffle : str
        For blosc: none, shuffle or bitshuffle.
    """

    kind: str = "blosc"
    level: int = 1
    inner: str = "lz4"
    shuffle: str = "bitshuffle"

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        return ":".join(map(str, (self.kind, self.level) if self.kind != "blosc" else self._parts()))

    def _parts(self) -> tuple[str, str, int, str]:
        return self.kind, self.inner, self.level, self.shuffle

    def version_3(self, itemsize: int) -> list[Any]:
        """The codecs of a Zarr 3 array: compression, where there is any, and the checksum."""
        from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

        codecs: list[Any] = []
        if self.kind == "gzip":
            codecs = [GzipCodec(level=self.level)]
        elif self.kind == "zstd":
            codecs = [ZstdCodec(level=self.level, checksum=False)]
        elif self.kind == "blosc":
            shuffle: Any = "noshuffle" if self.shuffle == "none" else self.shuffle
            inner: Any = self.inner
            codecs = [BloscCodec(typesize=itemsize, cname=inner, clevel=self.level, shuffle=shuffle, blocksize=0)]
        return [*codecs, Crc32cCodec()]

    def version_2(self) -> dict[str, Any]:
        """Filters and compressor of a Zarr 2 array; gzip and zstd carry a checksum of their own."""
        from numcodecs.blosc import Blosc
        from numcodecs.checksum32 import CRC32C
        from numcodecs.gzip import GZip
        from numcodecs.zstd import Zstd

        gzip: Any = GZip  # of which the types know nothing
        checksum = CRC32C(location="end")
        if self.kind == "gzip":
            return {"filters": None, "compressors": gzip(self.level)}
        if self.kind == "zstd":
            return {"filters": None, "compressors": Zstd(self.level)}
        if self.kind == "blosc":
            return {"filters": checksum, "compressors": Blosc(self.inner, self.level, SHUFFLES[self.shuffle])}
        return {"filters": None, "compressors": checksum}

    def encode(self, chunk: NDArray[Any], typesize: int) -> bytes:
        """A contiguous chunk's bytes, compressed in this thread; ``typesize`` is that of its elements."""
        import imagecodecs

        data: Any = as_bytes(chunk)  # the codecs take any buffer, whatever their annotations say
        if self.kind == "none":
            return chunk.tobytes()
        if self.kind == "gzip":
            return bytes(imagecodecs.gzip_encode(data, level=self.level))
        if self.kind == "zstd":
            return bytes(imagecodecs.zstd_encode(data, level=self.level))
        # imagecodecs tells blosc the itemsize of the buffer, whichever typesize it is given itself
        elements: Any = data.view(f"V{math.gcd(data.size, typesize)}")
        return bytes(
            imagecodecs.blosc_encode(
                elements,
                level=self.level,
                compressor=self.inner,
                shuffle=SHUFFLES[self.shuffle],
                numthreads=1,
            )
        )


def parse_compression(text: str | None, default: str = "blosc") -> Compression:
    """Compression from a text: ``none``, ``zstd[:LEVEL]``, ``gzip[:LEVEL]``, ``blosc[:COMPRESSOR[:LEVEL[:SHUFFLE]]]``.

    Raises
    ------
    UsageError
        It is none of these.

    Examples
    --------
    >>> [str(parse_compression(text)) for text in ("zstd:3", None, "blosc:zstd")]
    ['zstd:3', 'blosc:lz4:1:bitshuffle', 'blosc:zstd:1:bitshuffle']
    """
    if text is None:
        return Compression(default)
    if not isinstance(text, str):
        raise UsageError(f"compression={text!r}", "give a text, as in blosc:lz4:5:shuffle")
    kind, *more = text.split(":")
    fields = dict(zip(("inner", "level", "shuffle") if kind == "blosc" else ("level",), more, strict=False))
    made = Compression(
        kind=kind,
        level=int(fields.get("level", "5" if kind == "gzip" else "1")) if fields.get("level", "1").isdigit() else -1,
        inner=fields.get("inner", "lz4"),
        shuffle=fields.get("shuffle", "bitshuffle"),
    )
    most = {"none": 9, "zstd": 22, "gzip": 9, "blosc": 9}.get(kind, -1)
    known = made.inner in BLOSC_COMPRESSORS and made.shuffle in SHUFFLES and len(more) == len(fields)
    if not known or not 0 <= made.level <= most or (kind == "none" and more):
        raise UsageError(
            f"compression={text!r}",
            "write none, zstd[:LEVEL], gzip[:LEVEL] or blosc[:COMPRESSOR[:LEVEL[:SHUFFLE]]], as in blosc:lz4:5:shuffle",
        )
    return made


def chunk_regions(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The regions of all chunks of an array, in C order of their grid; those at the far edges are cut short."""
    steps = [range(0, n, c) for n, c in zip(shape, chunks, strict=True)]
    for begins in itertools.product(*steps):
        yield tuple(slice(b, min(b + c, n)) for b, c, n in zip(begins, chunks, shape, strict=True))


def encode_shard(
    part: NDArray[Any], chunks: tuple[int, ...], shards: tuple[int, ...], compression: Compression
) -> list[bytes]:
    """The bytes of one shard, in pieces to be written one after another.

    Parameters
    ----------
    part : array
        What of the array lies in the shard; smaller than ``shards`` at the far edges of the array.
    chunks, shards : tuple of int
        Shape of an inner chunk and of a shard, in elements.
    compression : Compression
        How each chunk is compressed.

    Returns
    -------
    list of bytes
        The encoded chunks, each with its crc32c, then the index with its own.
    """
    grid = tuple(s // c for s, c in zip(shards, chunks, strict=True))
    index = np.full((*grid, 2), NOT_THERE, "<u8")
    pieces: list[bytes] = []
    offset = 0
    for region in chunk_regions(part.shape, chunks):
        encoded = compression.encode(_whole_chunk(part[region], chunks), part.itemsize)
        index[tuple(s.start // c for s, c in zip(region, chunks, strict=True))] = offset, len(encoded) + 4
        pieces += (encoded, crc32c(encoded).to_bytes(4, "little"))
        offset += len(encoded) + 4
    table = index.tobytes()
    return [*pieces, table, crc32c(table).to_bytes(4, "little")]


def encode_chunk(part: NDArray[Any], chunks: tuple[int, ...], compression: Compression) -> bytes:
    """The bytes of a Zarr 2 chunk, which is a file by itself; see :meth:`Compression.version_2`."""
    whole = _whole_chunk(part, chunks)
    data: Any = as_bytes(whole)
    if compression.kind == "gzip":
        return compression.encode(whole, whole.itemsize)
    if compression.kind == "zstd":
        from numcodecs.zstd import Zstd

        return bytes(Zstd(compression.level, checksum=True).encode(data))
    summed = np.frombuffer(whole.tobytes() + crc32c(data).to_bytes(4, "little"), np.uint8)
    if compression.kind == "none":
        return summed.tobytes()
    return compression.encode(summed, whole.itemsize)


def _whole_chunk(part: NDArray[Any], chunks: tuple[int, ...]) -> NDArray[Any]:
    """A chunk in C order and little-endian; at the edge of the array it is filled up with zeros."""
    if part.shape == chunks:
        return np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
    whole = np.zeros(chunks, part.dtype.newbyteorder("<"))
    whole[tuple(slice(n) for n in part.shape)] = part
    return whole
