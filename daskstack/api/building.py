"""Build of listed files by one process, by one of several that each do a part, or by those that srun started."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskstack.api.stack import Stack
from daskstack.api.storing import carried_out, checked_out
from daskstack.cluster import check_scheduler
from daskstack.discover import Listing, Source
from daskstack.jobs import SRUN, in_allocation, make_jobs
from daskstack.opening import as_json
from daskstack.report import StoreReport
from daskstack.run import How
from daskstack.staging.turns import adopted, turn


def build_listed(
    find: Callable[[], Listing],
    opened: Callable[[Listing], Stack],
    out: Source,
    *,
    asked: Sequence[Any],
    how: How,
    **options: Any,
) -> StoreReport:
    """Build of what ``find`` lists; as a part of a build, of what another part has listed for what was asked."""
    if options.get("cluster") == SRUN:  # before anything is listed: all processes of srun come here
        return _build_in_allocation(find, opened, out, asked=asked, how=how, **options)
    scheduler = options.get("scheduler")
    if how.part is None:
        stack = opened(find())
        return carried_out(stack.plan(out, **options), stack, how, scheduler)
    path = checked_out(out)
    request = hashlib.sha256(json.dumps([os.getcwd(), as_json(asked), path]).encode()).hexdigest()
    with ExitStack() as ours:
        ours.enter_context(turn(path))
        stack = opened(adopted(path, request) or find())
        made = stack.plan(out, **options)
        own = np.concatenate([stack.file_of[a:b] for a, b in _part_of(made.bounds, how.part)] or [stack.file_of[:0]])
        stack = replace(stack, listing=stack.listing.looked_at_again(np.unique(own)))
        return carried_out(made, stack, replace(how, request=request, turn=ours), scheduler)


def _build_in_allocation(*arguments: Any, asked: Sequence[Any], how: How, **options: Any) -> StoreReport:
    names = [name for name in inspect.signature(make_jobs).parameters if name in options]
    jobs = make_jobs(**{name: options.pop(name) for name in names})
    check_scheduler(options.pop("scheduler", None), options.pop("workers", None), jobs)
    with in_allocation(jobs) as client:  # type: ignore[arg-type]  # a cluster is named
        return build_listed(*arguments, asked=asked, how=how, scheduler=client, **options)


def _part_of(bounds: NDArray[np.int64], part: tuple[int, int]) -> list[tuple[int, int]]:
    """First item and end of each of the blocks that a part does."""
    edges = bounds.tolist()
    return list(pairwise(edges))[part[0] :: part[1]]
