"""What a build did, in words."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from daskstack.errors import BadFileError
from daskstack.targets import format_of
from daskstack.text import count, duration, first_of, nbytes, plural, shape_text, shown


@dataclass(frozen=True, repr=False)
class StoreReport:
    """What a build did; print it.

    Attributes
    ----------
    out : str
        The output.
    side_files : tuple of str
        What lies beside it.
    shape, dtype
        Of the output.
    files : int
        Files read.
    seconds : float
        From plan to publication.
    left_out : int
        Names that the scan for files left out.
    read : int
        Files read now; the others' blocks were there already.
    parsed : int
        How many of them a library had to parse, since they are not laid out like the first; a file that several
        blocks read counts for each.
    filled : tuple of str
        Items that hold the fill value: the file of each and what was wrong with it.
    blocks, blocks_done : int
        How many there are, and how many are on disk; the output is there only when all are.
    hosts : dict of str to int
        How many blocks each host has written, where there were several.
    was_there : bool
        Whether the output was there already, made by the same plan from the same files.
    """

    out: str
    side_files: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    files: int
    seconds: float
    left_out: int = 0
    read: int = 0
    parsed: int = 0
    filled: tuple[str, ...] = ()
    blocks: int = 0
    blocks_done: int = 0
    hosts: Mapping[str, int] = field(default_factory=dict)
    was_there: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        if self.blocks_done < self.blocks:
            done = f"{count(self.blocks_done)} of {plural(self.blocks, 'block')} are on disk"
            return (
                f"part  done; {done}, {shown(self.out)} is not complete yet\n"
                "next  the other parts, or the same command without --part"
            )
        what = f"{shown(self.out)} {shape_text(self.shape)} {self.dtype}, {nbytes(self.nbytes)}"
        head = f"done  {what} in {duration(self.seconds)}"
        if self.was_there:
            head = f"done  {what}: it was there already, made from these files"
        elif self.files:
            head += f", {count(round(self.read / max(1e-9, self.seconds)))} files/s"
            if self.parsed:
                head += f"\n      {count(min(self.parsed, self.read))} of {plural(self.read, 'file')} parsed one by one"
            if self.left_out:
                head += f"\n      from {plural(self.files, 'file')}; {count(self.left_out)} left out"
        head += "".join(f"\n      {host}: {plural(n, 'block')}" for host, n in sorted(self.hosts.items()))
        if self.filled:
            head += f"\nfilled {plural(len(self.filled), 'item')} of bad files:"
            head += "".join(f"\n      {text}" for text in first_of(self.filled))
        meaning = {".csv": "row to file", ".json": "how it was made", ".npy": "label"}
        beside = [f"{shown(p)} ({meaning[os.path.splitext(p)[1]]})" for p in self.side_files]
        beside.sort(key=lambda text: not text.endswith("(row to file)"))
        read = format_of(self.out).read_hint(shown(self.out))
        return "\n".join([head, *(f"      {b}" for b in beside), f"read  {read}"])

    __repr__ = __str__

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            **asdict(self),
            "shape": [int(n) for n in self.shape],
            "dtype": np.lib.format.dtype_to_descr(self.dtype),
            "nbytes": self.nbytes,
            "complete": self.blocks_done == self.blocks,
        }

    def _repr_html_(self) -> str:
        from daskstack import display

        return display.html(
            lambda: display.card(f"daskstack: {shown(self.out)}", display.rows_of(str(self))), "daskstack.StoreReport"
        )


def bad_files_csv(bad: Sequence[BadFileError]) -> bytes:
    r"""All bad files, a row each.

    Examples
    --------
    >>> bad_files_csv([BadFileError("a.tif", "uint8", "uint16")])
    b'file,problem\na.tif,"found uint8, due uint16"\n'
    """
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["file", "problem"])
    writer.writerows([b.path, b.problem] for b in bad)
    return stream.getvalue().encode("utf-8", "surrogateescape")
