"""Every example in a docstring runs as it stands, in a folder that has three small files."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import daskstack

MODULES = ["daskstack", *(m.name for m in pkgutil.walk_packages(daskstack.__path__, "daskstack."))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples() -> Iterator[Any]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        if name != "daskstack.__main__":
            for test in finder.find(importlib.import_module(name), name):
                if test.examples:
                    yield pytest.param(test, id=test.name)


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """t1.npy, t2.npy and t10.npy, full of 0, 2 and 1, in a folder ``frames`` of the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "frames"
    folder.mkdir()
    for t, value in ((1, 0), (2, 2), (10, 1)):
        np.save(folder / f"t{t}.npy", np.full((4, 5), value, "uint16"))


@pytest.mark.parametrize("test", list(examples()))
def test_example_in_docstring(test: doctest.DocTest, frames: None) -> None:
    test.globs.update(np=np, daskstack=daskstack)
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)
