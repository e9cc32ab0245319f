"""Every kind of .npy that NumPy writes, to every kind of output: exact, or refused before the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import Array

import daskstack
from daskstack.errors import UsageError

RECORD = np.dtype([("x", ">f4"), ("s", "S3")])
WITH_PARTS = np.dtype([("x", ">f4"), ("n", "<i8", (2,))])
NESTED = np.dtype([("a", [("b", "i2"), ("c", ">f8")]), ("d", "?")])
NO_RECORDS = "Zarr 3 has no specification for records\nnext  let the output end in .npy, or zarr_format=2"
# What it is -> the array, the header's version, and what Zarr 3 and Zarr 2 say where they cannot hold it.
NEWER_ZARR_HOLDS = [("nested records", "two.zarr")]  # 3.4 does, 3.1 does not
KINDS: dict[str, tuple[Array, int, str, str]] = {
    "version 2": (np.arange(6).reshape(2, 3), 2, "", ""),
    "version 3": (np.arange(6).reshape(2, 3), 3, "", ""),
    "Fortran order": (np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)), 1, "", ""),
    "big-endian": (np.arange(6, dtype=">u4").reshape(2, 3), 1, "", ""),
    "big-endian in Fortran order": (np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)), 1, "", ""),
    "bool": (np.arange(6).reshape(2, 3) % 2 == 0, 1, "", ""),
    "complex64": ((np.arange(6) * 1j).astype(">c8"), 1, "", ""),
    "complex128": (np.arange(6) * 1j, 1, "", ""),
    "float16": (np.array([0, -0.0, np.nan, np.inf, 65504], "f2"), 1, "", ""),
    "long double": (np.arange(6, dtype="g"), 1, "Zarr cannot hold float128", "Zarr cannot hold float128"),
    "records": (np.array([(1.5, b"a"), (2, b"bcd")], RECORD), 1, NO_RECORDS, ""),
    "records with arrays": (np.ones((2, 3), WITH_PARTS), 1, NO_RECORDS, "Zarr cannot hold [('x', '<f4'), ('n'"),
    "nested records": (np.ones((2, 3), NESTED), 1, NO_RECORDS, "Zarr cannot hold [('a', [('b', '<i2')"),
    "names that are not Latin": (np.ones(2, [("δ", "f4")]), 3, NO_RECORDS, ""),
    "text": (np.array(["a", "bcδ"]).astype(">U3"), 1, "", ""),
    "bytes": (np.array([b"a", b"bcd"]), 1, "", ""),
    "times": (np.array(["2020", "NaT"], ">M8[s]"), 1, "", ""),
    "durations": (np.array([1, 2], "m8[ms]"), 1, "", ""),
    "a single number": (np.array(3.5), 1, "", ""),
    "a single record": (np.array((1.5, b"a"), RECORD), 1, NO_RECORDS, ""),
    "no rows": (np.zeros((0, 3)), 1, "", ""),
    "no columns": (np.zeros((3, 0, 2), "u1"), 1, "", ""),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # NumPy: of header 3.0; zarr: of what its specification lacks
def test_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    array, version, *refusals = KINDS[name]
    os.mkdir("in")
    for k in range(2):
        with open(f"in/{k}.npy", "wb") as f:
            np.lib.format.write_array(f, array, version=(version, 0))
    due = np.stack([array, array]).astype(array.dtype.newbyteorder("="))
    outputs: list[tuple[str, dict[str, Any], str]] = [
        ("out.npy", {}, ""),
        ("three.zarr", {}, refusals[0]),
        ("two.zarr", {"zarr_format": 2}, refusals[1]),
    ]
    for out, options, refusal in outputs:
        try:
            daskstack.build("in", out, progress=False, **options)
        except UsageError as exc:
            assert refusal
            assert str(exc).startswith(refusal)  # noqa: PT017  # newer versions of zarr raise none
            assert not [p for p in os.listdir() if p.startswith(out)]
            continue
        assert not refusal or (name, out) in NEWER_ZARR_HOLDS
        found = np.load(out) if out.endswith(".npy") else np.asarray(zarr.open_array(f"{out}/data", mode="r")[...])
        assert (found.dtype, found.shape) == (due.dtype, due.shape)
        assert found.tobytes() == due.tobytes()
        assert daskstack.verify(out, data=True, inputs=True, progress=False).status == 0
