"""Any order of builds, parts, stops, bad and changed files: the final name holds nothing or what was accepted."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from conftest import Array, image
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from daskstack import build, receipts, targets
from daskstack.errors import BadFilesError, OutputError, OutputExistsError

ITEMS = 5
MINE = {"mine.txt": b"mine", "out.notes.npy": b"my notes", "in/mine.txt": b"a third"}


class Killed(BaseException):
    """The end of a run, out of the blue."""


class Kill:
    """Ends the run before its n-th call of what writes a block, of what leaves its receipt, or of what finishes."""

    def __init__(self, where: str, n: int) -> None:
        kinds = targets.NpyTarget, targets.ZarrTarget
        self.places: list[tuple[Any, str]] = [(receipts, "add")] if where == "add" else [(c, where) for c in kinds]
        self.real = [getattr(owner, name) for owner, name in self.places]
        self.left = n

    def __enter__(self) -> None:
        for (owner, name), real in zip(self.places, self.real, strict=True):
            setattr(owner, name, self.wrapped(real))

    def __exit__(self, *_: object) -> None:
        for (owner, name), real in zip(self.places, self.real, strict=True):
            setattr(owner, name, real)

    def wrapped(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise Killed
            return real(*args, **kwargs)

        return call


class Builds(RuleBasedStateMachine):
    """The model: of every version of every file, by its time, the item that it holds; None where it is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.home = Path.cwd()
        os.chdir(self.folder)
        self.versions: list[dict[int, Array | None]] = [{} for _ in range(ITEMS)]
        self.now = [0] * ITEMS
        self.clock = 0
        self.published: dict[str, bytes] | None = None

    def teardown(self) -> None:
        os.chdir(self.home)
        shutil.rmtree(self.folder)

    @initialize(out=st.sampled_from(["out.npy", "out.zarr"]), mine_inside=st.booleans())
    def begin(self, out: str, *, mine_inside: bool) -> None:
        self.out = out
        (self.folder / "in").mkdir()
        self.mine = dict(MINE)
        if mine_inside:
            (self.folder / f"{out}.part").mkdir()
            self.mine[f"{out}.part/mine.txt"] = b"mine, too"
        for name, data in self.mine.items():
            (self.folder / name).write_bytes(data)
        for k in range(ITEMS):
            self.change(k)

    # -- files ----------------------------------------------------------------------------------------------

    def put(self, k: int, data: bytes, time: int) -> None:
        path = self.folder / "in" / f"{k}.npy"
        path.write_bytes(data)
        os.utime(path, ns=(time, time))
        self.now[k] = time

    @rule(k=st.integers(0, ITEMS - 1))
    def change(self, k: int) -> None:
        self.clock += 1
        item = image(self.clock, (3, 2), "float32")
        self.versions[k][self.clock] = item
        path = self.folder / "in" / f"{k}.npy"
        np.save(path, item)
        self.put(k, path.read_bytes(), self.clock)

    @rule(k=st.integers(0, ITEMS - 1))
    def spoil(self, k: int) -> None:
        self.clock += 1
        self.versions[k][self.clock] = None
        self.put(k, b"spoilt", self.clock)

    @rule(k=st.integers(0, ITEMS - 1), data=st.data())
    def put_back(self, k: int, data: st.DataObject) -> None:
        time = data.draw(st.sampled_from(sorted(self.versions[k])))
        item = self.versions[k][time]
        path = self.folder / "in" / f"{k}.npy"
        if item is None:
            self.put(k, b"spoilt", time)
        else:
            np.save(path, item)
            self.put(k, path.read_bytes(), time)

    @rule()
    def mend(self) -> None:
        for k in range(ITEMS):
            if self.is_bad(k):
                self.change(k)

    def is_bad(self, k: int) -> bool:
        return self.versions[k][self.now[k]] is None

    # -- runs -----------------------------------------------------------------------------------------------

    def run(self, **options: Any) -> None:
        """A build; what it raises has its reason, and what it makes is right."""
        before = self.outputs()
        bad = any(self.is_bad(k) for k in range(ITEMS))
        refused = ""
        part, fill = options.get("part"), options.get("on_error") == "fill"
        try:
            report = build("in", self.out, scheduler="synchronous", progress=False, files_per_block=1, **options)
        except BadFilesError:
            assert bad
            assert not fill or all(self.is_bad(k) for k in range(ITEMS))  # none has a header
            assert self.outputs() == before
        except OutputExistsError:
            assert before is not None
            assert not options.get("overwrite")
            assert self.outputs() == before
        except OutputError as exc:
            refused = exc.message
        except Killed:
            assert self.outputs() == before
        else:
            assert part is not None or report.blocks_done == report.blocks
            if report.blocks_done == report.blocks and (part is None or self.outputs() != before):
                self.look(current=part is None, fill=fill)
                assert part is not None or not self.leftovers()
            self.published = self.outputs()
        if refused:
            assert "changed since" in refused
            assert not options.get("restart")
            assert self.outputs() == before

    @rule(fill=st.booleans(), overwrite=st.booleans(), restart=st.booleans())
    def whole(self, *, fill: bool, overwrite: bool, restart: bool) -> None:
        self.run(on_error="fill" if fill else "raise", overwrite=overwrite, restart=restart)

    @rule(k=st.integers(0, 1), fill=st.booleans(), overwrite=st.booleans())
    def part(self, k: int, *, fill: bool, overwrite: bool) -> None:
        self.run(part=(k, 2), on_error="fill" if fill else "raise", overwrite=overwrite)

    @rule(
        where=st.sampled_from(["write", "add", "finish"]),
        n=st.integers(1, ITEMS),
        fill=st.booleans(),
        overwrite=st.booleans(),
        restart=st.booleans(),
        part=st.sampled_from([None, None, (0, 2), (1, 2)]),
    )
    def killed(
        self, where: str, n: int, *, fill: bool, overwrite: bool, restart: bool, part: tuple[int, int] | None
    ) -> None:
        with Kill(where, n):
            self.run(
                on_error="fill" if fill else "raise", overwrite=overwrite, restart=restart and part is None, part=part
            )

    @rule()
    def taken_away(self) -> None:
        for path in self.own():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.published = None

    # -- what holds -----------------------------------------------------------------------------------------

    def own(self) -> list[Path]:
        kept = {*self.mine, f"{self.out}.part", "in"}
        return [p for p in sorted(self.folder.iterdir()) if p.name not in kept]

    def outputs(self) -> dict[str, bytes] | None:
        """Every file of the output; None where there is none."""
        found = [p for top in self.own() for p in (top, *top.rglob("*")) if p.is_file()]
        return {str(p): p.read_bytes() for p in found} or None

    def leftovers(self) -> list[str]:
        """What is in the staging folder, but for the user's."""
        root = self.folder / f"{self.out}.part"
        return [str(p) for p in root.rglob("*") if f"{self.out}.part/{p.name}" not in self.mine]

    def look(self, *, current: bool, fill: bool) -> None:
        """Each item is the version of its file that the index names; after a whole build that is the present one."""
        kind = targets.format_of(self.out)
        index = kind.read_index(self.out, ["mtime", "checksum", "filled"])
        data: Any = np.load(self.out) if self.out.endswith(".npy") else zarr.open_group(self.out, mode="r")["data"]
        for k, item in enumerate(np.asarray(data[...])):
            time = int(index["mtime"][k])
            assert not current or time == self.now[k]
            version = self.versions[k][time]
            assert np.array_equal(item, np.full_like(item, np.nan) if version is None else version, equal_nan=True)
            assert (version is None) == bool(index.get("filled", [""] * ITEMS)[k])
            assert index["checksum"][k] == f"{targets.crc32c(np.ascontiguousarray(item)):08x}"
        assert fill or not current or "filled" not in index

    @invariant()
    def the_output_is_what_was_accepted(self) -> None:
        if hasattr(self, "out"):
            assert self.outputs() == self.published

    @invariant()
    def nothing_of_the_user_s_is_touched(self) -> None:
        if hasattr(self, "out"):
            assert {name: (self.folder / name).read_bytes() for name in self.mine} == self.mine

    @rule()
    def in_the_end_all_is_well(self) -> None:
        self.mend()
        self.run(restart=True, overwrite=True)
        assert self.outputs() is not None
        assert not self.leftovers()


def check(examples: int, steps: int) -> None:
    """Some random orders of all of this."""
    wanted = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Builds, settings=wanted)


def test_whatever_happens_in_whatever_order_the_output_is_right_or_absent() -> None:
    check(15, 12)


@pytest.mark.long
def test_the_same_of_many_orders() -> None:
    check(400, 20)
