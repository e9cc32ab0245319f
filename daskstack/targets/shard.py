"""One Zarr v3 shard: its inner chunks encoded, one after another, and behind them the index of where each lies.

Along the specification of the sharding codec (zarr-specs, "Sharding codec (version 1.0)"): the index
holds for each inner chunk, in C order of the grid, its offset and length as little-endian uint64, and
2**64 - 1 twice for one that is not there; it is followed by its crc32c.  Each encoded chunk ends with
its own crc32c, the last of the inner codecs.
"""

from __future__ import annotations

import itertools
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
    inner: str = "zstd"
    shuffle: str = "bitshuffle"

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        return ":".join(map(str, (self.kind, self.level) if self.kind != "blosc" else self._parts()))

    def _parts(self) -> tuple[str, str, int, str]:
        return self.kind, self.inner, self.level, self.shuffle

    def codec(self, itemsize: int) -> dict[str, Any] | None:
        """The codec's entry in the metadata; None where nothing is compressed."""
        if self.kind == "none":
            return None
        if self.kind == "gzip":
            return {"name": "gzip", "configuration": {"level": self.level}}
        if self.kind == "zstd":
            return {"name": "zstd", "configuration": {"level": self.level, "checksum": False}}
        configuration = {
            "typesize": itemsize,
            "cname": self.inner,
            "clevel": self.level,
            "shuffle": "noshuffle" if self.shuffle == "none" else self.shuffle,
            "blocksize": 0,
        }
        return {"name": "blosc", "configuration": configuration}

    def encode(self, chunk: NDArray[Any]) -> bytes:
        """A contiguous chunk's bytes, compressed in this thread."""
        import imagecodecs

        data: Any = as_bytes(chunk)  # the codecs take any buffer, whatever their annotations say
        if self.kind == "none":
            return chunk.tobytes()
        if self.kind == "gzip":
            return bytes(imagecodecs.gzip_encode(data, level=self.level))
        if self.kind == "zstd":
            return bytes(imagecodecs.zstd_encode(data, level=self.level))
        return bytes(
            imagecodecs.blosc_encode(
                data,
                level=self.level,
                compressor=self.inner,
                typesize=chunk.itemsize,
                shuffle=SHUFFLES[self.shuffle],
                numthreads=1,
            )
        )


def parse_compression(text: str | None) -> Compression:
    """Compression from a text: ``none``, ``zstd[:LEVEL]``, ``gzip[:LEVEL]``, ``blosc[:COMPRESSOR[:LEVEL[:SHUFFLE]]]``.

    Raises
    ------
    UsageError
        It is none of these.

    Examples
    --------
    >>> [str(parse_compression(text)) for text in ("zstd:3", None, "blosc:lz4")]
    ['zstd:3', 'blosc:zstd:1:bitshuffle', 'blosc:lz4:1:bitshuffle']
    """
    if text is None:
        return Compression()
    kind, *more = text.split(":")
    fields = dict(zip(("inner", "level", "shuffle") if kind == "blosc" else ("level",), more, strict=False))
    made = Compression(
        kind=kind,
        level=int(fields.get("level", "5" if kind == "gzip" else "1")) if fields.get("level", "1").isdigit() else -1,
        inner=fields.get("inner", "zstd"),
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
        encoded = compression.encode(_whole_chunk(part[region], chunks))
        index[tuple(s.start // c for s, c in zip(region, chunks, strict=True))] = offset, len(encoded) + 4
        pieces += (encoded, crc32c(encoded).to_bytes(4, "little"))
        offset += len(encoded) + 4
    table = index.tobytes()
    return [*pieces, table, crc32c(table).to_bytes(4, "little")]


def _whole_chunk(part: NDArray[Any], chunks: tuple[int, ...]) -> NDArray[Any]:
    """A chunk in C order and little-endian; at the edge of the array it is filled up with zeros."""
    if part.shape == chunks:
        return np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
    whole = np.zeros(chunks, part.dtype.newbyteorder("<"))
    whole[tuple(slice(n) for n in part.shape)] = part
    return whole
