"""The README is what the program does: every example runs, what is shown is what comes, every option has its example."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import click
import numpy as np
import pytest
import tifffile
from conftest import Array, image
from test_readers import ReaderContract

import daskstack
from daskstack import output, readers, targets
from daskstack.cli import main
from daskstack.cli.commands import build
from daskstack.jobs import make_jobs
from daskstack.readers import Reader

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NOT_IN_AN_EXAMPLE = {"--insecure", "--help"}  # the one within an allocation alone, the other ends the program
VOLATILE = re.compile(
    r"free [\d.]+ \wB|about [\d.:]+ s|\d+ threads, at most [\d.]+ \wB|in [\d.]+ s|[\d,]+ files/s|[0-9a-f]{16}"
)
TIMES = r"t(?P<t>\d+)"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    (found,) = (block for block in blocks("python") if text in block)
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of tables, heads included."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


# -- what the examples are about ----------------------------------------------------------------------------------


def frame(t: int, shape: tuple[int, int] = (200, 200)) -> Array:
    return np.full(shape, t, "uint16")


@pytest.fixture(autouse=True)
def _inputs(request: pytest.FixtureRequest) -> None:
    """The folders of the examples, in a current folder of their own."""
    if "tmp_path" not in request.fixturenames or request.cls is not None:
        return
    request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
    names = [f"t{t}_{'light' if t % 10 else 'dark'}.tif" for t in range(60)]
    for folder in ("frames", "pics/cat", "pics/dog", "grid", "movies", "slides", "monday", "tuesday", "raw"):
        os.makedirs(folder)
    for t, name in enumerate(names):
        tifffile.imwrite(f"frames/{name}", frame(t), photometric="minisblack")
    Path("frames/notes.txt").write_text("a night without wind")
    shutil.copytree("frames", "night")
    Path("night/t7_light.tif").write_bytes(b"")
    tifffile.imwrite("night/t9_light.tif", frame(9, (200, 100)), photometric="minisblack")
    Path("list.txt").write_text("".join(f"frames/{name}\n" for name in names[::-1]))
    for k in range(4):
        np.save(f"pics/{('cat', 'dog')[k % 2]}/{k // 2}.npy", frame(k))
        np.save(f"{('monday', 'tuesday')[k % 2]}/t{k}.npy", frame(k))
        np.save(f"grid/t{k // 2}_c{k % 2}.npy", frame(k))
        tifffile.imwrite(f"movies/{k}.tif", np.stack([frame(p) for p in range(5)]), photometric="minisblack")
        with tifffile.TiffWriter(f"slides/{k}.tif") as tif:
            tif.write(frame(k, (64, 64)), photometric="minisblack", subifds=1)
            tif.write(frame(k, (32, 32)), photometric="minisblack", subfiletype=1)
    Path("animals.csv").write_text("file,weight,sex\ncat/0.npy,3.9,f\ncat/1.npy,4,m\ndog/0.npy,9,f\ndog/1.npy,11.5,f\n")
    frame(7, (4, 5)).tofile("raw/1.bin")


def run(command: str) -> int:
    """The exit status of a command line."""
    program, *arguments = shlex.split(command, comments=True)
    assert program == "daskstack"
    try:
        main(arguments, standalone_mode=False)
    except SystemExit as exc:
        return int(exc.code or 0)
    return 0


def clear_away() -> None:
    """Outputs, and what is kept of them."""
    for path in Path().iterdir():
        if re.search(r"\.(npy|zarr)\b|^bad\.csv$", path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# -- command lines --------------------------------------------------------------------------------------------------


def sessions() -> list[tuple[str, list[str]]]:
    """The commands that are shown with what they print, and that."""
    text = "".join(blocks("console"))
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    return [(command, printed.splitlines()) for command, printed in found]


def test_what_is_shown_is_what_comes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert [command.split()[1] for command, _ in sessions()] == ["plan", "build", "build", "verify"]
    for command, shown in sessions():
        assert max(map(len, shown)) <= 80
        status = run(command)
        assert status == ("error: " in "\n".join(shown))
        printed = "".join(capfd.readouterr()).splitlines()
        come = [line for line in printed if not re.match(r" *\d+%", line)]
        assert [VOLATILE.sub("#", line) for line in come] == [VOLATILE.sub("#", line) for line in shown]


def shell_commands() -> list[list[str]]:
    """Those of each block, and of those in the text."""
    joined = [block.replace("\\\n", " ") for block in blocks("sh")]
    found = [re.findall(r"^(daskstack .*?)(?: &.*| > .*)?$", block, re.MULTILINE) for block in joined]
    text = re.sub(r"^\|.*$", "", README, flags=re.MULTILINE)
    return [*filter(None, found), re.findall(r"`(daskstack build \w+ \w+\.\w+[^`]*)`", text)]


def test_command_lines_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sum(map(len, shell_commands())) == 11
    for block in shell_commands():
        clear_away()
        for command in block:
            alone, cluster, _ = command.partition(" --cluster")  # here is no batch system: planned with, built without
            if cluster:
                assert run(command.replace(" build ", " plan ")) == 0
            assert run(alone) == 0
            if "animals.csv" in command:
                assert np.load("all.class.npy").tolist() == ["cat"] * 2 + ["dog"] * 2
                assert np.load("cats.target.npy").tolist() == [True, True, False, False]
                assert np.load("weighed.weight.npy").tolist() == [3.9, 4, 9, 11.5]
    assert "#SBATCH --job-name=daskstack --array=0-7" in capfd.readouterr().out


def examples() -> list[str]:
    """The command of each row of the tables of options: the row's own, or the head's with the row's options."""
    found, head = [], ""
    for cells in rows(section("Every option")):
        code = cells[0].removesuffix(" …").strip("`")
        if cells[0].endswith("…"):
            head = code
        elif cells[0].startswith("`"):
            found.append(code if code.startswith("daskstack") else f"{head} {code}")
    return found


def test_every_example_of_an_option_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("daskstack build frames train.npy") == 0
    made = {*os.listdir()}
    for command in examples():
        if command.endswith("--version"):
            continue
        assert run(command) == 0, command
        assert capfd.readouterr().out or "--quiet" in command
        for name in {*os.listdir()} - made:
            shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)
    (tmp_path / "out.npy").write_bytes(b"mine")
    assert run("daskstack build frames out.npy --overwrite") == 1


def test_every_option_of_every_command_has_an_example() -> None:
    commands = [shlex.split(command) for command in [*examples(), *itertools.chain(*shell_commands())]]
    assert {command[1] for command in commands} >= set(main.commands)
    for name, command in main.commands.items():
        users = ("build", "plan") if name in ("build", "plan") else ("build", "plan", name)
        used = {word for words in commands if words[1] in users for word in words}
        for option in command.params:
            if isinstance(option, click.Option) and not NOT_IN_AN_EXAMPLE & {*option.opts}:
                assert used & {*option.opts}, f"{name} {option.opts}"
    assert "`--insecure`" in section("Every option")


def test_every_argument_of_the_functions_is_named() -> None:
    functions: list[Any] = [
        daskstack.open_stack,
        daskstack.build,
        daskstack.Stack.plan,
        daskstack.Stack.to_npy,
        daskstack.Stack.to_zarr,
        daskstack.Stack.preview,
        daskstack.store,
        daskstack.open,
        daskstack.verify,
        make_jobs,
    ]
    arguments = {
        name
        for function in functions
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is not p.VAR_KEYWORD and name not in ("self", "sources", "out", "path", "array")
    }
    options = {name for option in build.params for name in (option.name, option.opts[0].lstrip("-"))}
    documented = set(re.findall(r"\b(\w+)=", README)) | {str(name).replace("-", "_") for name in options}
    shown = {word.lstrip("-").replace("-", "_") for command in examples() for word in command.split()}
    assert arguments - documented - shown == set()
    # In Python they have the same names, but for those of which the text says what they are there.
    renamed = {"files_from", "label", "dry_run", "quiet", "as_json", "verbose", "debug", "paths"}
    assert {str(option.name) for option in build.params} - arguments == renamed
    said = section("Every option").split("\n|")[0]
    assert all(f"`--{name.replace('_', '-')}" in said for name in renamed - {"as_json", "verbose", "debug", "paths"})


# -- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of PyTorch the text uses; itself it is too large for a test."""
    stand_in: Any = ModuleType("torch")
    stand_in.utils = SimpleNamespace(data=SimpleNamespace(Dataset=object))
    stand_in.from_numpy = lambda array: array
    monkeypatch.setitem(sys.modules, "torch", stand_in)


def carried_out(code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that it makes, in a module, so that its classes can be pickled."""
    module = ModuleType("shown_in_the_readme")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "README.md", "exec", dont_inherit=True), vars(module))
    return vars(module)


def test_python_runs(tmp_path: Path, torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [block for block in blocks("python") if '"data/' not in block]  # test_formats.py runs those others
    assert len(shown) == 9
    names = carried_out("\n".join(shown), monkeypatch)
    assert np.load("train.npy")[:, 0, 0].tolist() == names["times"].tolist() == list(range(60))
    assert names["kinds"].tolist() == (["dark"] + ["light"] * 9) * 6
    assert names["dark"].labels["t"].tolist() == [0, 10, 20, 30, 40, 50]
    assert np.load("dark.npy")[:, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    assert names["half"].shape == names["out"].shape == (60, 100, 100)
    assert names["out"].labels["t"].tolist() == list(range(60))
    assert np.load("binned.npy")[:, 0, 0].tolist() == np.load("binned.t.npy").tolist() == list(range(60))
    assert np.load("binned.npy").shape == (60, 80, 80)
    assert names["week"][:, 0, 0].compute().tolist() == names["week_t"].tolist() == [0, 2, 1, 3]
    assert names["inputs"].shape == (28, 200, 200)
    assert np.load("raw.npy").tolist() == [frame(7, (4, 5)).tolist()]


def notebook_block_with(text: str) -> str:
    cells = json.loads((ROOT / "notebooks" / "train.ipynb").read_text())["cells"]
    (cell,) = (source for cell in cells if text in (source := "".join(cell["source"])))
    return str(cell.split("```python\n")[1].split("```")[0])


@pytest.mark.parametrize("where", ["README.md", "train.ipynb"])
def test_an_item_for_pytorch_is_a_cast_copy_and_a_worker_gets_no_pixels(
    tmp_path: Path, torch: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "README.md":
        name, out, due, code = "Frames", "train.npy", 1.0, "import numpy as np\n" + block_with("import torch")
    else:
        name, out, due, code = "Cells", "cells.npy", 0.0, notebook_block_with("import torch")
    daskstack.build("frames", out, labels=r"_(?P<kind>[a-z]+)", progress=False)
    frames = carried_out(code, monkeypatch)[name]()
    sent = pickle.dumps(frames)
    inputs, target = frames[7]
    assert (len(frames), inputs.shape, inputs.dtype, target) == (60, (1, 200, 200), np.dtype("float32"), due)
    assert inputs.flags.writeable
    assert np.unique(inputs).size == 1
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent)[7][0], inputs)


class TestReaderInTheReadme(ReaderContract):
    suffix = ".pgm"
    dtype = "uint8"
    dtypes = ("uint8",)
    shapes: tuple[tuple[int, ...], ...] = ((1, 7), (7, 5), (1, 35), (10, 7))
    shown: ClassVar[dict[str, Any]]

    @pytest.fixture(autouse=True)
    def _as_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        type(self).shown = carried_out(block_with("class PgmReader"), monkeypatch)

    def make(self, join: Literal["stack", "concat"] = "stack") -> Reader:
        reader: Reader = self.shown["PgmReader"](join)
        return reader

    def write(self, path: Path, array: Array) -> None:
        height, width = array.shape
        path.write_bytes(b"P5\n%d %d\n255\n" % (width, height) + array.tobytes())


def test_reader_and_target_once_they_have_joined_the_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = carried_out(block_with("class PgmReader") + block_with("class NrrdTarget"), monkeypatch)
    monkeypatch.setattr(readers, "FORMATS", (*readers.FORMATS, shown["PgmReader"]))
    monkeypatch.setattr(targets, "FORMATS", (*targets.FORMATS, shown["NrrdTarget"]))
    monkeypatch.setattr(output, "SUFFIXES", (*targets.SUFFIXES, ".nrrd"))
    images = [image(k, dtype="uint8") for k in range(5)]
    for k, array in enumerate(images):
        Path(f"{k}.pgm").write_bytes(b"P5 7 5 255\n" + array.tobytes())
    for what in ("in", "it was there already"):
        report = daskstack.build([f"{k}.pgm" for k in range(5)], "o.nrrd", labels={"k": r"(\d)"}, progress=False)
        assert what in str(report)
    header, pixels = Path("o.nrrd").read_bytes().split(b"\n\n", 1)
    assert header == b"NRRD0004\ntype: uint8\ndimension: 3\nsizes: 7 5 5\nencoding: raw\nendian: little"
    assert pixels == np.stack(images).tobytes()
    found = daskstack.open("o.nrrd")
    assert np.array_equal(np.asarray(found.array[1:3]), np.stack(images[1:3]))
    assert found.labels["k"].tolist() == list(range(5))


@pytest.mark.parametrize("name", ["PgmReader", "NrrdTarget"])
def test_a_reader_or_a_target_is_no_more_than_twenty_lines(name: str) -> None:
    code = block_with(f"class {name}").split("@dataclass")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


# -- what it names ------------------------------------------------------------------------------------------------


def test_the_tests_that_hold_the_promises_are_there() -> None:
    promised = [name for cells in rows(section("What is promised")) for name in re.findall(r"`(test_\w+)`", cells[1])]
    assert len(promised) > 25
    there = {name for path in ROOT.glob("tests/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert set(promised) - there == set()


def test_modules_in_the_table_are_those_of_the_package_and_the_diagram_has_no_others() -> None:
    package = Path(daskstack.__file__).parent
    found = {p.name for p in package.glob("*.py")} | {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    (table,) = re.findall(r"^\| where \| what \|\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert set(re.findall(r"`(\w+(?:\.py|/))`", table)) == found - {"__init__.py", "__main__.py"}
    (diagram,) = blocks("text")
    drawn = set(re.findall(r"\w+(?:\.py|/)", diagram))
    assert drawn <= found
    assert len(drawn) > 10
    below = re.findall(r"`((?:readers|targets|verification|tests)/\w+\.py)`", README)
    assert all((package / name).exists() or (ROOT / name).exists() for name in below)


def test_every_part_is_in_the_contents_and_every_link_leads_somewhere() -> None:
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    contents = README.split("**Contents**\n\n")[1].split("\n\n")[0]
    assert re.findall(r"\[(.*?)\]\(#(.*?)\)", contents) == list(zip(titles, anchors, strict=True))
    assert set(re.findall(r"\]\(#(.*?)\)", README)) == set(anchors)
    files = re.findall(r"\]\((?!https?:|#)(.*?)\)", README)
    assert files
    assert all((ROOT / name).exists() for name in files)
