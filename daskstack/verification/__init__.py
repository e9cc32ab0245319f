"""Whether a finished output is what its record says, by code that shares nothing with what wrote it.

The record and index beside an output (or in a Zarr group) hold the checksum of every side file and of every
item.  Here they are compared with what lies on disk: plain reads for a ``.npy``, zarr-python for a group,
and for the inputs a plain loop over NumPy, tifffile and imagecodecs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from daskstack.errors import UsageError
from daskstack.files import absolute
from daskstack.progress import Progress
from daskstack.text import count, first_of, plural, printable, shown
from daskstack.verification.finished import Finished, Problem
from daskstack.verification.inputs import Decoder
from daskstack.verification.npy import inspected_npy
from daskstack.verification.zarr import inspected_zarr

EQUAL, DIFFERENT, UNCHECKED = 0, 1, 3
AT_ONCE = 16 << 20  # bytes read at a time


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What was compared, and what differs; print it.

    Attributes
    ----------
    out : str
        The output.
    checked : tuple of str
        What was compared, in words.
    problems : tuple of Problem
        What differs: item, file and what is wrong.
    unchecked : tuple of str
        What could not be compared, and why.
    """

    out: str
    checked: tuple[str, ...]
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]

    @property
    def status(self) -> int:
        """0 equal, 1 different, 3 could not check all that was asked for."""
        return DIFFERENT if self.problems else UNCHECKED if self.unchecked else EQUAL

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        words = {EQUAL: "equal", DIFFERENT: "different", UNCHECKED: "not checked"}
        return {"result": words[self.status], "status": self.status, **asdict(self)}

    def __str__(self) -> str:
        lines = [*self.checked]
        if self.problems:
            lines.append(f"different: {plural(len(self.problems), 'problem')} in {shown(self.out)}")
            lines += [f"  {line}" for line in first_of(self.problems)]
            lines.append("next  move it away and build it anew")
        lines += [f"not checked: {text}" for text in self.unchecked]
        if self.status == EQUAL:
            lines.append(f"equal: {shown(self.out)}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass
class _Findings:
    checked: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def verified(
    out: str,
    *,
    data: bool = False,
    inputs: bool = False,
    sample: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> VerifyReport:
    """Compare an output with its record: its structure always; its items and its inputs where asked.

    Raises
    ------
    UsageError
        ``sample`` is no number of items.
    """
    if sample is not None and sample < 1:
        raise UsageError(f"sample={sample}", "give a number of items, at least 1")
    if sample is not None and not (data or inputs):
        raise UsageError(f"sample={sample} of nothing", "choose data or inputs as well")
    full = absolute(out)
    found = _Findings()
    finished = _inspected(full, found.problems, found.unchecked)
    if finished is None:
        return VerifyReport(full, (), tuple(found.problems), tuple(found.unchecked))
    found.checked.append(f"structure  {finished.summary}")
    if not finished.broken:
        items = _chosen(finished.items, sample, seed)
        if data:
            _compare_data(finished, items, found, progress=progress)
        if inputs:
            _compare_inputs(finished, items, found, progress=progress)
    elif data or inputs:
        found.unchecked.append("the items, since the array itself is not as recorded")
    return VerifyReport(full, tuple(found.checked), tuple(found.problems), tuple(found.unchecked))


def _inspected(out: str, problems: list[Problem], unchecked: list[str]) -> Finished | None:
    """The output, its structure compared with its record; None where that cannot be told.

    What is wrong is added to ``problems``, what cannot be compared to ``unchecked``.
    """
    if not os.path.lexists(out):
        unchecked.append(f"there is no {printable(os.path.basename(out))}")
        return None
    inspect = inspected_npy if out.endswith(".npy") else inspected_zarr
    try:
        return inspect(out, problems, unchecked)
    except Exception as exc:  # noqa: BLE001  # whatever damaged metadata leads to
        problems.append(
            Problem(f"its metadata cannot be read: {type(exc).__name__}: {exc}", None, os.path.basename(out))
        )
        return None


def _chosen(items: int, sample: int | None, seed: int) -> NDArray[np.int64]:
    """All items, or so many of them at random, in order."""
    if sample is None or sample >= items:
        return np.arange(items)
    return np.sort(np.random.default_rng(seed).choice(items, sample, replace=False))


def _compare_data(finished: Finished, items: NDArray[np.int64], found: _Findings, *, progress: bool | None) -> None:
    """Each item's checksum beside the one in the index."""
    if finished.checksums is None:
        found.unchecked.append("the data: the index has no checksums that can be read")
        return
    different = 0
    with Progress(len(items), "items", wanted=progress) as bar:
        for item, stored in _stored_items(finished, items):
            problem = stored if isinstance(stored, str) else ""
            if not isinstance(stored, str):
                checksum = f"{google_crc32c.value(stored.tobytes()):08x}"
                if checksum != finished.checksums[item]:
                    problem = f"its checksum is {checksum}, due {finished.checksums[item]}"
            if problem:
                different += 1
                found.problems.append(Problem(problem, item, finished.file_of(item)))
            bar.update(1, finished.item_nbytes, bool(problem))
    whole = "" if len(items) == finished.items else f" of {count(finished.items)}"
    found.checked.append(f"data       {count(len(items))}{whole} items, {_different(different)}")


def _different(number: int) -> str:
    return "all as recorded" if not number else f"{count(number)} not as recorded"


def _stored_items(finished: Finished, items: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[Any] | str]]:
    """Items as they are stored, some at a time; where they cannot be read, one by one, and why."""
    at_once = max(1, min(finished.tile_items, AT_ONCE // max(1, finished.item_nbytes)))
    runs = np.flatnonzero((np.diff(items, prepend=-2) != 1) | (items % at_once == 0))
    for begin, end in zip(runs, [*runs[1:], len(items)], strict=True):
        start, stop = int(items[begin]), int(items[end - 1]) + 1
        try:
            yield from enumerate(finished.read(start, stop), start)
        except Exception:  # noqa: BLE001  # whatever damaged chunks make a library raise
            for item in range(start, stop):
                yield item, _one(finished, item)


def _one(finished: Finished, item: int) -> NDArray[Any] | str:
    try:
        return np.asarray(finished.read(item, item + 1)[0])
    except Exception as exc:  # noqa: BLE001
        return f"cannot be read: {type(exc).__name__}: {exc}"


def _compare_inputs(finished: Finished, items: NDArray[np.int64], found: _Findings, *, progress: bool | None) -> None:
    """Each item beside what the library makes of its file."""
    record = finished.record
    if "derived" in record:
        found.unchecked.append("the inputs: the array was computed from them, not read")
        return
    if "reader" in record["options"]:
        found.unchecked.append(f"the inputs: they were read by a function of yours ({record['options']['reader']})")
        return
    needed = ["file", "size", "mtime", *(["page"] if record["join"] == "concat" else [])]
    if any(len(finished.index.get(name, ())) != finished.items for name in needed):
        found.unchecked.append("the inputs: the index does not tell the file of each item")
        return
    filled = {entry["item"]: entry["problem"] for entry in record["filled"]}
    read = Decoder(finished)
    different = missing = 0
    with Progress(len(items), "items", wanted=progress) as bar:
        for item, stored in _stored_items(finished, items):
            if item in filled:
                problem = _filled_problem(stored)
            else:
                due = read(item)
                if isinstance(due, str):
                    missing += 1
                    found.unchecked.append(f"{printable(finished.file_of(item))}  {due}")
                    continue
                problem = _unlike(stored, due, changed=read.changed)
            if problem:
                different += 1
                found.problems.append(Problem(problem, item, finished.file_of(item)))
            bar.update(1, finished.item_nbytes, bool(problem))
    whole = "" if len(items) == finished.items else f" of {count(finished.items)}"
    text = f"inputs     {count(len(items) - missing)}{whole} items beside their files, "
    found.checked.append(text + ("all equal" if not different else f"{count(different)} different"))


def _filled_problem(stored: NDArray[Any] | str) -> str:
    """An item of a bad file holds NaN or NaT where its dtype has it, else zero."""
    if isinstance(stored, str):
        return stored
    if stored.dtype.kind in "mM":
        holds = np.isnat(stored)
    else:
        holds = np.isnan(stored) if stored.dtype.kind in "fc" else stored == np.zeros((), stored.dtype)
    return "" if np.all(holds) else "it does not hold the fill value"


def _unlike(stored: NDArray[Any] | str, due: NDArray[Any], *, changed: bool) -> str:
    """What is wrong with an item; nothing where its bytes are those of its file."""
    if isinstance(stored, str):
        return stored
    since = "; the file changed since it was stored" if changed else ""
    if stored.shape != due.shape or stored.dtype != due.dtype:
        return f"is {stored.shape} {stored.dtype}, its file {due.shape} {due.dtype}{since}"
    if stored.tobytes() == due.tobytes():
        return ""
    equal = np.frombuffer(stored.tobytes(), np.uint8) == np.frombuffer(due.tobytes(), np.uint8)
    return f"{count(int((~equal).sum()))} bytes of {count(stored.nbytes)} differ from its file{since}"
