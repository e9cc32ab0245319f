"""How long it takes to open and to plan very many files, how much memory, and how large the graph is."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskstack import Stack, open_stack
from daskstack.discover import Listing
from daskstack.tasks import Place

NUMBERS = (1_000, 10_000, 220_000, 1_000_000)


def opened(number: int, folder: Path) -> Stack:
    """A stack of so many names, of which only the first is a file."""
    first = np.zeros((184, 184), "uint16")
    paths = [str(folder / f"img_{k:07d}.npy") for k in range(number)]
    np.save(paths[0], first)
    found = os.stat(paths[0])
    sizes, mtimes = (np.full(number, n, np.int64) for n in (found.st_size, found.st_mtime_ns))
    names = [os.path.basename(path) for path in paths]
    return open_stack(Listing(paths, names, sizes, mtimes, (str(folder),), (), natural=True, rows=None))


@pytest.mark.parametrize("number", NUMBERS)
def test_open_and_plan(benchmark: Any, tmp_path: Path, number: int) -> None:
    plan = benchmark.pedantic(lambda: opened(number, tmp_path).plan(tmp_path / "out.npy"), rounds=1)
    assert plan.files == number


@pytest.mark.parametrize("number", NUMBERS)
def test_graph(benchmark: Any, tmp_path: Path, number: int) -> None:
    stack = opened(number, tmp_path)
    plan = stack.plan(tmp_path / "out.npy")
    place = Place(plan.target, "", plan.plan_id)
    graph, keys = benchmark.pedantic(lambda: stack.tasks(plan.bounds, range(plan.blocks), place), rounds=1)
    assert len(keys) == plan.blocks
    benchmark.extra_info["tasks"] = plan.blocks
    benchmark.extra_info["pickled bytes"] = len(pickle.dumps(graph))


@pytest.mark.parametrize("number", NUMBERS)
def test_memory(benchmark: Any, tmp_path: Path, number: int) -> None:
    code = f"""
import bench_planning, pathlib, resource
bench_planning.opened({number}, pathlib.Path({str(tmp_path)!r})).plan("out.npy")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    options: Any = {"check": True, "cwd": Path(__file__).parent, "stdout": subprocess.PIPE}
    done = benchmark.pedantic(subprocess.run, ([sys.executable, "-c", code],), options, rounds=1)
    benchmark.extra_info["MiB"] = int(done.stdout) >> 10
