"""From what people name to the ordered list of files."""

from __future__ import annotations

import os
import socket
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from conftest import few_descriptors

from daskstack import discover, open_stack
from daskstack.discover import scan
from daskstack.errors import SourceError, UsageError
from daskstack.readers import SUFFIXES


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def found(
    *sources: str | Path, in_order: tuple[str, ...] = (), suffixes: tuple[str, ...] | None = SUFFIXES
) -> list[str]:
    here = f"{os.getcwd()}/"
    listing = discover.find(sources, in_order=in_order, suffixes=suffixes)
    return [p.removeprefix(here) for p in listing.paths]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_folder_is_scanned_with_all_below_it(tmp_path: Path) -> None:
    touch(tmp_path / "d", "b10.tif", "b2.TIF", "sub/c1.tiff", "sub/deep/c.npy", "a.Tif")
    assert found("d") == ["d/a.Tif", "d/b2.TIF", "d/b10.tif", "d/sub/c1.tiff", "d/sub/deep/c.npy"]
    assert discover.find(["d"], suffixes=SUFFIXES).below[3:] == ["sub/c1.tiff", "sub/deep/c.npy"]
    assert found("d/") == found("d")
    assert found(tmp_path / "d") == found("d")


def test_a_scan_leaves_out_what_nobody_means_and_counts_it(tmp_path: Path) -> None:
    touch(
        tmp_path / "d",
        "a.tif",
        "._a.tif",
        ".hidden.tif",
        "Thumbs.db",
        "desktop.ini",
        "notes.txt",
        "a.tif~",
        "b.tif.tmp",
    )
    touch(tmp_path / "d", ".git/x.tif", "__MACOSX/x.tif", "@eaDir/x.tif", "old.zarr/x.tif")
    touch(tmp_path / "d", "out.npy.part/0123/manifest.json", "out.npy.part/0123/data.npy", "mine.part/x.tif")
    listing = discover.find(["d"], suffixes=SUFFIXES)
    assert [os.path.basename(p) for p in listing.paths] == ["a.tif", "x.tif"]  # x.tif in the user's own mine.part
    assert len(listing.left_out) == 12
    assert {"._a.tif", "Thumbs.db", "notes.txt", ".git/", "old.zarr/", "out.npy.part/"} <= set(listing.left_out)


def test_own_outputs_are_left_out_of_scans_and_patterns_but_taken_by_name(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for k in range(3):
        np.save(tmp_path / "d" / f"a{k}.npy", np.full((2, 3), k))
    open_stack("d", labels={"n": r"(\d)"}).to_npy("d/out.npy", progress=False)
    assert found("d") == ["d/a0.npy", "d/a1.npy", "d/a2.npy"]
    assert found("d/*.npy") == found("d")
    assert set(discover.find(["d"], suffixes=SUFFIXES).left_out) == {
        "out.npy", "out.n.npy", "out.npy.json", "out.npy.index.csv",
    }  # fmt: skip
    assert found("d/out.npy") == ["d/out.npy"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("d/*.tif", ["d/a1.tif", "d/a2.TIF", "d/b.tif"]),
        ("d/a?.tif", ["d/a1.tif", "d/a2.TIF"]),
        ("d/[ab]*.tif", ["d/a1.tif", "d/a2.TIF", "d/b.tif"]),
        ("d/a*", ["d/a1.tif", "d/a2.TIF", "d/a3.npy"]),
        ("d/*/*.tif", ["d/s1/c.tif", "d/s2/c.tif"]),
        ("d/s*/c.tif", ["d/s1/c.tif", "d/s2/c.tif"]),
        ("d/**/*.tif", ["d/a1.tif", "d/a2.TIF", "d/b.tif", "d/s1/c.tif", "d/s1/t/e.tif", "d/s2/c.tif"]),
        ("d/**/c.tif", ["d/s1/c.tif", "d/s2/c.tif"]),
        ("**/e.tif", ["d/s1/t/e.tif"]),
        ("d/s1/**", ["d/s1/c.tif", "d/s1/t/e.tif"]),
        ("d/s*", ["d/s1/c.tif", "d/s1/t/e.tif", "d/s2/c.tif"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, names: list[str]) -> None:
    touch(
        tmp_path / "d", "a1.tif", "a2.TIF", "a3.npy", "b.tif", "b.txt", ".a4.tif", "s1/c.tif", "s1/t/e.tif", "s2/c.tif"
    )
    assert found(pattern) == names
    assert found(tmp_path / pattern) == names


def test_a_pattern_begins_below_its_fixed_folder(tmp_path: Path) -> None:
    touch(tmp_path / "d", "cats/1.npy", "dogs/1.npy")
    assert discover.find(["d/*/*.npy"], suffixes=SUFFIXES).below == ["cats/1.npy", "dogs/1.npy"]


def test_a_path_that_exists_is_taken_literally(tmp_path: Path) -> None:
    touch(tmp_path, "a[1].tif", "a1.tif", "b[2]/x1.tif", "what?.tif", "star*.tif")
    assert found("a[1].tif") == ["a[1].tif"]
    assert found("b[2]") == ["b[2]/x1.tif"]
    assert found("b[2]/*.tif") == ["b[2]/x1.tif"]
    assert found("star*.tif") == ["star*.tif"]


def test_arguments_are_put_in_natural_order_and_taken_once(tmp_path: Path) -> None:
    touch(tmp_path, "a10.tif", "a2.tif", "d/a1.tif")
    assert found("a10.tif", "d", "a2.tif", "d/a1.tif", "*.tif") == ["a2.tif", "a10.tif", "d/a1.tif"]


def test_a_list_keeps_its_order_and_its_repeats(tmp_path: Path) -> None:
    touch(tmp_path, "1.tif", "2.tif", "10.tif", "d/2.tif", "d/1.tif")
    assert found(in_order=("10.tif", "1.tif", "1.tif", "d", "2.tif")) == [
        "10.tif", "1.tif", "1.tif", "d/1.tif", "d/2.tif", "2.tif",
    ]  # fmt: skip
    assert not discover.find([], in_order=("1.tif",), suffixes=SUFFIXES).natural


def test_files_named_one_by_one_begin_below_their_common_folder(tmp_path: Path) -> None:
    touch(tmp_path, "x/dogs/1.npy", "x/wolves/1.npy")
    assert discover.find(["x/dogs/1.npy", "x/wolves/1.npy"], suffixes=SUFFIXES).below == ["dogs/1.npy", "wolves/1.npy"]
    assert discover.find(["x/dogs/1.npy"], suffixes=SUFFIXES).below == ["1.npy"]


def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "d", *(f"t{k}.tif" for k in range(30)), *(f"s{k}/x.tif" for k in range(5)))
    before = found("d")
    real = scan._entries
    monkeypatch.setattr(scan, "_entries", lambda folder, report: [part[::-1] for part in real(folder, report)])
    assert found("d") == before


def test_links_are_followed_but_named_as_given(tmp_path: Path) -> None:
    touch(tmp_path / "store", "x.tif")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "b.tif").symlink_to(tmp_path / "store" / "x.tif")
    (tmp_path / "d" / "linked").symlink_to(tmp_path / "store")
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d")
    assert found("d") == ["d/b.tif", "d/linked/x.tif"]
    assert found("d/linked") == ["d/linked/x.tif"]


def test_sizes_and_times_are_those_of_the_files(tmp_path: Path) -> None:
    touch(tmp_path / "d", *(f"{k}.tif" for k in range(100)))
    os.utime(tmp_path / "d" / "7.tif", ns=(1, 1234567890123456789))
    (tmp_path / "d" / "8.tif").write_bytes(b"xyz")
    listing = discover.find(["d"], suffixes=SUFFIXES)
    assert listing.mtimes[7] == 1234567890123456789
    assert listing.sizes[7:9].tolist() == [1, 3]


def test_slow_stat_calls_are_made_on_threads_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "d", *(f"{k}.tif" for k in range(300)))
    (tmp_path / "d" / "299.tif").write_bytes(b"four")
    (tmp_path / "d" / "298.tif").unlink()
    (tmp_path / "d" / "298.tif").symlink_to("gone")
    expected: list[str] = []
    for slow in (discover.SLOW_STAT, -1.0):
        monkeypatch.setattr(discover, "SLOW_STAT", slow)
        with pytest.raises(SourceError) as caught:
            found("d")
        expected.append(str(caught.value))
    assert expected[0] == expected[1]
    assert "broken link" in expected[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "no such file or folder: 'nowhere'"),
        ("nowhere/*.tif", "no usable file matches 'nowhere/*.tif'"),
        ("A001.*.tif", "no usable file matches 'A001.*.tif'"),
        ("*.dat", "no usable file matches '*.dat' (left out: x.dat)"),
        ("empty", "no usable file in the folder 'empty'"),
        ("notes", "no usable file in the folder 'notes' (left out: .DS_Store, n.txt)"),
    ],
)
def test_a_source_that_gives_nothing_is_an_error_that_repeats_it(tmp_path: Path, source: str, message: str) -> None:
    touch(tmp_path, "x.dat", "A001_924360.tif", "notes/n.txt", "notes/.DS_Store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError) as caught:
        found("A001_924360.tif", source)
    assert caught.value.message.replace("n.txt, .DS_Store", ".DS_Store, n.txt") == message


def test_all_unusable_sources_come_in_one_report(tmp_path: Path) -> None:
    touch(tmp_path, "a.tif")
    (tmp_path / "b.tif").symlink_to("gone.tif")
    (tmp_path / "c.tif").symlink_to("c.tif")
    os.mkfifo(tmp_path / "f.tif")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("s.tif")
        with pytest.raises(SourceError) as caught:
            found("*.tif", "more")
    text = str(caught.value)
    assert text.startswith("5 sources cannot be used\n")
    for part in ("broken link", "b.tif -> gone.tif", "c.tif", "not a regular file", "f.tif", "s.tif", "'more'"):
        assert part in text
    assert "a.tif\n" not in text.replace("b.tif", "")


def test_urls_and_nothing_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'s3://bucket/x\.tif' is a URL"):
        found("s3://bucket/x.tif")
    with pytest.raises(UsageError, match="no source is given"):
        found()


def test_accents_are_found_however_they_are_spelled(tmp_path: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "é1.tif")
    touch(tmp_path / "d", decomposed)
    assert found("d/é1.tif") == [f"d/{decomposed}"]
    assert found("d/é*.tif") == [f"d/{decomposed}"]


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with open(os.path.join(os.fsencode(tmp_path), b"d", b"\xff1.tif"), "wb"):
        pass
    assert found("d") == ["d/\udcff1.tif"]


def test_with_a_reader_every_kind_of_file_is_taken(tmp_path: Path) -> None:
    touch(tmp_path / "d", "a.h5", "b.dat", "c", ".hidden", "Thumbs.db", "x.dat~", "y.part")
    assert found("d", suffixes=None) == ["d/a.h5", "d/b.dat", "d/c"]


def test_deep_folders_do_not_exhaust_descriptors(tmp_path: Path) -> None:
    deep = tmp_path / "d"
    for k in range(120):
        deep = deep / str(k)
    deep.mkdir(parents=True)
    (deep / "x.tif").write_bytes(b"x")
    with few_descriptors():
        assert len(found("d")) == 1
        assert len(found("d/**/*.tif")) == 1


def test_patterns_do_not_follow_links_in_circles(tmp_path: Path) -> None:
    touch(tmp_path / "d", "a.tif", "sub/b.tif")
    for folder in ("d", "d/sub"):
        (tmp_path / folder / "loop").symlink_to(tmp_path / "d")
        (tmp_path / folder / "here").symlink_to(".")
    assert found("d/**/*.tif") == found("d/**") == found("d") == ["d/a.tif", "d/sub/b.tif"]


def test_recursive_patterns_leave_out_own_outputs(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    np.save(tmp_path / "d" / "sub" / "a1.npy", np.zeros(3))
    open_stack("d", labels={"n": r"(\d)"}).to_npy("d/sub/out.npy", progress=False)
    for source in ("d/**", "**", "d/**/*.npy", "d/*/*.npy", "d/*/*.[nt].npy", "d/sub"):
        if source.endswith("[nt].npy"):
            with pytest.raises(SourceError, match=r"left out: out\.n\.npy"):
                found(source)
        else:
            assert found(source) == ["d/sub/a1.npy"]


def test_a_user_s_array_beside_a_record_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "a1.npy", np.zeros(3))
    open_stack("d").to_npy("d/out.npy", progress=False)
    np.save(tmp_path / "d" / "out.npy", np.zeros((5, 3)))
    assert found("d") == ["d/a1.npy", "d/out.npy"]


def test_very_deep_folders(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        for _ in range(1100):  # deeper than Python's stack; a path of 2,200 characters
            os.mkdir("d")
            os.chdir("d")
        Path("x.tif").touch()
        os.chdir(here)
        assert len(found("d")) == len(found("d/**")) == 1
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-r", "d"], check=True)  # Python's own rmtree does not go so deep


@pytest.mark.parametrize("source", ["", "a\0b"])
def test_names_that_no_file_can_have(source: str) -> None:
    with pytest.raises(UsageError, match="is no name of a file"):
        found(source)
