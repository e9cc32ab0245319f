"""What many tests use: small files whose every pixel tells where it belongs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
DATA = Path(__file__).parent / "data"


def image(k: int, shape: tuple[int, ...] = (5, 7), dtype: str = "uint16") -> Array:
    """Distinct for each k, not square, so that a swap of items or axes shows."""
    return (np.arange(np.prod(shape)).reshape(shape) + 100 * k).astype(dtype)


def same(found: Any, expected: Array) -> bool:
    """Whether an array, a lazy one too, has exactly these values and this dtype."""
    found = np.asarray(found)
    return found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve TIFF files, not padded, in a folder ``frames`` of the current one; item k is ``image(k)``."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "frames"
    folder.mkdir()
    for k in range(12):
        tifffile.imwrite(folder / f"img_{k}.tif", image(k), photometric="minisblack")
    return folder


@pytest.fixture
def expected() -> Array:
    """What ``frames`` becomes."""
    return np.stack([image(k) for k in range(12)])


def published(folder: Path) -> list[str]:
    """What is in a folder, but for what is kept of runs that did not finish."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".part"))


Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def daskstack() -> Run:
    """The command line in a process of its own."""

    def run(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "daskstack", *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)

    return run


def need_root(what: str) -> None:
    """Skip a test that root alone can run; where everything must run, fail."""
    if os.geteuid() != 0:
        message = f"needs root: {what}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
