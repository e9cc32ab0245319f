"""Every example in a docstring runs as it stands, in a folder that has three small files."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import daskstack

MODULES = ["daskstack", *(m.name for m in pkgutil.walk_packages(daskstack.__path__, "daskstack."))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples() -> Iterator[Any]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in MODULES:
        if name != "daskstack.__main__":
            for test in finder.find(importlib.import_module(name), name):
                if test.examples:
                    yield pytest.param(test, id=test.name)


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """t1.npy, t2.npy and t10.npy, full of 0, 2 and 1, in a folder ``frames`` of the current one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "frames"
    folder.mkdir()
    for t, value in ((1, 0), (2, 2), (10, 1)):
        np.save(folder / f"t{t}.npy", np.full((4, 5), value, "uint16"))


@pytest.mark.parametrize("test", list(examples()))
def test_example_in_docstring(test: doctest.DocTest, frames: None) -> None:
    test.globs.update(np=np, daskstack=daskstack)
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)


README = (Path(__file__).parents[1] / "README.md").read_text()


def python_blocks(text: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if '"data/' not in block]


@pytest.fixture
def named_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six files in ``frames`` whose names have a time and a kind, as the README's examples want them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frames").mkdir()
    for t in range(6):
        np.save(tmp_path / "frames" / f"t{t}_{('dark', 'light')[t % 2]}.npy", np.full((4, 5), t, "uint16"))
        (tmp_path / "pics" / "ab"[t % 2]).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "pics" / "ab"[t % 2] / f"{t}.npy", np.full((4, 5), t, "uint16"))
    (tmp_path / "raw").mkdir()
    np.full((4, 5), 7, "<u2").tofile(tmp_path / "raw" / "1.bin")


def test_python_in_the_readme_runs(named_frames: None) -> None:
    blocks = python_blocks(README)
    assert len(blocks) == 4  # test_formats.py runs those for which it writes files
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    assert np.load("all.npy")[:, 0, 0].tolist() == list(range(6))
    assert np.load("all.kind.npy").tolist() == ["dark", "light"] * 3
    assert names["dark"].labels["t"].tolist() == [0, 2, 4]
    assert names["half"].shape == (6, 2, 3)
    assert daskstack.open("half.zarr").labels["t"].tolist() == list(range(6))
    assert np.load("raw.npy").tolist() == np.full((1, 4, 5), 7).tolist()
    assert np.load("inputs.target.npy").tolist() == [True, False] * 3


def commands() -> list[str]:
    """The README's command lines: those of indented blocks, and those in the text."""
    indented = re.findall(r"^    (daskstack .*?)(?:  +#.*)?$", README, re.MULTILINE)
    return [*indented, *re.findall(r"`(daskstack build [^`]*)`", README)]


def test_command_lines_in_the_readme_run(named_frames: None, capfd: pytest.CaptureFixture[str]) -> None:
    from daskstack.cli import main

    assert len(commands()) == 8
    for command in commands():
        program, *arguments = shlex.split(command)
        assert program == "daskstack"
        main(arguments, standalone_mode=False)
    assert capfd.readouterr().out.count("done  ") == 5
    assert Path("inputs.target.npy").exists()
    assert np.load("all.class.npy").tolist() == ["a"] * 3 + ["b"] * 3


def test_options_in_the_readme_are_those_of_the_program() -> None:
    from daskstack.cli.commands import build

    table = README.split("## Options")[1].split("\n\n")[1]
    documented = set(re.findall(r"--[a-z][a-z-]+", table))
    options = {name for p in build.params for name in p.opts if name.startswith("--")}
    assert options - documented == {"--files-from", "--dry-run", "--json", "--verbose", "--debug"}
    assert documented <= options


def test_modules_in_the_readme_are_those_of_the_package() -> None:
    table = README.split("## For those who carry the code on")[1]
    documented = set(re.findall(r"`(\w+)(?:\.py|/)`", table.split("A reader fills in")[0]))
    package = Path(daskstack.__file__).parent
    found = {p.stem for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert documented == found - {"__init__", "__main__"}
