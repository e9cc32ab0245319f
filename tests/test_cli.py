"""What people read and what scripts get: texts, streams and exit statuses."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from conftest import Array, Run, image, same

import daskstack as package


def test_build(frames: Path, expected: Array, daskstack: Run) -> None:
    done = daskstack("build", "frames", "out.npy", "--labels", r"img_(?P<k>\d+)")
    assert done.returncode == 0
    assert done.stdout.splitlines()[1:] == [
        "      out.npy.index.csv (row to file)",
        "      out.npy.json (how it was made)",
        "      out.k.npy (label)",
        'read  np.load("out.npy", mmap_mode="r")',
    ]
    assert re.fullmatch(
        r"100%  12/12 files  840 B  \d+\.\d\d [GM]B/s  bad 0  left 0\.\d s  [\d,]+ files/s  12/12 blocks\n", done.stderr
    )
    assert same(np.load("out.npy"), expected)
    assert np.load("out.k.npy").tolist() == list(range(12))
    again = daskstack("build", "frames", "out.npy", "--labels", r"img_(?P<k>\d+)")
    assert again.returncode == 0
    assert "done  out.npy (12, 5, 7) uint16, 840 B: it was there already, made from these files\n" in again.stdout


def test_each_command_in_an_interpreter_of_its_own(frames: Path) -> None:
    """What the other tests fork has imported more than a command does by itself."""
    package.build("frames", "made.zarr", progress=False)
    for arguments, says in (
        ("plan frames out.npy", "Nothing was written."),
        ("build frames out.npy", "done  out.npy (12, 5, 7)"),
        ("build frames out.zarr", "done  out.zarr (12, 5, 7)"),
        ("info made.zarr", "array   (item 12, y 5, x 7)"),
        ("verify made.zarr --data --inputs", "equal"),
    ):
        command = [sys.executable, "-m", "daskstack", *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout


def test_the_second_user_s_task_in_one_line(tmp_path: Path, daskstack: Run) -> None:
    (tmp_path / "in").mkdir()
    names = ["b.npy", "a.npy", "cab.npy", "dd.npy"]
    for k, name in enumerate(names):
        np.save(tmp_path / "in" / name, image(k))
    assert daskstack("build", "in", "inputs.npy", "--label", "target=a", "-q", cwd=tmp_path).returncode == 0
    inputs, target = np.load(tmp_path / "inputs.npy"), np.load(tmp_path / "inputs.target.npy")
    assert [int(i[0, 0]) // 100 for i in inputs] == [1, 0, 2, 3]
    assert target.tolist() == [True, False, True, False]


def test_plan_writes_nothing(frames: Path, daskstack: Run) -> None:
    (frames / "notes.txt").touch()
    for command in (["plan", "frames", "out.npy"], ["build", "--dry-run", "frames", "out.npy"]):
        done = daskstack(*command)
        assert done.returncode == 0
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[0].startswith("files   12 in frames (")
        assert lines[0].endswith("; left out: notes.txt")
        assert lines[1:3] == [
            "order   natural: img_0.tif, img_1.tif, img_2.tif ... img_11.tif",
            "array   (item 12, y 5, x 7) uint16, 840 B; item from img_0.tif",
        ]
        assert lines[3].startswith("work    12 blocks of 1 file, ")
        assert lines[4].startswith("disk    840 B in 3 files; free ")
        assert re.fullmatch(r"time    about 0\.\d s \(reading 12 files: [\d,]+ files/s\)", lines[5])
        assert lines[6:] == ["Nothing was written. --check reads every header first."]
        assert all(len(line) <= 80 for line in lines)
    assert sorted(os.listdir(frames.parent)) == ["frames"]


def test_plan_tells_of_bad_files_that_it_meets(frames: Path, daskstack: Run) -> None:
    (frames / "img_3.tif").write_bytes(b"")
    tifffile.imwrite(frames / "img_11.tif", image(0, (5, 6)), photometric="minisblack")
    done = daskstack("plan", "frames", "out.npy")
    assert done.returncode == 1
    assert done.stdout.startswith("files   12 in frames (")
    assert done.stderr.splitlines() == [
        "error: 2 bad files among those looked at; nothing was written",
        "  frames/img_3.tif  empty file (0 bytes)",
        "  frames/img_11.tif  found (5, 6) uint16, due (5, 7) uint16",
        "next  mend or leave out these files",
    ]


def test_bad_files(frames: Path, daskstack: Run) -> None:
    (frames / "img_3.tif").write_bytes(b"")
    tifffile.imwrite(frames / "img_11.tif", image(0, (5, 6)), photometric="minisblack")
    done = daskstack("build", "frames", "out.npy")
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    (bad_list,) = Path().glob("out.npy.part/*/bad.csv")
    assert lines[0] == "bad   frames/img_3.tif  empty file (0 bytes)"
    assert lines[1].startswith("100%  12/12 files  ")
    assert "  bad 2  " in lines[1]
    assert lines[2:] == [
        "error: 2 of 12 files are bad; out.npy not made, 10 of 12 blocks kept",
        "  frames/img_3.tif  empty file (0 bytes)",
        "  frames/img_11.tif  found (5, 6) uint16, due (5, 7) uint16",
        f"list  {bad_list}",
        "next  mend them, same command (reads only 2 blocks again); or --on-error fill",
    ]
    assert bad_list.read_text() == (
        f"file,problem\n{frames}/img_3.tif,empty file (0 bytes)\n"
        f'{frames}/img_11.tif,"found (5, 6) uint16, due (5, 7) uint16"\n'
    )


def test_many_bad_files_are_counted(tmp_path: Path, daskstack: Run) -> None:
    (tmp_path / "in").mkdir()
    for k in range(40):
        np.save(tmp_path / "in" / f"{k}.npy", image(k, dtype="uint16" if k < 10 else "uint8"))
    lines = daskstack("build", "in", "out.npy", cwd=tmp_path).stderr.splitlines()
    report = lines[next(k for k, line in enumerate(lines) if line.startswith("error: ")) :]
    assert report[0] == "error: 30 of 40 files are bad; out.npy not made, 10 of 40 blocks kept"
    assert len(report) == 24
    assert report[21] == "  and 10 more"
    assert re.fullmatch(r"list  out\.npy\.part/[0-9a-f]{16}/bad\.csv", report[22])
    assert len((tmp_path / report[22][6:]).read_text().splitlines()) == 31
    assert report[23] == "next  mend them, same command (reads only 30 blocks again); or --on-error fill"
    verbose = daskstack("build", "in", "out.npy", "--verbose", cwd=tmp_path).stderr
    assert all(verbose.count(f"in/{k}.npy  found") >= 1 for k in range(10, 40))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["build"], 2, "Missing argument 'SRC... OUT'"),
        (["build", "out.npy"], 2, "error: 'out.npy' alone: sources and an output are due"),
        (["build", "frames", "out"], 2, "error: the output '"),
        (["build", "frames", "out.npy", "--threads", "0"], 2, "0 is not in the range x>=1"),
        (["build", "frames", "out.npy", "--join", "cat"], 2, "'cat' is not one of 'stack', 'concat'"),
        (
            ["build", "frames", "out.npy", "--label", "target"],
            2,
            "error: --label target has no =\nnext  write it as NAME=REGEX",
        ),
        (
            ["build", "frames", "out.npy", "--label", "a=b", "--label", "a=c"],
            2,
            "error: --label gives a name twice: a, a",
        ),
        (["build", "frames", "out.npy", "--label", "a=b", "--labels", "c"], 2, "error: --labels and --label are both"),
        (["build", "frames", "out.npy", "--labels", "("], 2, "error: labels: '(' is not a regular expression"),
        (["build", "frames", "out.npy", "--sort-by", "t"], 2, "error: sort_by='t': there is no such label"),
        (["build", "frames", "out.npy", "--memory-limit", "1 B"], 2, "error: memory_limit=1 B: one block takes 210 B"),
        (["build", "https://a/b.tif", "out.npy"], 2, "error: 'https://a/b.tif' is a URL"),
        (["build", "nowhere", "out.npy"], 1, "error: no such file or folder: 'nowhere'"),
        (["build", "*.dat", "out.npy"], 1, "error: no usable file matches '*.dat'"),
        (
            ["build", "frames", "nowhere/out.npy"],
            1,
            "error: there is no folder nowhere\nnext  make it: mkdir -p nowhere",
        ),
        (
            ["build", "frames", "taken.npy"],
            1,
            "error: taken.npy exists and was not made by daskstack; it was not touched",
        ),
        (
            ["plan", "frames", "taken.npy"],
            1,
            "error: taken.npy exists and was not made by daskstack; it was not touched",
        ),
        (["build", "frames/img_3.tif", "frames/img_3.tif"], 2, "has no known suffix"),
        (["build", "frames", "out.npy", "--labels", r"(?P<t>\d\d\d)"], 1, "error: 12 of 12 files do not match"),
        (["build", "--files-from", "nowhere", "out.npy"], 2, "error: --files-from nowhere: No such file or directory"),
        (["info", "nowhere"], 1, "error: no such file or folder: 'nowhere'"),
        (["nonsense"], 2, "No such command 'nonsense'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_get_one_message(
    frames: Path, daskstack: Run, arguments: list[str], status: int, message: str
) -> None:
    (frames.parent / "taken.npy").write_bytes(b"mine")
    done = daskstack(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(frames.parent)) == ["frames", "taken.npy"]
    assert (frames.parent / "taken.npy").read_bytes() == b"mine"


def test_debug_shows_the_traceback(frames: Path, daskstack: Run) -> None:
    done = daskstack("build", "nowhere", "out.npy", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "daskstack.errors.SourceError: no such file or folder: 'nowhere'" in done.stderr


@pytest.mark.parametrize("by_stdin", [False, True])
def test_files_from_a_list_keep_their_order(frames: Path, expected: Array, daskstack: Run, *, by_stdin: bool) -> None:
    text = "frames/img_10.tif\nframes/img_2.tif\r\n\nframes/img_2.tif\n"
    Path("list.txt").write_text(text, newline="")
    if by_stdin:
        done = daskstack("build", "--files-from", "-", "out.npy", stdin=text)
    else:
        done = daskstack("build", "--files-from", "list.txt", "out.npy")
    assert done.returncode == 0
    assert same(np.load("out.npy"), expected[[10, 2, 2]])
    mixed = daskstack("build", "frames/img_11.tif", "frames/img_9.tif", "--files-from", "list.txt", "mixed.npy")
    assert mixed.returncode == 0
    assert same(np.load("mixed.npy"), expected[[9, 11, 10, 2, 2]])


def test_arguments_of_the_shell_are_put_in_natural_order(frames: Path, expected: Array, daskstack: Run) -> None:
    names = sorted(f"frames/{p.name}" for p in frames.iterdir())  # as a shell expands frames/*
    assert daskstack("build", *names, "out.npy").returncode == 0
    assert same(np.load("out.npy"), expected)


def test_overwrite_and_limit(frames: Path, expected: Array, daskstack: Run) -> None:
    assert daskstack("build", "frames", "out.npy", "--limit", "3").returncode == 0
    refused = daskstack("build", "frames", "out.npy")
    assert refused.returncode == 1
    assert refused.stderr == (
        "error: out.npy exists and was made from other files or with other options; it was not touched\n"
        "next  choose another OUT, or --overwrite it\n"
    )
    assert daskstack("build", "frames", "out.npy", "--overwrite").returncode == 0
    assert same(np.load("out.npy"), expected)


def test_quiet_says_nothing_but_errors(frames: Path, daskstack: Run) -> None:
    done = daskstack("build", "frames", "out.npy", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (frames / "img_3.tif").write_bytes(b"")
    done = daskstack("build", "frames", "other.npy", "-q")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 1 of 12 files is bad; other.npy not made, 11 of 12 blocks kept\n")


def test_what_was_left_out_is_counted(frames: Path, daskstack: Run) -> None:
    for name in ("notes.txt", ".hidden", "Thumbs.db"):
        (frames / name).touch()
    done = daskstack("build", "frames", "out.npy")
    assert "      from 12 files; 3 left out\n" in done.stdout
    assert "left out: 3 (" in daskstack("plan", "frames", "other.npy").stdout


def test_a_gap_is_a_warning(frames: Path, daskstack: Run) -> None:
    (frames / "img_3.tif").unlink()
    done = daskstack("build", "frames", "out.npy", "--labels", r"_(?P<t>\d+)")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: label t counts from 0 to 11 without 3\n")


def test_info(frames: Path, daskstack: Run) -> None:
    stack = daskstack("info", "frames")
    assert stack.returncode == 0
    assert stack.stdout.startswith("files   12 in frames (")
    for out in ("out.npy", "out.zarr"):
        daskstack("build", "frames", out, "--label", "one=1", "--limit", "5", "-q")
        lines = daskstack("info", out).stdout.splitlines()
        assert lines[0] == f"array   (item 5, y 5, x 7) uint16, 350 B in {out}"
        assert "".join(line.strip() for line in lines[1:3]).startswith("from    frames, below")
        assert "labels  one" in lines
        assert "options labels {'one': '1'}, items 5 of 12" in lines
        assert " by daskstack " in "".join(lines)
    np.save("mine.npy", image(0))
    assert daskstack("info", "mine.npy").stdout.startswith("files   1 in mine.npy (")


def test_version_and_help(daskstack: Run) -> None:
    assert daskstack("--version").stdout == f"daskstack {package.__version__}\n"
    for command in ([], ["plan"], ["build"], ["info"], ["preview"], ["demo"]):
        text = daskstack(*command, "--help").stdout
        assert text.startswith("Usage: daskstack ")
        assert all(len(line) <= 80 for line in text.splitlines())


def test_a_reader_of_the_output_that_goes_away_is_no_trouble(frames: Path) -> None:
    command = f"{sys.executable} -m daskstack plan frames out.npy | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_names_that_disturb_a_terminal_are_escaped(tmp_path: Path, daskstack: Run) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a\x1b[31m\n.npy", image(0))
    with open(os.path.join(os.fsencode(tmp_path), b"in", b"b\xff.npy"), "wb") as f:
        np.save(f, image(1))
    plan = daskstack("plan", "in", "out.npy", cwd=tmp_path)
    assert r"natural: a\x1b[31m\n.npy, b\udcff.npy" in plan.stdout
    assert daskstack("build", "in", "out.npy", cwd=tmp_path).returncode == 0
    assert same(np.load(tmp_path / "out.npy"), np.stack([image(0), image(1)]))
    index = (tmp_path / "out.npy.index.csv").read_bytes()
    assert b"b\xff.npy" in index


def in_terminal(*arguments: str, **environment: str) -> str:
    """What a command shows in a terminal of 80 columns."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "daskstack", *arguments],
        stderr=follower,
        stdout=follower,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm", **environment},
    )
    os.close(follower)
    text = b""
    with contextlib.suppress(OSError):  # of a terminal that nobody holds open any more
        while part := os.read(leader, 4096):
            text += part
    os.close(leader)
    child.wait(60)
    return text.decode()


def test_a_bar_in_a_terminal(frames: Path) -> None:
    """In a terminal of 80 columns the bar is redrawn in place, and no line is longer."""
    text = re.sub("\x1b\\[[0-9;]*[mA]", "", in_terminal("build", "frames", "out.npy"))
    assert "done  out.npy (12, 5, 7) uint16, 840 B in " in text
    drawn = [d for d in text.replace("\n", "\r").split("\r") if d.strip()]
    assert any(
        re.match(r"\s*\d+% \|#*[ #]*\| [\d,]+/12 files  \d+ B  \d+\.\d\d [GM]B/s  bad 0  left ", d) for d in drawn
    )
    assert all(len(d.rstrip()) <= 80 for d in drawn)


def test_demo(daskstack: Run) -> None:
    done = daskstack("demo", "--files", "100")
    assert done.returncode == 0
    assert "both equal a loop over tifffile.imread, item by item; labels in the same order" in done.stdout
    for name in ("frames.npy", "frames.zarr"):
        assert f"$ daskstack build frames {name} --labels" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "2>&1 >out.txt | true", ">&-", ">/dev/full", "| true"])
def test_nobody_to_hear_of_it_is_no_reason_to_stop(frames: Path, expected: Array, redirect: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m daskstack build frames out.npy {redirect}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, env=buffered)
    assert done.returncode == 0
    assert same(np.load("out.npy"), expected)


def run_here(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """A command in this process: what it prints on stdout and on stderr."""
    from daskstack.cli import main

    main(arguments, standalone_mode=False)
    return capfd.readouterr()


def test_results_as_json(frames: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (frames / "notes.txt").touch()
    labels = ("--labels", r"img_(?P<k>\d+)")
    array = {"shape": [12, 5, 7], "dtype": "<u2", "nbytes": 840, "labels": ["k"]}
    stack = json.loads(run_here(capfd, "info", "frames", *labels, "--json")[0])
    assert stack.items() >= (array | {"files": 12, "dims": ["item", "y", "x"], "left_out": ["notes.txt"]}).items()
    assert (stack["first"], stack["last"], stack["order"]) == ("img_0.tif", "img_11.tif", "natural")
    plan = json.loads(run_here(capfd, "plan", "frames", "out.npy", *labels, "--json", "--check")[0])
    out = os.path.abspath("out.npy")
    assert plan.items() >= (array | {"out": out, "files": 12, "blocks": 12, "overwrite": False}).items()
    assert plan["final_names"][-1] == out
    done, progress = run_here(capfd, "build", "frames", "out.npy", *labels, "--json")
    report = json.loads(done)
    del array["labels"]
    assert report.items() >= (array | {"out": out, "files": 12, "read": 12, "left_out": 1, "complete": True}).items()
    assert report["side_files"] == [os.path.abspath(f"out.{name}") for name in ("npy.json", "npy.index.csv", "k.npy")]
    assert progress.startswith("100%  12/12 files")
    record = json.loads(run_here(capfd, "info", "out.npy", "--json")[0])
    assert record == {"out": out, **json.loads(Path("out.npy.json").read_text())["daskstack"]}
    assert record["plan_id"] == plan["plan_id"]
    again = json.loads(run_here(capfd, "build", "frames", "out.npy", *labels, "--json")[0])
    assert (again["was_there"], again["read"]) == (True, 0)


def test_a_command_leaves_no_handler_of_its_stderr(frames: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger, due = logging.getLogger("daskstack"), "resuming: "
    (frames / "img_3.tif").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(SystemExit):
            run_here(capfd, "build", "frames", "out.npy")
        assert logger.handlers == []
    assert due in capfd.readouterr().err


def test_preview(frames: Path, capfd: pytest.CaptureFixture[str]) -> None:
    caption = "3 of 12 items, black 0.52, white 1133 (percentiles 0.5 and 99.5 of what is shown)"
    lines = run_here(capfd, "preview", "frames", "-n", "3")[0].splitlines()
    assert " ".join(map(str.strip, lines)) == f"done    preview.png: {caption}"
    assert all(len(line) <= 80 for line in lines)
    assert Path("preview.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    package.build("frames", "out.zarr", progress=False)
    done = run_here(capfd, "preview", "out.zarr", "-o", "out.png", "-n", "3")[0]
    assert " ".join(done.split()) == f"done out.png: {caption}"
    assert Path("out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_completion_of_commands_and_options() -> None:
    line = re.search(r'^ *eval "\$\((.*)\)"$', (Path(__file__).parents[1] / "README.md").read_text(), re.MULTILINE)
    assert line is not None
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = f"""
    eval "$({line[1]})"
    for word in pl "plan --che" "build fra"; do
        COMP_WORDS=(daskstack $word) COMP_CWORD=$(wc -w <<<$word) COMPREPLY=()
        compopt() {{ echo $*; }}
        _daskstack_completion daskstack
        echo ${{COMPREPLY[@]}}
    done
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert (done.stdout, done.stderr) == ("plan\n--check\n-o default\n\n", "")


def test_colours_are_for_terminals_that_want_them(frames: Path, daskstack: Run) -> None:
    assert in_terminal("info", "nowhere").startswith("\x1b[31merror:\x1b[0m no such file")
    assert "\x1b" not in in_terminal("info", "nowhere", NO_COLOR="1")
    assert "\x1b" not in in_terminal("info", "nowhere", TERM="dumb")
    assert "\x1b" not in daskstack("info", "nowhere").stderr


def test_a_list_of_all_bad_files_is_written_where_it_is_asked_for(
    frames: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from daskstack.cli import main

    for k in range(30):
        (frames / f"bad,{k}.tif").write_bytes(b"\0")

    def run(*options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["plan", "frames", "out.npy", *options], standalone_mode=False)
        return int(caught.value.code or 0), capsys.readouterr().err

    status, said = run("--check")
    assert status == 1
    assert "and 10 more" in said
    assert os.listdir(frames.parent) == ["frames"]
    status, said = run("--check", "--bad", "bad.csv")
    assert status == 1
    assert said.startswith("error: 30 of 42 files are bad; nothing was written\n  frames/bad,0.tif  not a TIFF file")
    assert "and 10 more\nlist  bad.csv\nnext  " in said
    with open("bad.csv", newline="") as f:
        rows = list(csv.reader(f))
    assert rows[0] == ["file", "problem"]
    assert [row[0] for row in rows[1:]] == [str(frames / f"bad,{k}.tif") for k in range(30)]
    assert all(row[1].startswith("not a TIFF file: it begins with zeros") for row in rows[1:])
    assert run("--check", "--bad", "bad.csv") == (
        1,
        "error: bad.csv exists; it was not touched\nnext  choose another name for --bad\n",
    )
    assert run("--bad", "more.csv") == (2, "error: --bad without --check\nnext  give both\n")
    for path in frames.glob("bad*"):
        path.unlink()
    main(["plan", "frames", "out.npy", "--check", "--bad", "none.csv"], standalone_mode=False)
    assert sorted(os.listdir(frames.parent)) == ["bad.csv", "frames"]


def test_a_list_of_bad_files_for_which_there_is_no_room_is_not_left_half_written(
    frames: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from daskstack.cli import main

    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:10], offset)

    (frames / "img_3.tif").write_bytes(b"")
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(SystemExit):
        main(["plan", "frames", "out.npy", "--check", "--bad", "bad.csv"], standalone_mode=False)
    assert capsys.readouterr().err.startswith("error: cannot write bad.csv: the disk is full")
    assert os.listdir(frames.parent) == ["frames"]


def test_one_bad_file_in_ten_thousand_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from daskstack.cli import main

    (tmp_path / "in").mkdir()
    np.save(tmp_path / "good.npy", image(1))
    for k in range(10_000):
        (tmp_path / f"in/{k}.npy").hardlink_to(tmp_path / "good.npy")
    (tmp_path / "in/6789.npy").unlink()
    np.save(tmp_path / "in/6789.npy", image(1, (7, 5)))  # as long as the others
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(tmp_path / "in"), str(tmp_path / "out.npy"), "--check"], standalone_mode=False)
    assert caught.value.code == 1
    assert capsys.readouterr().err.splitlines()[:2] == [
        "error: 1 of 10,000 files is bad; nothing was written",
        f"  {tmp_path}/in/6789.npy  found (7, 5) uint16, due (5, 7) uint16",
    ]
