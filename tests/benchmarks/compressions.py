"""Compressions of Zarr chunks on images, side by side: prints a table of size and speed for each.

    python tests/benchmarks/compressions.py [--most 32] [FILE ...]

Each FILE is a TIFF or .npy, whose pages or items are one chunk each; without any, frames as a camera's are made.
Times are of the processor, in one thread, the best of several rounds; a chunk is encoded as daskstack does it,
and decoded as zarr-python does it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from contenders import frames
from numcodecs import blosc  # type: ignore[attr-defined]
from numcodecs.gzip import GZip
from numcodecs.zstd import Zstd

from daskstack.targets.shard import Compression, parse_compression

ROUNDS = 5
TRIED = (
    "none",
    "blosc:lz4:1:none",
    "blosc:lz4:1:shuffle",
    "blosc:lz4:1:bitshuffle",
    "blosc:lz4:5:shuffle",
    "blosc:lz4:5:bitshuffle",
    "blosc:lz4hc:1:bitshuffle",
    "blosc:blosclz:5:bitshuffle",
    "blosc:zstd:1:shuffle",
    "blosc:zstd:1:bitshuffle",
    "blosc:zstd:3:bitshuffle",
    "zstd:1",
    "zstd:3",
    "gzip:1",
)
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "none": bytearray,
    "zstd": Zstd().decode,
    "gzip": GZip().decode,  # type: ignore[no-untyped-call]
    "blosc": blosc.decompress,
}


def images(path: str, most: int) -> list[Any]:
    import tifffile

    array = np.load(path, mmap_mode="r") if path.endswith(".npy") else tifffile.imread(path)
    items = array[np.newaxis] if array.ndim == 2 else array
    return [np.ascontiguousarray(item, item.dtype.newbyteorder("<")) for item in items[:most]]


def timed(function: Callable[[Any], Any], arguments: Sequence[Any]) -> tuple[float, list[Any]]:
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.thread_time()
        results = [function(argument) for argument in arguments]
        best = min(best, time.thread_time() - begin)
    return best, results


def encode(compression: Compression, chunk: Any) -> bytes:
    return compression.encode(chunk, chunk.itemsize)


def table(chunks: Sequence[Any]) -> None:
    nbytes = sum(chunk.nbytes for chunk in chunks)
    print(f"\n{len(chunks)} chunks of {chunks[0].shape} {chunks[0].dtype}\n")
    print("| compression | bytes over compressed | encoded, MB/s | decoded, MB/s | one chunk decoded, us |")
    print("|---|---|---|---|---|")
    for text in TRIED:
        compression = parse_compression(text)
        encoding, encoded = timed(partial(encode, compression), chunks)
        decoding, _ = timed(DECODERS[compression.kind], encoded)
        size = sum(map(len, encoded))
        each = decoding / len(chunks) * 1e6
        speeds = f"{nbytes / encoding / 1e6:,.0f} | {nbytes / decoding / 1e6:,.0f} | {each:,.0f}"
        print(f"| `{text}` | {nbytes / size:.2f} | {speeds} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--most", type=int, default=32, help="chunks taken of each file")
    options = parser.parse_args()
    blosc.use_threads = False
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for chunk in [c for path in options.files for c in images(path, options.most)] or frames():
        groups.setdefault((chunk.shape, chunk.dtype), []).append(chunk)
    for chunks in groups.values():
        table(chunks)


if __name__ == "__main__":
    main()
