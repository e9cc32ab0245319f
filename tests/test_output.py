"""Finished outputs read back, lazily and from any process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from conftest import Array, image, open_below, same

import daskstack
from daskstack import build
from daskstack.errors import SourceError

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("out.npy", {}),
    ("out.zarr", {}),
    ("out.zarr", {"chunks": (1, 2, 3), "shards": (4, 4, 3)}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_what_was_built_is_what_is_opened(frames: Path, expected: Array, name: str, options: dict[str, Any]) -> None:
    build("frames", name, labels=r"img_(?P<k>\d+)\.(?P<kind>\w+)", progress=False, **options)
    out = daskstack.open(name)
    assert (out.shape, out.dtype, out.dims, len(out)) == ((12, 5, 7), np.dtype("uint16"), ("item", "y", "x"), 12)
    assert same(out.array, expected)
    assert same(out.array[3:9:2, 1:, ::3], expected[3:9:2, 1:, ::3])
    assert out.labels["k"].tolist() == list(range(12))
    assert out.labels["kind"].tolist() == ["tif"] * 12
    assert out.labels["kind"].dtype.kind == "U"
    assert out.files == tuple(str(frames / f"img_{k}.tif") for k in range(12))
    assert repr(out).startswith("<daskstack.Output (12, 5, 7) uint16>\narray   (item 12, y 5, x 7) uint16, 840 B in ")


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_tasks_open_the_file_by_its_path(
    frames: Path, expected: Array, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build("frames", name, progress=False, **options)
    array = daskstack.open(name).array
    assert len(pickle.dumps(dict(array.dask))) < 20_000
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(array))
    assert same(again.compute(scheduler="synchronous"), expected)
    array.compute(scheduler="synchronous")
    assert open_below(frames.parent) == []


def test_a_new_output_under_an_old_name_has_another_name_in_dask(frames: Path) -> None:
    build("frames", "out.npy", progress=False)
    first = daskstack.open("out.npy").array
    os.utime(frames / "img_3.tif", ns=(1, 1))
    build("frames", "out.npy", overwrite=True, progress=False)
    assert daskstack.open("out.npy").array.name != first.name


@pytest.mark.parametrize("shape", [(), (0,), (3, 1)], ids=str)
@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_items_of_any_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(3):
        np.save(tmp_path / "in" / f"{k}.npy", image(k, shape))
    build("in", name, progress=False)
    with dask.config.set(scheduler="synchronous"):
        assert same(daskstack.open(name).array, np.stack([image(k, shape) for k in range(3)]))


def test_what_daskstack_did_not_make_is_not_opened(frames: Path) -> None:
    np.save("mine.npy", np.zeros(3))
    for name in ("mine.npy", "frames"):
        with pytest.raises(SourceError, match=f"{name} was not made by daskstack, or was changed since"):
            daskstack.open(name)
    with pytest.raises(SourceError, match=r"no such file or folder: 'nowhere\.npy'"):
        daskstack.open("nowhere.npy")
