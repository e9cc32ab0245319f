"""Receipts: the record that a block is safely on disk, appended by the task that wrote it.

Each process appends to a file of its own, a line a block: the line's crc32c and its JSON.  A line that
a kill or a full disk tore is no receipt, so that its block is written again.  A receipt need not be synced:
it comes after its block is durable, and where it is lost the block is only written once more.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from daskstack import files
from daskstack.targets import crc32c

FOLDER = "receipts"
MOST_BYTES = 1 << 31

_names: dict[int, str] = {}
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Receipt:
    """What was written of a block.

    Attributes
    ----------
    block : int
        Its number.
    checksums : array.array of unsigned 32-bit int
        crc32c of each item.
    sizes, mtimes : array.array of 64-bit int
        Of each item's file when it was read; empty where the items come from no file.
    filled : dict of int to str
        Items, counted from the block's first, that hold the fill value, and what was wrong with their files.
    host : str
        Who wrote it; no part of what was written.
    """

    block: int
    checksums: array[int]
    sizes: array[int] = field(default_factory=lambda: array("q"))
    mtimes: array[int] = field(default_factory=lambda: array("q"))
    filled: Mapping[int, str] = field(default_factory=dict)
    host: str = field(default_factory=files.host_name, compare=False)


def add(folder: str, plan_id: str, receipt: Receipt) -> None:
    """Append a receipt to this process's file in a staging folder.

    Raises
    ------
    OSError
        It cannot be written, or the folder is gone.
    """
    text = json.dumps({"plan_id": plan_id, **vars(receipt)}, separators=(",", ":"), default=list).encode()
    line = b"\n%08x %s\n" % (crc32c(text), text)  # it begins anew, whatever a torn line before it left
    path = os.path.join(folder, FOLDER, f"{_names.setdefault(os.getpid(), uuid.uuid4().hex)}.jsonl")
    with files.writing(path), _one_at_a_time:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = os.open(path, files.NEW_FILE | os.O_APPEND, 0o666)
        try:
            files.append_all(descriptor, [line])
        finally:
            os.close(descriptor)


def read(folder: str, plan_id: str) -> dict[int, list[Receipt]]:
    """All receipts in a staging folder, block by block; what differs of one block is kept apart."""
    found: dict[int, list[Receipt]] = {}
    for line in _lines(os.path.join(folder, FOLDER)):
        receipt = _parsed(line, plan_id)
        if receipt is not None:
            same_block = found.setdefault(receipt.block, [])
            if receipt not in same_block:
                same_block.append(receipt)
    return found


def _lines(folder: str) -> Iterator[bytes]:
    for name in sorted(os.listdir(folder)):
        yield from files.read_regular(os.path.join(folder, name), MOST_BYTES).split(b"\n")


def _parsed(line: bytes, plan_id: str) -> Receipt | None:
    """The receipt of a line; None where it is torn, damaged or another plan's."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % crc32c(text):
        return None
    fields = json.loads(text)
    if fields.pop("plan_id") != plan_id:
        return None
    filled = {int(k): problem for k, problem in fields["filled"].items()}
    checksums, sizes, mtimes = (
        array("I", fields["checksums"]),
        array("q", fields["sizes"]),
        array("q", fields["mtimes"]),
    )
    return Receipt(fields["block"], checksums, sizes, mtimes, filled, fields.get("host", ""))
