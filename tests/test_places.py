"""Where an output goes: modes under any umask, links that somebody planted, folders that take nothing."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Array, need_root, same
from faultkit import tree

from daskstack import build
from daskstack.errors import BadFilesError, NoSpaceError, OutputError
from daskstack.report import StoreReport
from daskstack.staging import place_in
from daskstack.targets import NpyTarget, Target, ZarrTarget

OPTIONS: dict[str, dict[str, Any]] = {
    "out.npy": {},
    "out.zarr": {"chunks": (1, 5, 7), "shards": (1, 5, 7)},
    "two.zarr": {"chunks": (1, 5, 7), "zarr_format": 2},
}


def run(out: str, **options: Any) -> StoreReport:
    """The frames, a block each."""
    return build("frames", out, files_per_block=1, progress=False, **OPTIONS[os.path.basename(out)], **options)


def kept(frames: Path, out: str, **options: Any) -> Path:
    """The staging folder of a build that met a bad file, which is good again."""
    path = frames / "img_3.tif"
    good, stamp = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(good)))
    with pytest.raises(BadFilesError, match="1 of 12 files is bad"):
        run(out, **options)
    path.write_bytes(good)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (folder,) = Path(f"{out}.part").iterdir()
    return folder


def modes(folder: Path) -> set[tuple[str, int]]:
    """The kinds and modes of all that is in a folder."""
    found = [path.lstat().st_mode for path in folder.rglob("*")]
    return {("folder" if stat.S_ISDIR(mode) else "file", 0o777 & stat.S_IMODE(mode)) for mode in found}


@pytest.fixture(params=[0o027, 0o077], ids=oct)
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_modes_are_those_of_the_umask(frames: Path, mask: int, name: str) -> None:
    """Of what is staged as well: members of a group may go on with each other's builds."""
    made = frames.parent / "made"
    made.mkdir()
    kept(frames, f"made/{name}", labels={"k": "3"})
    due = {("file", 0o666 & ~mask), ("folder", 0o777 & ~mask)}
    assert modes(made) == due
    run(f"made/{name}", labels={"k": "3"})
    assert modes(made) == (due if name != "out.npy" else {("file", 0o666 & ~mask)})


# -- links that somebody planted ---------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of somebody's, with files by the names that a staging folder has."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("manifest.json", "listing.npz", "lock", "publishing", "data.npy"):
        (folder / name).write_text("theirs")
    (folder / "receipts").mkdir()
    (folder / "replaced").mkdir()
    (folder / "replaced" / "mine").write_text("theirs")
    (folder / "data").mkdir()
    (folder / "data" / "c.0.0.0").write_text("theirs")
    return folder


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_a_link_in_the_place_of_the_folder_of_staging_folders(frames: Path, theirs: Path, name: str) -> None:
    before = tree(theirs)
    Path(f"{name}.part").symlink_to(theirs)
    with pytest.raises(OutputError, match=rf"{name}\.part is in the way: it is no folder"):
        build("frames", name, progress=False)
    with pytest.raises(OutputError, match=rf"{name}\.part is in the way: it is no folder"):
        build("frames", name, part="0/2", progress=False)
    assert tree(theirs) == before


@pytest.mark.parametrize("name", ["out.npy", "out.zarr"])
def test_a_link_in_the_place_of_a_staging_folder(frames: Path, theirs: Path, name: str) -> None:
    folder = kept(frames, name)
    folder.rename("real")
    folder.symlink_to(Path("real").absolute())
    before = tree(Path("real"))
    with pytest.raises(OutputError, match=r"is no staging folder of this build"):
        run(name)
    assert tree(Path("real")) == before
    assert folder.is_symlink()


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        *(("out.npy", n) for n in ("manifest.json", "listing.npz", "lock", "publishing", "data.npy", "receipts", "replaced")),
        *(("out.zarr", n) for n in ("receipts", "unfinished", "data.zarr", "data.zarr/data")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", [None, "0/1"])
def test_a_link_in_a_staging_folder(frames: Path, theirs: Path, name: str, planted: str, part: str | None) -> None:
    folder = kept(frames, name)
    if planted in ("data.npy", "receipts", "unfinished", "data.zarr", "data.zarr/data"):
        folder = Path(place_in(str(folder)))
    target = theirs / Path(planted).name
    if planted in ("unfinished", "data.zarr"):
        target.mkdir()
        (target / "data").mkdir()
    if (folder / planted).is_dir():
        shutil.rmtree(folder / planted)
    (folder / planted).unlink(missing_ok=True)
    (folder / planted).symlink_to(target, target_is_directory=target.is_dir())
    before, names = tree(theirs), sorted(theirs.rglob("*"))
    with pytest.raises(
        OutputError, match=r"is a link, which daskstack did not make|is no staging folder of this build"
    ):
        run(name, part=part)
    assert not Path(name).exists()
    assert tree(theirs) == before
    assert sorted(theirs.rglob("*")) == names
    assert (folder / planted).is_symlink()


def test_a_link_in_the_place_of_the_turn_of_parts(frames: Path, theirs: Path) -> None:
    before = tree(theirs)
    Path("out.npy.part").mkdir()
    Path("out.npy.part/turn").symlink_to(theirs / "lock")
    with pytest.raises(OutputError, match=r"^cannot write out\.npy\.part"):
        build("frames", "out.npy", part="0/2", progress=False)
    assert tree(theirs) == before


# -- folders that take nothing -----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for bytes, but for few files."""
    need_root("mounts a small file system")
    image_file, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    subprocess.run(["truncate", "-s", "16M", image_file], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-N", "32", "-O", "^has_journal", image_file], check=True)
    subprocess.run(["mount", "-o", "loop", str(image_file), str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def free_inodes(disk: Path) -> int:
    return os.statvfs(disk).f_favail


@pytest.mark.parametrize("free", [0, 1, 4, 9, 16])
def test_a_disk_that_takes_no_more_files_is_one_clear_error(
    frames: Path, expected: Array, disk: Path, free: int
) -> None:
    (disk / "fill").mkdir()
    while free_inodes(disk) > free:
        (disk / "fill" / f"{free_inodes(disk)}").touch()
    out = disk / "out.zarr"
    with pytest.raises(NoSpaceError) as caught:
        run(str(out), scheduler="synchronous")
    assert "the disk takes no more files, though it has 16.1 MB free" in str(caught.value)
    assert not out.exists()
    shutil.rmtree(disk / "fill")
    shutil.rmtree(disk / "lost+found")
    kept_blocks = "out.zarr.part" in os.listdir(disk)
    assert kept_blocks == (free == 16)
    shutil.rmtree(disk / "out.zarr.part", ignore_errors=True)
    build("frames", disk / "out.npy", progress=False)
    assert same(np.load(disk / "out.npy"), expected)


def test_a_read_only_disk(frames: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for name in ("out.npy", "out.zarr"):
        with pytest.raises(OutputError, match=rf"cannot write disk/{name}\.part: Read-only file system"):
            build("frames", disk / name, progress=False)


@pytest.mark.parametrize(("name", "target"), [("out.npy", NpyTarget), ("out.zarr", ZarrTarget)])
@pytest.mark.parametrize("at", [0, 7, 11])
def test_a_staging_folder_removed_at_any_block(
    frames: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: type[Target], at: int
) -> None:
    real = target.write

    def write(self: Target, folder: str, start: int, block: Array) -> None:
        if start == at:
            shutil.rmtree(os.path.dirname(folder))
        real(self, folder, start, block)

    monkeypatch.setattr(target, "write", write)
    with pytest.raises(OutputError, match=r"^cannot write .*: No such file or directory"):
        run(name, scheduler="synchronous")
    assert os.listdir(frames.parent) == ["frames"]


def test_nothing_predictable_is_made_in_shared_temporary_folders(frames: Path) -> None:
    """A build takes no temporary folder at all; the demonstration makes one of a random name, for its user alone."""
    shared = frames.parent / "tmp"
    shared.mkdir()
    script = (
        "import os, sys, tempfile\n"
        "made, folder = [], tempfile.gettempdir()\n"
        "sys.addaudithook(lambda event, args: made.append((event, args)) if event in ('open', 'os.mkdir') else None)\n"
        "from daskstack.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as exc:\n"
        "    assert not exc.code\n"
        "for event, args in made:\n"
        "    if str(args[0]).startswith(folder) and (event == 'os.mkdir' or args[2] & os.O_CREAT):\n"
        "        print(event, os.path.relpath(args[0], folder), oct(args[1]) if event == 'os.mkdir' else '')\n"
    )
    environment = {**os.environ, "TMPDIR": str(shared)}
    for arguments, most in ((["build", str(frames), "out.npy", "-q"], 0), (["demo", "--files", "64", "-q"], 1)):
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=frames.parent)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("open ", "os.mkdir "))]
        directly = [line for line in lines if "/" not in line[1]]
        assert len(directly) == most
        assert all(re.fullmatch(r"daskstack-demo-\w{8}", name) and mode == "0o700" for _, name, mode in directly)
    assert list(shared.iterdir()) == []
