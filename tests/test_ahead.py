"""Files come in their order, whatever was opened before its turn, and none stays open."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from daskstack import ahead
from daskstack.ahead import opened_ahead

NUMBER = 150


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files that each hold their number; afterwards no more of them are open than before."""
    monkeypatch.setattr(ahead, "_ahead", ahead._Ahead())
    names = [str(tmp_path / str(k)) for k in range(NUMBER)]
    for k, name in enumerate(names):
        Path(name).write_text(str(k))
    before = len(os.listdir("/proc/self/fd"))
    yield names
    assert len(os.listdir("/proc/self/fd")) == before


def numbers(paths: list[str]) -> list[int | None]:
    with closing(opened_ahead(paths)) as opened:
        return [None if d is None else int(os.pread(d, 9, 0)) for d in opened]


@pytest.mark.parametrize("count", [0, 1, 2, ahead.MOST_AHEAD, ahead.MOST_AHEAD + 1, NUMBER])
@pytest.mark.parametrize("fetch", [False, True])
def test_all_files_in_order(paths: list[str], count: int, fetch: bool) -> None:
    ahead._ahead.slow_reads = fetch
    assert numbers(paths[:count]) == list(range(count))


def test_files_that_cannot_be_opened_are_none(paths: list[str], tmp_path: Path) -> None:
    assert numbers([paths[0], str(tmp_path / "gone"), "a\0b", paths[3]]) == [0, None, None, 3]


def test_who_stops_early_leaves_nothing_open(paths: list[str]) -> None:
    opened = opened_ahead(paths)
    assert [next(opened) is not None for _ in range(3)] == [True] * 3
    opened.close()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("spare", [1, 2, 20])
def test_few_descriptors_are_enough(paths: list[str], monkeypatch: pytest.MonkeyPatch, spare: int, slow: bool) -> None:
    """What a process may open is found out by opening, where its share was too large."""
    ahead._ahead.share = 1000
    ahead._ahead.slow_opens = slow
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")) + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(*held, highest) + 1 + spare, hard))
    try:
        found = numbers(paths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
    assert found == list(range(NUMBER))


def test_threads_open_where_each_open_is_slow_and_there_alone(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    who: set[int] = set()
    real = ahead._open_to_read

    def open_one(path: str) -> int | None:
        who.add(threading.get_ident())
        return real(path)

    monkeypatch.setattr(ahead, "_open_to_read", open_one)
    monkeypatch.setattr(ahead, "SLOW_OPEN", 60.0)
    assert numbers(paths) == list(range(NUMBER))
    assert who == {threading.get_ident()}
    monkeypatch.setattr(ahead, "SLOW_OPEN", 0.0)
    assert numbers(paths) == list(range(NUMBER))
    assert len(who) > 1


def test_several_readers_share_what_a_process_may_open(paths: list[str]) -> None:
    ahead._ahead.share = 40
    with ahead._ahead as first, ahead._ahead as second, ahead._ahead as third:
        assert (first, second, third) == (32, 20, 13)
    with ahead._ahead as again:
        assert again == 32
