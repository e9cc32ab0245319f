"""How long reading takes: files laid out like the first, and the same parsed one by one by their library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from daskstack import open_stack
from daskstack.reads import ReadBlock
from daskstack.stack import FileStack

FILES = 1_000
SHAPE = (184, 184)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "imagej": {"imagej": True, "byteorder": ">"},
    "lzw": {"compression": "lzw", "predictor": True},
    "deflate": {"compression": "zlib"},
    "npy": {},
}


def frame(k: int) -> Any:
    """An image that compresses about as a camera's does."""
    rng = np.random.default_rng(k)
    return (500 + 200 * np.hypot(*np.indices(SHAPE) - 92) + rng.normal(0, 8, SHAPE)).astype("uint16")


@pytest.fixture(scope="module", params=KINDS)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileStack:
    folder = tmp_path_factory.mktemp(request.param)
    for k in range(FILES):
        write(folder, k, request.param)
    return open_stack(folder)


def write(folder: Path, k: int, kind: str) -> None:
    if kind == "npy":
        np.save(folder / f"{k}.npy", frame(k))
    else:
        tifffile.imwrite(folder / f"{k}.tif", frame(k), photometric="minisblack", **KINDS[kind])


def read(stack: FileStack) -> ReadBlock:
    return stack.block(0, FILES).read()


def test_laid_out_like_the_first(benchmark: Any, stack: FileStack) -> None:
    assert stack.layout is not None
    assert benchmark(read, stack).parsed == 0


def test_parsed_one_by_one(benchmark: Any, stack: FileStack) -> None:
    found = benchmark.pedantic(read, (replace(stack, layout=None),), rounds=3)
    assert found.parsed == FILES
