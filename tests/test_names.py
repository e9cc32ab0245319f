"""Natural order and labels."""

from __future__ import annotations

import os
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskstack import build
from daskstack.cli import main
from daskstack.errors import LabelError, StackWarning, UsageError
from daskstack.names import missing_numbers, read_labels
from daskstack.order import natural_key
from daskstack.sorting import sort_order


@pytest.mark.parametrize(
    "ordered",
    [
        ["1.tif", "2.tif", "10.tif"],
        ["run-1.npy", "run-2.npy", "run-10.npy"],
        ["a.tif", "a1.tif", "a2.tif", "a10.tif", "b.tif"],
        ["t1_z2.tif", "t1_z10.tif", "t2_z1.tif"],
        ["img_0.tif", "img_00.tif", "img_1.tif"],
        ["IMG_1.tif", "img_2.TIF", "Img_3.tif"],
        ["v1.9.tif", "v1.10.tif"],
        ["x.npy", "x.tif"],
        ["x9999999999999999999999.tif", "x10000000000000000000000.tif"],
        ["t٢.tif", "t١٠.tif"],  # 2 and 10 in Arabic-Indic digits
        ["scan", "scan1", "scan2"],
        ["run_1.2", "run_1.9", "run_1.10"],
        ["IM.1", "IM.2", "IM.10"],
        ["v2.tar.gz", "v10.tar.gz"],
        ["é1.tif", "é2.tif", "é10.tif"],
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    assert sorted(reversed(ordered), key=natural_key) == ordered


@given(st.lists(st.integers(0, 10**30), min_size=2, unique=True), st.text("ab-_ .é", max_size=4))
def test_numbers_sort_as_numbers(numbers: list[int], prefix: str) -> None:
    names = [f"{prefix}x{n}y.tif" for n in numbers]
    assert sorted(names, key=natural_key) == [f"{prefix}x{n}y.tif" for n in sorted(numbers)]


@given(st.lists(st.text(max_size=8), unique=True))
def test_the_order_does_not_depend_on_the_order_of_listing(names: list[str]) -> None:
    assert sorted(names, key=natural_key) == sorted(reversed(names), key=natural_key)


def column(values: list[str]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StackWarning)
        return read_labels([f"<{v}>" for v in values], r"<(?P<v>.*)>")["v"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1", "2", "10"], np.array([1, 2, 10])),
        (["001", "-2", "+3"], np.array([1, -2, 3])),
        (["0.5", "-1", "2"], np.array([0.5, -1, 2])),
        ([".5", "1.", "1e3"], np.array([0.5, 1, 1000])),
        (["1", "2", "x"], np.array(["1", "2", "x"])),
        (["1", "2", ""], np.array(["1", "2", ""])),
        (["nan", "1", "inf"], np.array(["nan", "1", "inf"])),
        (["1_000", "2", "3"], np.array(["1_000", "2", "3"])),
        ([str(2**63), "1", "2"], np.array([str(2**63), "1", "2"])),
        (["12e999", "3e1000"], np.array(["12e999", "3e1000"])),
        (["1" * 5000, "2"], np.array(["1" * 5000, "2"])),
        (["ж", "é", "日本"], np.array(["ж", "é", "日本"])),
        (["٢", "١٠", "٣"], np.array([2, 10, 3])),  # in every script whose digits are put in natural order
        (["１", "-２", "0.５"], np.array([1, -2, 0.5])),
        (["²", "1", "3"], np.array(["²", "1", "3"])),
    ],
)
def test_columns_become_numbers_only_where_all_are(texts: list[str], expected: np.ndarray) -> None:
    found = column(texts)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_named_groups_see_parent_folders_and_the_suffix() -> None:
    names = ["cat/t1.tif", "dog/t2.TIF"]
    labels = read_labels(names, r"(?P<kind>\w+)/t(?P<t>\d)\.(?P<suffix>\w+)$")
    assert {k: v.tolist() for k, v in labels.items()} == {
        "kind": ["cat", "dog"],
        "t": [1, 2],
        "suffix": ["tif", "TIF"],
    }


def test_a_mapping_gives_bool_or_the_text_of_its_group_or_what_a_function_says() -> None:
    labels = read_labels(["a1.npy", "b2.npy"], {"target": "a", "n": r"(\d)", "length": len})
    assert labels["target"].dtype == bool
    assert labels["target"].tolist() == [True, False]
    assert labels["n"].tolist() == [1, 2]
    assert labels["length"].tolist() == [6, 6]


def test_a_function_of_the_path_gives_a_mapping() -> None:
    labels = read_labels(["a/1.npy", "b/2.npy"], lambda path: {"folder": path[0], "even": path[2] == "2"})
    assert labels["folder"].tolist() == ["a", "b"]
    assert labels["even"].tolist() == [False, True]


def test_composed_and_decomposed_spellings_are_one() -> None:
    decomposed = unicodedata.normalize("NFD", "café_1.tif")
    assert read_labels([decomposed], r"(?P<place>café)_(?P<n>\d)")["place"].tolist() == ["café"]


def test_a_csv_is_keyed_by_the_path(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("file,kind,weight\nb.npy,dog,2.5\nmore.npy,ant,1\na.npy,cat,3\n")
    for given_as in (table, str(table)):
        labels = read_labels(["a.npy", "b.npy"], given_as)
        assert labels["kind"].tolist() == ["cat", "dog"]
        assert labels["weight"].tolist() == [3.0, 2.5]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("file,k\na.npy,1\n", LabelError, r"1 of 2 files is not in .*labels.csv: b.npy"),
        ("file,k\na.npy,1\na.npy,2\nb.npy,1\n", LabelError, r"a.npy in .*labels.csv stands twice"),
        ("file,k\na.npy,1\nb.npy\n", LabelError, r"b.npy in .*labels.csv has 1 of 2 columns"),
        ("file;k\na.npy;1\n", UsageError, r"the first row of .*labels.csv is \['file;k'\]"),
        ("file,k,k\na.npy,1,1\n", UsageError, "name each column once"),
        ("", UsageError, r"the first row of .* is \[\]"),
    ],
)
def test_a_csv_that_does_not_serve(tmp_path: Path, text: str, error: type[Exception], message: str) -> None:
    table = tmp_path / "labels.csv"
    table.write_text(text)
    with pytest.raises(error, match=message):
        read_labels(["a.npy", "b.npy"], table)


def test_files_that_do_not_match_are_named() -> None:
    with pytest.raises(LabelError, match=r"^1 of 3 files does not match 't\(\?P<t>\\d\+\)': notes\.tif\n"):
        read_labels(["t1.tif", "notes.tif", "t2.tif"], r"t(?P<t>\d+)")
    with pytest.raises(LabelError, match="2 of 3 files do not match"):
        read_labels(["t1.tif", "a.tif", "b.tif"], {"t": r"t(\d)"})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (r"t(\d+)", "has no named group"),
        (r"t(?P<t>\d+", "is not a regular expression"),
        ({"t": r"(t)(\d)"}, "has 2 groups"),
        ({"file": "a"}, "would hide the column of that name"),
        ({"a/b": "a"}, "cannot be part of a file's name"),
        ({"T": "a", "t": "b"}, "differ in upper and lower case only"),
        ({"a": 5}, "label a: 5"),
        (lambda path: path, "the function returns 't1.tif'"),
        ({".hidden": "a"}, "cannot be part of a file's name"),
        (5, "labels is int"),
    ],
)
def test_labels_that_cannot_be_meant(labels: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_labels(["t1.tif"], labels)  # type: ignore[arg-type]


def test_values_of_several_kinds_are_refused() -> None:
    with pytest.raises(LabelError, match="label x has values of several kinds"):
        read_labels(["a", "b"], {"x": lambda path: [1, 2] if path == "a" else [3, 4]})
    with pytest.raises(LabelError, match=r"labels of b are \['y'\], due \['x'\]"):
        read_labels(["a", "b"], lambda path: {"x": 1} if path == "a" else {"y": 1})


def test_a_gap_in_a_numbering_is_a_warning() -> None:
    with pytest.warns(StackWarning, match="label t counts from 0 to 5 without 2, 4"):
        read_labels(["t0", "t1", "t3", "t5"], r"t(?P<t>\d)")


@given(st.sets(st.integers(-50, 50), min_size=3))
def test_missing_numbers_by_brute_force(numbers: set[int]) -> None:
    low, high = min(numbers), max(numbers)
    step = int(np.gcd.reduce(np.diff(sorted(numbers))))
    missing = [n for n in range(low, high + 1, step) if n not in numbers]
    expected = missing if len(missing) < len(numbers) else []
    assert missing_numbers(np.array(sorted(numbers))).tolist() == expected


def test_sorting_by_labels_is_stable_and_natural() -> None:
    labels = {"kind": np.array(["b10", "b2", "a", "b2"]), "t": np.array([1, 2, 3, 1])}
    assert sort_order(labels, "kind").tolist() == [2, 1, 3, 0]
    assert sort_order(labels, ["kind", "t"]).tolist() == [2, 3, 1, 0]
    with pytest.raises(UsageError, match="choose from: kind, t"):
        sort_order(labels, "z")


@pytest.mark.parametrize("values", [[True, 2], ["x", 2.5], [2**63, -1], [None, 1], [1j, 2j]])
def test_values_that_no_one_dtype_holds_are_refused(values: list[object]) -> None:
    with pytest.raises(LabelError, match="label x has values of several kinds"):
        read_labels(["0", "1"], {"x": lambda path: values[int(path)]})


def test_a_function_that_fails_has_the_name_of_the_file() -> None:
    with pytest.raises(LabelError, match="the function failed for b: KeyError: 'b'"):
        read_labels(["a", "b"], {"x": lambda path: {"a": 1}[path]})
    with pytest.raises(UsageError, match="label 1 is no text"):
        read_labels(["a"], {1: "a"})  # type: ignore[dict-item]


def test_a_label_that_is_the_same_for_every_file_is_a_warning() -> None:
    with pytest.warns(StackWarning, match="label target is False for every file"):
        read_labels(["a.npy", "b.npy"], {"target": "zebra"})


def test_a_csv_is_keyed_by_full_names_where_short_ones_stand_for_several_files(tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    full = ["A/1.npy", "B/1.npy"]
    table.write_text("file,y\nA/1.npy,1\nB/1.npy,2\n")
    assert read_labels(["1.npy", "1.npy"], table, full)["y"].tolist() == [1, 2]
    table.write_text("file,y\n1.npy,1\n")
    with pytest.raises(LabelError, match="2 of 2 files are not in"):
        read_labels(["1.npy", "1.npy"], table, full)


NFC, NFD = "café", unicodedata.normalize("NFD", "café")
VALUE = r"v(?P<v>[^/]+)\.npy$"
FROM_NAMES: dict[str, tuple[str, dict[str, object]]] = {
    "not padded": (VALUE, {"v1": 1, "v10": 10, "v2": 2}),
    "padded unevenly": (VALUE, {"v007": 7, "v08": 8, "v9": 9}),
    "negative": (VALUE, {"v-10": -10, "v-2": -2, "v+5": 5}),
    "decimals": (VALUE, {"v0.5": 0.5, "v-1.25": -1.25, "v10": 10.0}),
    "powers": (VALUE, {"v1e3": 1000.0, "v2E-1": 0.2, "v.5": 0.5}),
    "hexadecimal": (VALUE, {"v0x1f": "0x1f", "v0xa0": "0xa0", "v0x10": "0x10"}),
    "letters and digits": (VALUE, {"v1e": "1e", "vff": "ff", "v10": "10"}),
    "beyond 64 bits": (VALUE, {f"v{2**64}": str(2**64), "v1": "1"}),
    "digits of Arabic": (VALUE, {"v١٠": 10, "v٢": 2}),
    "digits of full width": (VALUE, {"v１０": 10, "v２": 2}),
    "letters of other scripts": (VALUE, {"vж": "ж", "v日本": "日本", "vあ": "あ"}),
    "composed or not": (f"(?P<v>{NFC}|the)_", {f"{NFC}_1": NFC, f"{NFD}_2": NFC, "the_3": "the"}),
    "an expression not composed": (f"(?P<v>{NFD}|the)_", {f"{NFC}_1": NFC, f"{NFD}_2": NFC, "the_3": "the"}),
    "a folder": (r"^(?P<v>[^/]+)/", {"cat/1": "cat", "dog/1": "dog", "dog/2": "dog"}),
    "folders within folders": (r"(?P<v>\w+)/\d\.npy", {"a/cat/1": "cat", "b/cat/1": "cat", "b/dog/1": "dog"}),
}


@pytest.mark.parametrize("kind", FROM_NAMES)
def test_labels_of_files_and_links_are_the_same_from_python_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pattern, due = FROM_NAMES[kind]
    for k, name in enumerate(due):
        Path("in", f"{name}.npy").parent.mkdir(parents=True, exist_ok=True)
        np.save(f"{k}.npy", np.full(3, k))  # every pixel tells its file
        (os.rename if k % 2 else os.symlink)(tmp_path / f"{k}.npy", f"in/{name}.npy")
    build("in", "python.npy", labels=pattern, progress=False)
    main(["build", "in", "line.npy", "--labels", pattern, "--quiet"], standalone_mode=False)
    for out in ("python", "line"):
        file_of = np.load(f"{out}.npy")[:, 0]
        found, expected = np.load(f"{out}.v.npy"), np.array(list(due.values()))[file_of]
        assert sorted(file_of) == list(range(len(due)))
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())


def test_equal_names_in_several_sources_keep_their_own_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(["one/t1", "one/t2", "two/t1", "two/t2"]):
        Path(name).parent.mkdir(exist_ok=True)
        np.save(f"{name}.npy", np.full(3, k))
    Path("table.csv").write_text("file,v\ntwo/t2.npy,3\none/t1.npy,0\none/t2.npy,1\ntwo/t1.npy,2\n")
    build(["two", "one"], "python.npy", labels="table.csv", progress=False)
    main(["build", "one", "two", "line.npy", "--labels", "table.csv", "--quiet"], standalone_mode=False)
    for out, order in (("python", [2, 3, 0, 1]), ("line", [0, 1, 2, 3])):
        assert np.load(f"{out}.npy")[:, 0].tolist() == np.load(f"{out}.v.npy").tolist() == order
