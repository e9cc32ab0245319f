from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daskstack import blocks


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(1, 15), st.integers(0, 8))
def test_cut_takes_whole_files_while_they_fit(rows: list[int], items: int, more: int) -> None:
    bounds = blocks.cut(np.array(rows), items, items + more).tolist()
    total = sum(rows)
    assert bounds[0] == 0
    assert bounds[-1] == total
    assert all(0 < b - a <= items + more for a, b in pairwise(bounds))
    ends = set(np.cumsum(rows).tolist())
    for a, b in pairwise(bounds):
        # By brute force: the last end of a file within reach, else that of this file, else as far as a block may go.
        reachable = [e for e in ends if a < e <= a + items]
        assert b == (max(reachable) if reachable else min(*(e for e in ends if e > a), a + items + more))


@given(st.integers(1, 2_000_000), st.integers(0, 1 << 34))
def test_items_per_block_keeps_its_promises(count: int, item_nbytes: int) -> None:
    items = blocks.items_per_block(count, item_nbytes)
    assert 1 <= items <= count
    if items > 1:
        assert items * item_nbytes <= blocks.MAX_BLOCK_NBYTES
    if items * item_nbytes > blocks.BLOCK_NBYTES and items > 1:
        assert -(-count // items) <= blocks.MOST_BLOCKS or items == blocks.MAX_BLOCK_NBYTES // item_nbytes
    if count >= blocks.FEWEST_BLOCKS:
        assert -(-count // items) >= blocks.FEWEST_BLOCKS // 2


def test_numbers_that_people_meet() -> None:
    small = 184 * 184 * 2
    assert -(-220_000 // blocks.items_per_block(220_000, small)) < 1_000
    assert blocks.items_per_block(20_000, small) == 247
    assert blocks.items_per_block(256, 2048 * 2048 * 2) == 2
    assert blocks.items_per_block(10, 5 << 30) == 1
    assert blocks.items_per_block(1_000_000, small) == 250  # 4,000 blocks rather than 4,049
    assert blocks.items_per_block(3, 10) == 1


def test_as_bytes_is_a_view_whatever_the_dtype() -> None:
    for dtype in ("uint8", "bool", "complex64", "datetime64[s]", "float16", [("a", "<f4"), ("b", "?")]):
        array = np.zeros((3, 2), dtype)
        assert blocks.as_bytes(array).nbytes == array.nbytes
        assert np.shares_memory(blocks.as_bytes(array), array)
    assert blocks.as_bytes(np.zeros((0, 4))).shape == (0,)
