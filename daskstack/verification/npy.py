"""The structure of a .npy compared with its record: header, size, index and the files beside it."""

from __future__ import annotations

import csv
import io
import json
import os
from typing import Any

import numpy as np

from daskstack.text import count, plural, printable, shape_text
from daskstack.verification.finished import Finished, Problem, compare_entries, described_dtype, read_file, read_record


def inspected_npy(out: str, problems: list[Problem], unchecked: list[str]) -> Finished | None:
    """A .npy, what is wrong with it added to ``problems``; None where it cannot be told what it should be."""
    name = os.path.basename(out)
    if not os.path.lexists(f"{out}.json"):
        unchecked.append(f"there is no {printable(name)}.json, the record of how it was made")
        return None
    try:
        text = json.loads(read_file(f"{out}.json"))
    except ValueError as exc:
        problems.append(Problem(f"is no JSON: {exc}", None, f"{name}.json"))
        return None
    record = read_record(text, f"{name}.json", problems)
    if record is None:
        return None
    compare_entries(os.path.dirname(out), record["files"], problems)
    finished = Finished(out, record, tuple(record["shape"]), described_dtype(record), {})
    finished.broken = _npy_is_broken(finished, name, problems)
    try:
        head, *rows = csv.reader(
            io.StringIO(read_file(f"{out}.index.csv").decode("utf-8", "surrogateescape")), strict=True
        )
        finished.index = {column: [row[k] for row in rows] for k, column in enumerate(head)}
    except (OSError, ValueError, IndexError, csv.Error) as exc:
        problems.append(Problem(f"cannot be read: {exc}", None, f"{name}.index.csv"))
    beside = len(record["files"]) + 1
    finished.summary = f"{shape_text(finished.shape)} {finished.dtype}, {plural(beside, 'file')} beside it"
    return finished


def _npy_is_broken(finished: Finished, name: str, problems: list[Problem]) -> bool:
    """Whether header or size are not those of the recorded array."""
    try:
        mapped: Any = np.load(finished.out, mmap_mode="r", allow_pickle=False, max_header_size=1 << 20)
    except (OSError, ValueError) as exc:
        problems.append(Problem(f"cannot be read: {exc}", None, name))
        return True
    before = len(problems)
    if (mapped.shape, mapped.dtype) != (finished.shape, finished.dtype) or not mapped.flags.c_contiguous:
        order = "" if mapped.flags.c_contiguous else ", Fortran order"
        due = f"{shape_text(finished.shape)} {finished.dtype}"
        problems.append(
            Problem(f"its header says {shape_text(mapped.shape)} {mapped.dtype}{order}, due {due}", None, name)
        )
    size, due_size = os.path.getsize(finished.out), mapped.offset + finished.items * finished.item_nbytes
    if size != due_size:
        problems.append(Problem(f"has {count(size)} bytes, due {count(due_size)}", None, name))
    return len(problems) > before
