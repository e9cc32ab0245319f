"""How an output gets its name: whole or not at all, and nothing of a user's lost, whatever happens in between."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Array, Run, image, published, same
from forkserver import python

from daskstack import build, files, open_stack, staging
from daskstack.errors import DaskstackError, OutputError, OutputExistsError
from daskstack.staging import locks
from daskstack.staging.root import size_of
from daskstack.targets import NpyTarget, crc32c

OUTPUT = ["out.k.npy", "out.npy", "out.npy.index.csv", "out.npy.json"]
LABELS = {"k": r"_(\d+)"}


def snapshot(folder: Path) -> dict[str, bytes]:
    left_out = {"frames", "out.npy.part"}
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not left_out & set(p.parts)}


def prepare(out: str = "out.npy", sources: str = "in") -> staging.Staging:
    stack = open_stack(sources)
    plan = stack.plan(out)
    return staging.prepare(plan.out, {"plan_id": plan.plan_id, "request": ""}, stack.listing, plan.target)


class Stopped(BaseException):
    """What a signal raises."""


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Let the step-th rename of the publication fail."""
    real, count = files.move_new, 0

    def move_new(source: str, target: str) -> None:
        nonlocal count
        if ".part" not in target:
            count += 1
            if count == step:
                raise error
        real(source, target)

    monkeypatch.setattr(files, "move_new", move_new)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), Stopped()], ids=["EIO", "signal"])
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_publication_that_fails_leaves_the_old_output_as_it_was(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException
) -> None:
    build("frames", "out.npy", labels=LABELS, limit=5, progress=False)
    before = snapshot(frames.parent)
    with monkeypatch.context() as patch:
        fail_at(patch, step, error)
        with pytest.raises((OutputError, Stopped)):
            build("frames", "out.npy", labels=LABELS, overwrite=True, progress=False)
    assert snapshot(frames.parent) == before
    assert published(frames.parent) == ["frames", *OUTPUT]
    build("frames", "out.npy", labels=LABELS, overwrite=True, progress=False)
    assert same(np.load("out.npy"), expected)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_first_publication_that_fails_leaves_nothing(
    frames: Path, expected: Array, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, step, OSError(5, "Input/output error"))
        with pytest.raises(OutputError):
            build("frames", "out.npy", labels=LABELS, progress=False)
    assert published(frames.parent) == ["frames"]
    build("frames", "out.npy", labels=LABELS, progress=False)
    assert same(np.load("out.npy"), expected)


KILLED = """
import os, signal, sys
from daskstack import build, files
step, count = int(sys.argv[1]), 0
real = os.rename
def kill(when):
    global count
    count += 1
    if count == step:
        os.kill(os.getpid(), signal.SIGKILL)
def rename(source, target):
    kill("aside")
    real(source, target)
os.rename = rename
move = files.move_new
def move_new(source, target):
    if ".part" not in target:
        kill("final")
    move(source, target)
files.move_new = move_new
build("frames", "out.npy", labels={"k": r"_(\\d+)"}, overwrite=True, progress=False)
"""


@pytest.mark.parametrize("same_plan", [False, True])
@pytest.mark.parametrize("step", range(1, 9))
def test_sigkill_at_each_step_of_a_replacement_loses_nothing(
    frames: Path, expected: Array, step: int, *, same_plan: bool
) -> None:
    build("frames", "out.npy", labels=LABELS, limit=None if same_plan else 5, progress=False)
    os.utime(frames / "img_5.tif", ns=(5, 5))
    before = snapshot(frames.parent)
    assert python("-c", KILLED, step).returncode == -signal.SIGKILL
    assert not Path("out.npy").exists() or len(np.load("out.npy")) in (5, 12)
    # A run that cannot finish puts back what the killed one had set aside.
    data = (frames / "img_3.tif").read_bytes()
    found = os.stat(frames / "img_3.tif")
    (frames / "img_3.tif").write_bytes(b"")
    with pytest.raises(OutputError, match="1 file changed since it was stored"):
        build("frames", "out.npy", labels=LABELS, overwrite=True, progress=False)
    assert snapshot(frames.parent) == before
    (frames / "img_3.tif").write_bytes(data)
    os.utime(frames / "img_3.tif", ns=(found.st_atime_ns, found.st_mtime_ns))
    build("frames", "out.npy", labels=LABELS, overwrite=True, progress=False)
    assert same(np.load("out.npy"), expected)
    assert sorted(os.listdir(frames.parent)) == ["frames", *OUTPUT]


def test_sigkill_after_publication_leaves_a_finished_output(frames: Path, expected: Array) -> None:
    script = KILLED.replace("step, count =", "step, count = 99, 0;_ =").replace(
        "build(",
        "import daskstack.staging as s\ns.remove = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\nbuild(",
    )
    assert python("-c", script, 1).returncode == -signal.SIGKILL
    assert same(np.load("out.npy"), expected)
    assert build("frames", "out.npy", labels=LABELS, progress=False).was_there
    assert sorted(os.listdir(frames.parent)) == ["frames", *OUTPUT]
    os.utime(frames / "img_3.tif", ns=(1, 1))
    build("frames", "out.npy", labels=LABELS, overwrite=True, progress=False)
    assert sorted(os.listdir(frames.parent)) == ["frames", *OUTPUT]


def while_reading(act: Callable[[], object]) -> Callable[[str], Array]:
    def read(path: str) -> Array:
        if path.endswith("t1.npy"):
            act()
        return np.asarray(np.load(path))

    return read


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """t0.npy to t3.npy in a folder ``in`` of the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for k in range(4):
        np.save(tmp_path / "in" / f"t{k}.npy", image(k))
    return tmp_path


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["out.npy", "out.k.npy", "out.npy.json"])
def test_a_user_s_file_that_arrives_during_the_build_is_kept(arrays: Path, name: str, *, overwrite: bool) -> None:
    if overwrite:
        build("in", "out.npy", labels={"k": r"(\d)"}, progress=False)
    before = snapshot(arrays)

    def save() -> None:
        Path("mine").write_bytes(b"mine")
        os.replace("mine", name)

    with pytest.raises(OutputExistsError, match="was not touched"):
        build("in", "out.npy", labels={"k": r"(\d)"}, reader=while_reading(save), overwrite=overwrite, progress=False)
    assert Path(name).read_bytes() == b"mine"
    assert snapshot(arrays) == {**before, str(arrays / name): b"mine"}


def test_a_foreign_record_deletes_nothing(arrays: Path) -> None:
    for folder in ("given", "precious"):
        (arrays / folder).mkdir()
        (arrays / folder / "thesis.txt").write_bytes(b"years of work")
    entry = {"bytes": 13, "crc32c": crc32c(b"years of work")}
    names = ["../precious/thesis.txt", "thesis.txt", str(arrays / "precious" / "thesis.txt")]
    record: dict[str, Any] = {"plan_id": "x", "labels": [], "files": dict.fromkeys(names, entry)}
    checksum = f"{crc32c(json.dumps(record, sort_keys=True).encode()):08x}"
    for text in ({"daskstack": record}, {"daskstack": record, "crc32c": checksum}):
        Path("given/out.npy.json").write_text(json.dumps(text))
        before = snapshot(arrays)
        with pytest.raises(OutputExistsError):
            build("in", "given/out.npy", progress=False)
        assert snapshot(arrays) == before
    build("in", "given/out.npy", overwrite=True, progress=False)
    assert [p.read_bytes() for p in arrays.rglob("thesis.txt")] == [b"years of work"] * 2


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"daskstack": 5}', b'{"daskstack": {"files": {"a": 5}}}', b"\xff"])
def test_a_damaged_record_is_a_user_s_file(arrays: Path, daskstack: Run, content: bytes) -> None:
    Path("out.npy.json").write_bytes(content)
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match=r"out\.npy\.json exists and was not made by daskstack"):
            build("in", "out.npy", overwrite=overwrite, progress=False)
    np.save("out.npy", image(0))
    assert daskstack("info", "out.npy").stdout.startswith("files   1 in out.npy (")


def test_a_pipe_in_the_place_of_a_record_does_not_hang(arrays: Path) -> None:
    os.mkfifo("out.npy.json")
    with pytest.raises(OutputExistsError):
        build("in", "out.npy", progress=False)
    np.save("out.npy", image(0))
    assert len(open_stack(".")) == 5


def test_a_record_that_was_edited_is_not_overwritten(arrays: Path) -> None:
    build("in", "out.npy", progress=False)
    text = Path("out.npy.json").read_text().replace('"join": "stack"', '"join": "stack", "note": "my own"')
    Path("out.npy.json").write_text(text)
    with pytest.raises(OutputExistsError):
        build("in", "out.npy", limit=2, overwrite=True, progress=False)
    assert Path("out.npy.json").read_text() == text


def test_side_files_of_an_array_that_was_moved_away_are_kept(arrays: Path) -> None:
    build("in", "out.npy", labels={"k": r"(\d)"}, progress=False)
    os.rename("out.npy", "kept.npy")
    before = snapshot(arrays)
    with pytest.raises(
        OutputExistsError, match=r"out\.npy\.json exists and belongs to an output that is gone; it was not touched"
    ):
        build("in", "out.npy", labels={"k": r"(\d)"}, limit=2, progress=False)
    assert snapshot(arrays) == before


def test_an_old_label_that_is_an_input_is_not_deleted(arrays: Path) -> None:
    build("in", "out.npy", labels={"k": r"(\d)"}, progress=False)
    np.save("other.npy", np.load("out.k.npy"))
    before = snapshot(arrays)
    with pytest.raises(OutputExistsError, match=r"out\.k\.npy is one of the inputs"):
        build(["out.k.npy", "other.npy"], "out.npy", overwrite=True, progress=False)
    assert snapshot(arrays) == before


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_finished_output_without_all_its_files_is_not_finished(arrays: Path, damage: str) -> None:
    build("in", "out.npy", labels={"k": r"(\d)"}, progress=False)
    if damage == "missing":
        os.unlink("out.k.npy")
        with pytest.raises(OutputExistsError, match=r"out\.npy exists and its out\.k\.npy is missing or was changed"):
            build("in", "out.npy", labels={"k": r"(\d)"}, progress=False)
        build("in", "out.npy", labels={"k": r"(\d)"}, overwrite=True, progress=False)
        assert np.load("out.k.npy").tolist() == [0, 1, 2, 3]
    else:
        Path("out.npy.index.csv").write_text(Path("out.npy.index.csv").read_text().replace("t1", "t9"))
        with pytest.raises(OutputExistsError):
            build("in", "out.npy", labels={"k": r"(\d)"}, progress=False)


def test_a_user_s_empty_folder_beside_the_output_stays(arrays: Path) -> None:
    (arrays / "out.npy.part").mkdir()
    build("in", "out.npy", progress=False)
    assert (arrays / "out.npy.part").is_dir()


# -- two runs ---------------------------------------------------------------------------------------------------


def test_a_second_run_of_a_live_build_is_refused_and_names_it(arrays: Path) -> None:
    met: list[str] = []

    def again() -> None:
        with pytest.raises(OutputError) as caught:
            build("in", "out.npy", progress=False)
        met.append(str(caught.value))

    real = NpyTarget.write

    def write(self: NpyTarget, folder: str, start: int, block: Array) -> None:
        if not met:
            again()
        real(self, folder, start, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NpyTarget, "write", write)
        build("in", "out.npy", scheduler="synchronous", progress=False)
    assert f"is held by another run of this build ({os.uname().nodename}, pid {os.getpid()}, since 20" in met[0]
    assert same(np.load("out.npy"), np.stack([image(k) for k in range(4)]))
    assert sorted(os.listdir(arrays)) == ["in", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_many_runs_at_once_make_one_right_output(arrays: Path) -> None:
    command = [sys.executable, "-m", "daskstack", "build", "in", "out.npy"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    outcomes = [(run.communicate(timeout=120), run.returncode) for run in runs]
    assert 0 in [status for _, status in outcomes]
    for (_, stderr), status in outcomes:
        assert status == 0 or (status == 1 and "is held by another run of this build" in stderr)
    assert same(np.load("out.npy"), np.stack([image(k) for k in range(4)]))
    assert sorted(os.listdir(arrays)) == ["in", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_losing_the_race_to_the_same_build_is_success(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = NpyTarget.finish

    def finish(self: NpyTarget, folder: str, out: str, index: Any) -> list[tuple[str, str]]:
        moves = real(self, folder, out, index)
        for source, final in moves:  # another host, say, was faster
            Path(final).write_bytes(Path(source).read_bytes())
        return moves

    monkeypatch.setattr(NpyTarget, "finish", finish)
    assert build("in", "out.npy", progress=False).files == 0
    assert sorted(os.listdir(arrays)) == ["in", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_what_killed_runs_left_under_random_names_is_swept(arrays: Path) -> None:
    for name, inner in (("0" * 32, "a" * 32), ("1" * 32, "thesis"), ("g" * 32, "a" * 32)):
        place = arrays / "out.npy.part" / f".{name}" / inner
        place.mkdir(parents=True)
        (place.parent / "lock").touch()
        (place / "data.npy").write_bytes(bytes(1000))
    build("in", "out.npy", progress=False)
    # What holds anything else, or has a name of another form, is a user's.
    assert sorted(os.listdir(arrays / "out.npy.part")) == [f".{'1' * 32}", f".{'g' * 32}"]


def test_a_killed_run_s_room_counts_for_the_next(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = open_stack("in").plan("out.npy")
    os.close(prepare().lock)
    taken = size_of(plan.out, plan.plan_id)
    assert taken >= plan.target.size
    monkeypatch.setattr("daskstack.files.free_space", lambda _: max(0, plan.need - taken))
    build("in", "out.npy", progress=False)
    assert same(np.load("out.npy"), np.stack([image(k) for k in range(4)]))


def test_names_too_long_for_the_folder_are_refused_before_anything_is_read(arrays: Path) -> None:
    for out, labels in (("x" * 245 + ".npy", None), ("out.npy", {"y" * 250: r"t(\d)"})):
        with pytest.raises(OutputError, match="is longer than the 255 bytes that its folder takes"):
            build("in", out, labels=labels, progress=False)
        assert os.listdir(arrays) == ["in"]


def test_the_output_goes_where_a_link_leads(arrays: Path) -> None:
    (arrays / "deep" / "er").mkdir(parents=True)
    (arrays / "link").symlink_to("deep/er")
    build("in", "link/../out.npy", progress=False)
    assert (arrays / "deep" / "out.npy").is_file()
    assert not (arrays / "out.npy").exists()


# -- what the run leans on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_will_do(arrays: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    build("in", "out.npy", progress=False)
    assert same(np.load("out.npy"), np.stack([image(k) for k in range(4)]))
    assert sorted(os.listdir(arrays)) == ["in", "out.npy", "out.npy.index.csv", "out.npy.json"]


def test_the_lock_of_a_folder_that_was_made_anew_is_not_taken_for_its_own(arrays: Path) -> None:
    """A lock file may be opened, its folder removed and made anew by another run, before it is locked."""
    first = prepare()
    real = locks.locked
    again: list[staging.Staging] = []

    def locked(folder: str, *, shared: bool = False) -> int:
        if not again and folder == first.folder:
            old = os.open(os.path.join(folder, locks.LOCK), os.O_RDWR)
            staging.remove(first, published=False)
            with pytest.MonkeyPatch.context() as undone:
                undone.setattr(locks, "locked", real)
                again.append(prepare())
            return old
        return real(folder, shared=shared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "locked", locked)
        with pytest.raises(OutputError, match="is held by another run"):
            prepare()
    staging.remove(again[0], published=False)


def test_builds_in_threads_and_other_computations_leave_each_other_alone(arrays: Path) -> None:
    import dask.array as da

    def compute(_: int) -> float:
        return float(da.ones(1000, chunks=10).sum().compute(scheduler="threads"))

    def one(k: int) -> int:
        return build("in", f"out{k}.npy", progress=False).files

    with ThreadPoolExecutor(4) as pool:
        builds = [pool.submit(one, k) for k in range(8)]
        sums = [pool.submit(compute, k) for k in range(8)]
        assert [b.result() for b in builds] == [4] * 8
        assert [s.result() for s in sums] == [1000.0] * 8
    for k in range(8):
        assert same(np.load(f"out{k}.npy"), np.stack([image(i) for i in range(4)]))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "there is not enough memory for a block"),
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
    ],
)
def test_what_is_no_file_s_fault_is_not_blamed_on_one(arrays: Path, error: Exception, message: str) -> None:
    def read(path: str) -> Array:
        if path.endswith("t1.npy"):
            raise error
        return np.asarray(np.load(path))

    with pytest.raises(DaskstackError, match=message):
        build("in", "out.npy", reader=read, progress=False)
    assert published(arrays) == ["in"]


def test_a_stderr_that_can_only_write_will_do(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shim:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", shim := Shim())
    build("in", "out.npy")
    assert shim.text.startswith("100%  4/4 files  ")
