"""The notebooks as they are stored: run from top to bottom, small, and of no machine in particular; CI runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_NBYTES = 200_000


def test_the_readme_names_every_notebook() -> None:
    named = re.findall(r"\(notebooks/(\w+\.ipynb)\)", (ROOT / "README.md").read_text())
    assert sorted(named) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_of_one_whole_run(path: Path) -> None:
    assert path.stat().st_size < MOST_NBYTES
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"execute_result", "display_data", "stream"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "warnings, or progress"
    text = re.sub(r"[A-Za-z0-9+/=]{100,}", "picture", json.dumps(outputs))
    assert re.findall(r"/(?:tmp|home|root|Users|var|work)\b", text) == []
    assert "cannot be shown" not in text
