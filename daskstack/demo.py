"""The demonstration: files made, built, compared, measured."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

from daskstack.api import build, open_stack
from daskstack.errors import DaskstackError
from daskstack.output import open_output
from daskstack.readers.base import Array
from daskstack.text import count, nbytes
from daskstack.verification import verified

SHAPE = (128, 128)
SEED = 0


def run_demo(files: int, *, say: Callable[[str], None], progress: bool | None = None) -> None:
    """Make TIFF files in a temporary folder, build a .npy and a Zarr of them, and compare with a plain loop.

    Parameters
    ----------
    files : int
        How many.
    say : callable
        Takes each text for the user.
    progress : bool, optional
        Whether to show progress.

    Raises
    ------
    DaskstackError
        The array is not equal to the files.
    """
    with tempfile.TemporaryDirectory(prefix="daskstack-demo-") as folder:
        frames = os.path.join(folder, "frames")
        os.mkdir(frames)
        say(f"making {count(files)} TIFF files of {SHAPE[0]} x {SHAPE[1]} uint16 in a temporary folder")
        make_frames(frames, files)

        labels = r"(?P<t>\d+)_(?P<kind>[a-z]+)"
        reports = {}
        for name in ("frames.npy", "frames.zarr"):
            say(f"\n$ daskstack build frames {name} --labels '{labels}'")
            reports[name] = build(frames, os.path.join(folder, name), labels=labels, progress=progress)
            say(str(reports[name]).replace(folder + os.sep, ""))

        begin = time.perf_counter()
        expected = loop(frames)
        seconds = time.perf_counter() - begin
        for name in reports:
            _compare(os.path.join(folder, name), expected)
            say(f"\n$ daskstack verify {name} --data --inputs")
            say(_verified(os.path.join(folder, name), progress=progress).replace(folder + os.sep, ""))
        say("\nboth equal a loop over tifffile.imread, item by item; labels in the same order")
        say(f"{'':22}{'seconds':>9}{'files/s':>10}   on disk")
        rows = [
            (name, r.seconds, f"{nbytes(_size(os.path.join(folder, name)))}, synced") for name, r in reports.items()
        ]
        for name, took, disk in (*rows, ("a loop, in memory", seconds, "nothing")):
            say(f"{name:22}{took:9.2f}{count(round(files / took)):>10}   {disk}")
        say("(the files made for this are gone again)")


def _compare(path: str, expected: Array) -> None:
    made = open_output(path)
    if not (
        np.array_equal(np.asarray(made.array), expected) and np.array_equal(made.labels["t"], np.arange(len(expected)))
    ):
        raise DaskstackError(f"{path} is not equal to the files", "please report this")


def _verified(path: str, *, progress: bool | None) -> str:
    report = verified(path, data=True, inputs=True, progress=progress)
    if report.status:
        raise DaskstackError(str(report), "please report this")
    return str(report)


def _size(path: str) -> int:
    """Bytes of a file, or of all files in a folder."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(path) for name in names)


def make_frames(folder: str, files: int) -> None:
    """Noise on a slope, written as tifffile does by default; names are not padded, as instruments write them."""
    from tifffile import imwrite

    rng = np.random.default_rng(SEED)
    slope = np.add.outer(np.arange(SHAPE[0]), np.arange(SHAPE[1])).astype("uint16")
    for k in range(files):
        noise = rng.integers(0, 1000, SHAPE, dtype="uint16")
        imwrite(os.path.join(folder, f"frame_{k}_{'dark' if k % 10 == 0 else 'light'}.tif"), slope + noise + k % 60_000)


def loop(folder: str) -> Array:
    """What one writes by hand."""
    from tifffile import imread

    return np.array([imread(path) for path in open_stack(folder).files])
