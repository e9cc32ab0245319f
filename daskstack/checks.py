"""Whether a plan can be carried out: what is there already, what may be replaced, whether there is room.

Nothing is written here.
"""

from __future__ import annotations

import os

import numpy as np

from daskstack.errors import NoSpaceError, OutputError, OutputExistsError
from daskstack.plan import StorePlan
from daskstack.report import StoreReport
from daskstack.staging.root import size_of, staging_root
from daskstack.tasks import Storable
from daskstack.text import listed, nbytes, plural, printable, shown


def check_output(plan: StorePlan, work: Storable, *, fill: bool = False, restart: bool = False) -> StoreReport | None:
    """Look, without writing, whether the plan can be carried out.

    ``fill`` is whether filled items are wanted; ``restart`` whether what was kept goes, and where it may be
    overwritten a finished output, too.

    Returns
    -------
    StoreReport, optional
        Where the output is there already, made by this very plan from files that have not changed.

    Raises
    ------
    OutputExistsError
        A final name is taken by something that may not be replaced, or is one of the inputs.
    OutputError, NoSpaceError
        The folder is not there, or the disk is too small.
    """
    parent = os.path.dirname(plan.out)
    if not os.path.isdir(parent):
        raise OutputError(f"there is no folder {shown(parent)}", f"make it: mkdir -p {shown(parent)}")
    _refuse_long_names(plan, parent)
    while True:
        own = plan.target.own_names(plan.out)
        try:
            return _checked(plan, work, own, fill=fill, restart=restart)
        except OutputExistsError:
            if plan.target.own_names(plan.out) == own:
                raise  # else another run published meanwhile: look again


def _checked(plan: StorePlan, work: Storable, own: tuple[str, ...], *, fill: bool, restart: bool) -> StoreReport | None:
    """The same, knowing which names are daskstack's own."""
    _refuse_inputs(plan, work, own)
    if plan.out in own:
        changed = _changed_since(plan, work)
        missing = [name for name in plan.final_names if name not in own]
        filled = (plan.target.read_record(plan.out) or {}).get("filled", [])
        if changed == [] and not missing and (fill or not filled) and not (restart and plan.overwrite):
            return StoreReport(
                plan.out,
                plan.final_names[:-1],
                plan.target.shape,
                plan.target.dtype,
                files=0,
                seconds=0.0,
                filled=tuple(f"{f['file']}  {f['problem']}" for f in filled),
                was_there=True,
                blocks=plan.blocks,
                blocks_done=plan.blocks,
            )
        if not plan.overwrite:
            raise OutputExistsError(*_why_not_again(plan, changed, missing, len(filled)))
    _refuse_taken(plan, own)
    # A run that was killed took its room already; a restart frees that of all runs.
    need = plan.need - size_of(plan.out, "" if restart else plan.plan_id)
    if plan.free is not None and plan.free < need:
        raise NoSpaceError(
            f"{shown(plan.out)} needs {nbytes(need)}; {nbytes(plan.free)} are free on its disk (or in its quota)",
            "make room, or choose another disk",
        )
    return None


def _refuse_long_names(plan: StorePlan, parent: str) -> None:
    longest = os.pathconf(parent, "PC_NAME_MAX")
    for name in map(os.path.basename, (*plan.final_names, staging_root(plan.out))):
        if len(os.fsencode(name)) > longest:
            raise OutputError(
                f"the name {printable(name)} is longer than the {longest} bytes that its folder takes",
                "choose a shorter OUT or label",
            )


def _refuse_taken(plan: StorePlan, own: tuple[str, ...]) -> None:
    """What holds a final name must be daskstack's own, and meant to go."""
    may_go = _may_go(plan, own)
    for name in plan.final_names:
        if not os.path.lexists(name) or name in may_go:
            continue
        what, advice = "was not made by daskstack", "choose another OUT"
        if plan.target.read_record(plan.out) is not None and os.path.lexists(plan.out):
            what, advice = "was changed since daskstack made it", "move it away, or choose another OUT"
        elif name in own:
            what, advice = "belongs to an output that is gone", "move it away, or --overwrite it"
        taken = plan.out if plan.out not in own and os.path.lexists(plan.out) else name
        raise OutputExistsError(f"{shown(taken)} exists and {what}; it was not touched", advice)


def replaceable(plan: StorePlan) -> tuple[str, ...]:
    """What may be replaced now: with --overwrite an output of daskstack's own, and what a publication of this very
    plan that was killed left beside the place of its array.
    """
    return _may_go(plan, plan.target.own_names(plan.out))


def _may_go(plan: StorePlan, own: tuple[str, ...]) -> tuple[str, ...]:
    """Those of daskstack's own names that this plan may replace."""
    if plan.overwrite:
        return own
    record = plan.target.read_record(plan.out)
    same = record is not None and record["plan_id"] == plan.plan_id
    return own if same and not os.path.lexists(plan.out) else ()


def _refuse_inputs(plan: StorePlan, work: Storable, own: tuple[str, ...]) -> None:
    """An output that is an input, by whatever name or link, would be destroyed before it is read."""
    for name in {*plan.final_names, *own}:
        try:
            found = os.stat(name)
        except OSError:
            continue
        alike = (work.listing.sizes == found.st_size) & (work.listing.mtimes == found.st_mtime_ns)
        for k in np.flatnonzero(alike):
            if os.path.samefile(name, work.listing.paths[k]):
                raise OutputExistsError(
                    f"{shown(name)} is one of the inputs; it was not touched", "choose another OUT, or leave it out"
                )


def _changed_since(plan: StorePlan, work: Storable) -> list[str] | None:
    """The files that are not as they were when the output was made; None where another plan made it."""
    record = plan.target.read_record(plan.out)
    if record is None or record["plan_id"] != plan.plan_id:
        return None
    index = plan.target.read_index(plan.out, ["size", "mtime"])
    if not index.keys() <= work.columns.keys():  # stored like a stack, and now like none
        return None
    same = np.ones(plan.target.items, bool)
    for name, column in index.items():
        same &= np.array(column, dtype=np.int64) == work.columns[name]
    changed = np.flatnonzero(~same).tolist()
    return list(dict.fromkeys(os.path.join(work.origin["root"], work.columns["file"][k]) for k in changed))


def _why_not_again(plan: StorePlan, changed: list[str] | None, missing: list[str], filled: int) -> tuple[str, str]:
    if changed == [] and not missing:
        what = f"holds the fill value in {plural(filled, 'item')} of bad files"
    elif changed == []:
        what = f"its {shown(missing[0])} is missing or was changed"
    elif changed is None:
        what = "was made from other files or with other options"
    else:
        what = f"was made before {plural(len(changed), 'file')} changed: {listed([shown(p) for p in changed])}"
    return f"{shown(plan.out)} exists and {what}; it was not touched", "choose another OUT, or --overwrite it"
