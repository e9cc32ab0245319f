"""Labels from file names: one value a file for each named group, regular expression, function or CSV column.

What a pattern is searched in is the file's path below its source folder, suffix included, so that a
parent folder can be the class.  Composed and decomposed spellings of a letter are one and the same.
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from daskstack.errors import LabelError, StackWarning, UsageError
from daskstack.order import composed
from daskstack.text import count, listed, plural, printable

Labels: TypeAlias = (
    "str | os.PathLike[str] | Mapping[str, str | Callable[[str], Any]] | Callable[[str], Mapping[str, Any]]"
)
LabelArrays: TypeAlias = dict[str, NDArray[Any]]

TAKEN = frozenset({"item", "file", "page", "size", "mtime", "checksum", "filled", "data", "index", "zarr.json"})
_INTEGER = re.compile(r"[+-]?\d+")  # digits of any script, as the natural order takes them
KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "bool": (bool, np.bool_),
    "whole": (int, np.integer),
    "decimal": (float, np.floating),
}
MOST_DIGITS = 30  # int() of thousands of them is refused by Python itself
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read_labels(names: Sequence[str], labels: Labels | None, full_names: Sequence[str] = ()) -> LabelArrays:
    r"""One array a label, in the order of the files.

    Parameters
    ----------
    names : sequence of str
        The path of each file below its source folder.
    labels : str, path, mapping or callable, optional
        A regular expression with named groups; a mapping of label to regular expression (without a
        group: whether it is found; with one: its text) or to a function of the path; a function of
        the path that returns a mapping; or a CSV file whose first column is that path.
    full_names : sequence of str, optional
        The path of each file below the folder that all sources share; what a CSV is keyed by where
        ``names`` stand for several files.

    Returns
    -------
    dict of str to array, each of shape (files,)
        Columns that are numbers throughout are int64 or float64, found-or-not is bool, the rest text.

    Raises
    ------
    LabelError
        A file does not match, or has no row; it says how many and names some.
    UsageError
        The expression, a label's name or the CSV cannot be used.

    Examples
    --------
    >>> read_labels(["t1_dark.tif", "t2_flat.tif"], r"t(?P<t>\d+)_(?P<kind>[a-z]+)")
    {'t': array([1, 2]), 'kind': array(['dark', 'flat'], dtype='<U4')}
    >>> read_labels(["cat.npy", "dog.npy"], {"target": "a"})
    {'target': array([ True, False])}
    """
    if labels is None:
        return {}
    texts = [composed(name) for name in names]
    if isinstance(labels, os.PathLike) or (isinstance(labels, str) and labels.lower().endswith(".csv")):
        unclear = len(set(texts)) < len(set(full_names))  # one name below several source folders
        columns = _from_csv([composed(n) for n in full_names] if unclear else texts, os.fspath(labels))
    elif isinstance(labels, str):
        columns = _from_groups(texts, labels)
    elif isinstance(labels, Mapping):
        columns = {name: _column(texts, name, rule) for name, rule in labels.items()}
    elif callable(labels):
        columns = _from_function(texts, labels)
    else:
        raise UsageError(
            f"labels is {type(labels).__name__}",
            "give a regular expression, a mapping of names to expressions, a function or a CSV file",
        )
    if len({str(name).casefold() for name in columns}) < len(columns):
        raise UsageError(f"labels {', '.join(columns)} differ in upper and lower case only", "choose other names")
    arrays = {_checked_name(name): _as_array(name, values) for name, values in columns.items()}
    for name, values in arrays.items():
        _warn_of_gap(name, values)
        _warn_of_constant(name, values)
    return arrays


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(composed(pattern))
    except re.error as exc:
        raise UsageError(f"{where}: '{pattern}' is not a regular expression: {exc}", "mend the expression") from exc


def _from_groups(texts: Sequence[str], pattern: str) -> dict[str, list[Any]]:
    expression = _compiled(pattern, "labels")
    if not expression.groupindex:
        raise UsageError(
            f"labels='{pattern}' has no named group",
            r"name what is to become a label, as in t(?P<t>\d+); for found or not, give {name: expression}",
        )
    matches = [expression.search(text) for text in texts]
    _refuse_unmatched(texts, [m is None for m in matches], pattern)
    return {name: [m[name] or "" for m in matches if m] for name in expression.groupindex}


def _column(texts: Sequence[str], name: str, rule: str | Callable[[str], Any]) -> list[Any]:
    if not isinstance(rule, str):
        if not callable(rule):
            raise UsageError(f"label {name}: {rule!r}", "give a regular expression, or a function of the path")
        return [_called(rule, text) for text in texts]
    expression = _compiled(rule, f"label {name}")
    if expression.groups > 1:
        raise UsageError(
            f"label {name}: '{rule}' has {expression.groups} groups", "mark all but one as (?:...), or use labels="
        )
    matches = [expression.search(text) for text in texts]
    if not expression.groups:
        return [m is not None for m in matches]
    _refuse_unmatched(texts, [m is None for m in matches], rule)
    return [m[1] or "" for m in matches if m]


def _called(function: Callable[[str], Any], text: str) -> Any:
    try:
        return function(text)
    except Exception as exc:
        raise LabelError(
            f"labels: the function failed for {printable(text)}: {type(exc).__name__}: {exc}", "mend the function"
        ) from exc


def _refuse_unmatched(texts: Sequence[str], missing: Sequence[bool], pattern: str) -> None:
    bad = [text for text, out in zip(texts, missing, strict=True) if out]
    if bad:
        raise LabelError(
            f"{count(len(bad))} of {plural(len(texts), 'file')} {'does' if len(bad) == 1 else 'do'} not match "
            f"'{pattern}': {listed(bad)}",
            "mend the expression or the names; what it sees is the path below the source folder, as shown",
        )


def _from_function(texts: Sequence[str], function: Callable[[str], Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = [_called(function, text) for text in texts]
    if not isinstance(rows[0], Mapping):
        raise UsageError(f"labels: the function returns {rows[0]!r}", "return a mapping of names to values")
    columns: dict[str, list[Any]] = {name: [] for name in rows[0]}
    for text, row in zip(texts, rows, strict=True):
        if row.keys() != columns.keys():
            raise LabelError(
                f"labels of {printable(text)} are {sorted(row)}, due {sorted(columns)}",
                "return the same names for every file",
            )
        for name, value in row.items():
            columns[name].append(value)
    return columns


def _from_csv(texts: Sequence[str], path: str) -> dict[str, list[Any]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            head, *rows = [row for row in csv.reader(f, strict=True) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise UsageError(f"labels: cannot read {printable(path)}: {exc}", "give a CSV file in UTF-8") from exc
    if len(head) < 2 or len(set(head)) < len(head):
        raise UsageError(
            f"labels: the first row of {printable(path)} is {head}",
            "name each column once, separated by commas: first the file's path below its folder, then the labels",
        )
    found: dict[str, list[str]] = {}
    for row in rows:
        key = composed(row[0])
        if len(row) != len(head) or key in found:
            what = "stands twice" if key in found else f"has {len(row)} of {len(head)} columns"
            raise LabelError(f"labels: {printable(row[0])} in {printable(path)} {what}", "mend that row")
        found[key] = row[1:]
    bad = [text for text in texts if text not in found]
    if bad:
        raise LabelError(
            f"{count(len(bad))} of {plural(len(texts), 'file')} {'is' if len(bad) == 1 else 'are'} not in "
            f"{printable(path)}: {listed(bad)}",
            f"its first column ({head[0]!r}) must hold the path below the source folder",
        )
    return {name: [found[text][k] for text in texts] for k, name in enumerate(head[1:])}


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"label {name!r} is no text", "name labels by words")
    if name in TAKEN:
        raise UsageError(f"label {name!r} would hide the column of that name", "choose another name")
    if not name or name != name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise UsageError(f"label {name!r} cannot be part of a file's name", "use letters, digits, _ and -")
    return name


def _as_array(name: str, values: Sequence[Any]) -> NDArray[Any]:
    """Numbers where all are numbers, bool where all are bool, else text."""
    kinds = {_kind(value) for value in values}
    if kinds == {"text"}:
        return _text_array([str(v) for v in values])
    dtype = "bool" if kinds == {"bool"} else "int64" if kinds == {"whole"} else "float64"
    if kinds in ({"bool"}, {"whole"}, {"decimal"}, {"whole", "decimal"}):
        with suppress(OverflowError):  # more than 64 bits hold
            return np.array([v.item() if isinstance(v, np.generic) else v for v in values], dtype)
    raise LabelError(
        f"label {name} has values of several kinds, or of none that an array can hold: "
        f"{listed(list(dict.fromkeys(map(repr, values))))}",
        "give each file one text, or one number, or True or False",
    )


def _kind(value: Any) -> str:
    for kind, classes in KINDS.items():
        if isinstance(value, classes):
            return kind
    return "other"


def _text_array(values: Sequence[str]) -> NDArray[Any]:
    if all(map(_INTEGER.fullmatch, values)):
        if all(len(v) <= MOST_DIGITS and -(2**63) <= int(v) < 2**63 for v in values):
            return np.array([int(v) for v in values], dtype=np.int64)
    elif all(map(_DECIMAL.fullmatch, values)):
        numbers = np.array([float(v) for v in values])
        if np.isfinite(numbers).all():
            return numbers
    return np.array(values)


def missing_numbers(values: NDArray[Any]) -> NDArray[Any]:
    """The numbers missing from a numbering: multiples of its own step that do not occur.

    Empty where there is no gap, or where more are missing than there are: then it was no numbering.

    Examples
    --------
    >>> missing_numbers(np.array([0, 1, 3])).tolist()
    [2]
    >>> missing_numbers(np.array([0, 7, 14])).tolist(), missing_numbers(np.array([3, 4, 1000])).tolist()
    ([], [])
    """
    present = np.unique(values)
    if len(present) < 3:
        return present[:0]
    step = int(np.gcd.reduce(np.diff(present)))
    expected = (int(present[-1]) - int(present[0])) // max(1, step) + 1  # max: differences can overflow
    if not len(present) < expected < 2 * len(present):
        return present[:0]
    return np.setdiff1d(np.arange(int(present[0]), int(present[-1]) + 1, step), present)


def _warn_of_constant(name: str, values: NDArray[Any]) -> None:
    if values.dtype.kind == "b" and len(values) > 1 and (values.all() or not values.any()):
        warnings.warn(f"label {name} is {values[0]} for every file", StackWarning, stacklevel=2)


def _warn_of_gap(name: str, values: NDArray[Any]) -> None:
    missing = missing_numbers(values) if values.dtype.kind == "i" else values[:0]
    if len(missing):
        gap = listed([str(n) for n in missing])
        warnings.warn(
            f"label {name} counts from {values.min()} to {values.max()} without {gap}", StackWarning, stacklevel=2
        )
