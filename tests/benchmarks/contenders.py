"""Ways to make one array of many TIFF files, measured side by side: prints the table of the README.

    python tests/benchmarks/contenders.py [--files 20000] [--rounds 3] [--folder FOLDER]

Each way is a process of its own, and its time ends when all it wrote is on the disk.  The files are in the page
cache; the ways take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = (184, 184)
FRAMES = 64


def frames() -> list[Any]:
    """Frames as a camera's: smooth, with noise."""
    rng = np.random.default_rng(0)
    y, x = np.indices(SHAPE)
    return [
        (500 + 900 * np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / 900) + rng.normal(0, 6, SHAPE)).astype("uint16")
        for cy, cx in rng.uniform(0, 184, (FRAMES, 2))
    ]


def make_files(folder: Path, number: int) -> None:
    """Few frames that are really different, each with its number in it."""
    import tifffile

    different = frames()
    folder.mkdir()
    for k in range(number):
        frame = different[k % FRAMES].copy()
        frame[0, :2] = k & 0xFFFF, k >> 16
        tifffile.imwrite(folder / f"img_{k:07d}.tif", frame, photometric="minisblack")


def paths(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).iterdir())


def read(path: str) -> Any:
    import tifffile

    return tifffile.imread(path)


def least(folder: str, out: str) -> None:
    """Each byte of pixels read once and written once, durably, by eight threads; nothing is looked at."""
    names = paths(folder)
    first = read(names[0])
    skip = os.path.getsize(names[0]) - first.nbytes
    batch = max(1, (8 << 20) // first.nbytes)
    output = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_DSYNC)
    shape = (len(names), *first.shape)
    with open(out, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": first.dtype.str, "fortran_order": False, "shape": shape})
        begin = file.tell()

    def store(start: int) -> None:
        block = np.empty((len(names[start : start + batch]), first.nbytes), np.uint8)
        for row, name in zip(block, names[start : start + batch], strict=True):
            descriptor = os.open(name, os.O_RDONLY)
            os.preadv(descriptor, [row.data], skip)
            os.close(descriptor)
        os.pwrite(output, block.data, begin + start * first.nbytes)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store, range(0, len(names), batch)))


def serial(folder: str, out: str) -> None:
    np.save(out, np.stack([read(path) for path in paths(folder)]))


def process_pool(folder: str, out: str) -> None:
    with ProcessPoolExecutor() as pool:
        np.save(out, np.stack(list(pool.map(read, paths(folder), chunksize=64))))


def dask_imread(folder: str, out: str) -> None:
    from dask.array.image import imread

    array = imread(f"{folder}/*.tif", imread=read)
    array.rechunk((64, -1, -1)).to_zarr(out)


def daskstack(folder: str, out: str) -> None:
    import daskstack as ds

    ds.build(folder, out, progress=False)


WAYS: tuple[tuple[str, Any, str], ...] = (
    ("least there is to do", least, "npy"),
    ("daskstack, `.npy`", daskstack, "npy"),
    ("loop, `np.save`", serial, "npy"),
    ("process pool, `np.save`", process_pool, "npy"),
    ("daskstack, `.zarr`", daskstack, "zarr"),
    ("`dask.array.image`, `to_zarr`", dask_imread, "zarr"),
)


def measured(function: Any, folder: Path, out: Path) -> tuple[float, float]:
    """Seconds, and MiB of the largest process."""
    os.sync()
    begin = time.perf_counter()
    child = subprocess.Popen([sys.executable, __file__, "--run", function.__name__, str(folder), str(out)])
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    os.sync()
    seconds = time.perf_counter() - begin
    if child.returncode:
        sys.exit(f"{function.__name__} failed")
    for path in out.parent.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seconds, usage.ru_maxrss / 1024


def table(number: int, rounds: int, where: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=where) as work:
        folder, outputs = Path(work, "frames"), Path(work, "out")
        make_files(folder, number)
        outputs.mkdir()
        figures: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for name, function, suffix in WAYS:
                figures.setdefault(name, []).append(measured(function, folder, outputs / f"out.{suffix}"))
    seconds, sizes = zip(*([statistics.median(c) for c in zip(*f, strict=True)] for f in figures.values()), strict=True)
    print(f"| {number:,} TIFF files of 68 KB | {' | '.join(figures)} |\n{'|---' * (1 + len(figures))}|")
    print(f"| seconds | {' | '.join(f'{n:.1f}' for n in seconds)} |")
    print(f"| MiB of the largest process | {' | '.join(f'{n:,.0f}' for n in sizes)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where files and outputs go; by default the system's temporary folder")
    parser.add_argument("--run", nargs=3, metavar=("WAY", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        way, folder, out = options.run
        next(function for _, function, _ in WAYS if function.__name__ == way)(folder, out)
    else:
        table(options.files, options.rounds, options.folder)


if __name__ == "__main__":
    main()
