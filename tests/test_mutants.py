"""Faults planted in what writes an output: verify, whose code is its own, finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from conftest import Array, image

from daskstack import build, tasks, verify
from daskstack.errors import OutputError
from daskstack.reads import BlockRead
from daskstack.targets import NpyTarget, ZarrTarget, npy, shard, zarr
from daskstack.verification import VerifyReport

OUTPUTS: dict[str, dict[str, Any]] = {
    "out.npy": {},
    "out.zarr": {"chunks": (1, 4, 4), "shards": (2, 8, 4)},
    "two.zarr": {"chunks": (2, 6, 4), "zarr_format": 2},
}
Patch: TypeAlias = pytest.MonkeyPatch
Mutant: TypeAlias = Callable[[Patch], None]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Five files of square pictures, so that a swap of axes keeps the shape."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(5):
        np.save(tmp_path / "in" / f"{k}.npy", image(k, (6, 6)))
    return tmp_path


def report(name: str) -> VerifyReport:
    build("in", name, files_per_block=2, progress=False, **OUTPUTS[name])
    return verify(name, data=True, inputs=True, progress=False)


def wrapped(owner: Any, name: str, mutate: Callable[..., Any]) -> Mutant:
    """A function or method in whose place ``mutate`` is called, with what it was and its arguments."""

    def apply(patch: Patch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: mutate(real, *args, **options))

    return apply


def on_write(mutate: Callable[[int, Array], tuple[int, Array]]) -> Mutant:
    """What blocks are and where they go is changed before either target writes them."""

    def write(real: Any, self: Any, place: str, start: int, block: Array) -> None:
        at, changed = mutate(start, block)
        real(self, place, at, np.ascontiguousarray(changed))

    def apply(patch: Patch) -> None:
        wrapped(NpyTarget, "write", write)(patch)
        wrapped(ZarrTarget, "write", write)(patch)

    return apply


def on_read(mutate: Callable[[Array], Array]) -> Mutant:
    """What a task reads is changed before its checksum is taken: only the inputs themselves tell."""

    def read(real: Any, self: BlockRead) -> Any:
        block = real(self)
        return block._replace(array=np.ascontiguousarray(mutate(block.array)))

    return wrapped(BlockRead, "read", read)


def misplaced(start: int, block: Array) -> tuple[int, Array]:
    return (0 if start == 2 else start), block


def damaged(block: Array, at: int) -> Array:
    changed = block.copy()
    changed.reshape(-1)[at] ^= 1
    return changed


def swapped_index(real: Any, part: Array, chunks: Any, shards: Any, compression: Any) -> list[bytes]:
    """The chunks of a shard in another order than its index says."""
    pieces: list[bytes] = real(part, chunks, shards, compression)
    return [*pieces[2:4], *pieces[:2], *pieces[4:]]


def without_checksum(real: Any, part: Array, chunks: Any, shards: Any, compression: Any) -> list[bytes]:
    return list(real(part, chunks, shards, compression)[:-1])


def wrong_checksum(real: Any, part: Array, chunks: Any, shards: Any, compression: Any) -> list[bytes]:
    pieces: list[bytes] = real(part, chunks, shards, compression)
    return [pieces[0], bytes(4), *pieces[2:]]


def filled_up(real: Any, part: Array, chunks: tuple[int, ...]) -> Array:
    """Edges filled up in front instead of behind."""
    if part.shape == chunks:
        return np.asarray(real(part, chunks))
    whole = np.zeros(chunks, part.dtype)
    whole[tuple(slice(c - n, None) for n, c in zip(part.shape, chunks, strict=True))] = part
    return whole


def one_never_written(real: Any, folder: str, path: str, pieces: list[bytes]) -> None:
    real(folder, path, [b"".join(pieces)[:-1]] if path.endswith("1.0.0") else pieces)


MUTANTS: dict[str, tuple[tuple[str, ...], Mutant]] = {
    "a block one item late": (("out.npy",), on_write(lambda start, block: (max(0, start - 1), block))),
    "a block in the place of another": (("out.npy",), on_write(misplaced)),
    "the items of a block in another order": (tuple(OUTPUTS), on_write(lambda start, block: (start, block[::-1]))),
    "two axes swapped": (tuple(OUTPUTS), on_write(lambda start, block: (start, block.swapaxes(1, 2)))),
    "rows rolled by one": (tuple(OUTPUTS), on_write(lambda start, block: (start, np.roll(block, 1, 1)))),
    "another byte order": (tuple(OUTPUTS), on_write(lambda start, block: (start, block.byteswap()))),
    "one bit of the last pixel": (tuple(OUTPUTS), on_write(lambda start, block: (start, damaged(block, -1)))),
    "a block left out": (tuple(OUTPUTS), on_write(lambda start, block: (start, block * (start != 4)))),
    "read: two axes swapped": (tuple(OUTPUTS), on_read(lambda block: block.swapaxes(1, 2))),
    "read: items in another order": (tuple(OUTPUTS), on_read(lambda block: block[::-1])),
    "read: another byte order": (tuple(OUTPUTS), on_read(lambda block: block.byteswap())),
    "read: one bit": (tuple(OUTPUTS), on_read(lambda block: damaged(block, 0))),
    "the first item's checksum for all": (
        tuple(OUTPUTS),
        wrapped(tasks, "checksums_of", lambda real, block: real(block)[:1] * len(block)),
    ),
    "a header of another shape": (
        ("out.npy",),
        wrapped(npy, "npy_header", lambda real, shape, dtype: real((*shape[1:], shape[0]), dtype)),
    ),
    "a header of another byte order": (
        ("out.npy",),
        wrapped(npy, "npy_header", lambda real, shape, dtype: real(shape, dtype.newbyteorder(">"))),
    ),
    "the chunks of a shard in another order": (("out.zarr",), wrapped(zarr, "encode_shard", swapped_index)),
    "an index without a checksum": (("out.zarr",), wrapped(zarr, "encode_shard", without_checksum)),
    "a chunk with a wrong checksum": (("out.zarr",), wrapped(zarr, "encode_shard", wrong_checksum)),
    "edges filled up on the other side": (("out.zarr", "two.zarr"), wrapped(shard, "_whole_chunk", filled_up)),
    "big-endian chunks": (
        ("out.zarr", "two.zarr"),
        wrapped(shard, "_whole_chunk", lambda real, part, chunks: real(part, chunks).byteswap()),
    ),
    "chunks in Fortran order": (
        ("out.zarr", "two.zarr"),
        wrapped(shard, "_whole_chunk", lambda real, part, chunks: np.ascontiguousarray(real(part, chunks).T)),
    ),
    "a file of the data cut short by a byte": (("out.zarr", "two.zarr"), wrapped(zarr, "_write_whole", one_never_written)),
    "the names of two axes of files swapped": (
        ("out.zarr", "two.zarr"),
        wrapped(zarr, "_file_name", lambda real, at, version: real((at[0], at[2], at[1]), version)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_without_a_mutant_all_is_equal(name: str) -> None:
    assert report(name).status == 0


@pytest.mark.parametrize(("mutant", "name"), [(m, name) for m, (names, _) in MUTANTS.items() for name in names])
def test_every_mutant_is_found(mutant: str, name: str, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[mutant][1](patch)
        found = report(name)
    assert found.status == 1


@pytest.mark.parametrize("name", ["out.zarr", "two.zarr"])
def test_a_block_in_the_place_of_another_is_not_even_published(name: str, monkeypatch: Patch) -> None:
    on_write(misplaced)(monkeypatch)
    with pytest.raises(OutputError, match=r"files of the data are missing: (c\.)?1\.0\.0, (c\.)?1\.0\.1\n"):
        report(name)
    assert not Path(name).exists()
