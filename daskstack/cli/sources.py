"""What the paths of a command stand for: listed files, the stack of them, or a finished output."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from daskstack.cli.options import READ_OPTIONS
from daskstack.errors import UsageError

if TYPE_CHECKING:
    from daskstack.api.stack import Stack
    from daskstack.discover import Listing
    from daskstack.output import Output


def sources_and_out(paths: tuple[str, ...], options: dict[str, Any]) -> tuple[str, ...]:
    """The paths of a command that makes an output, if there can be one among them."""
    if len(paths) == 1 and not options["files_from"]:
        raise UsageError(f"{paths[0]!r} alone: sources and an output are due", "daskstack build SRC... OUT")
    return paths


def listed_files(sources: tuple[str, ...] | list[str], options: dict[str, Any]) -> Listing:
    """The files that the sources, and those that --files-from lists, stand for."""
    from daskstack.discover import find
    from daskstack.readers import SUFFIXES

    return find(sources, in_order=_lines(options["files_from"]), suffixes=SUFFIXES)


def _lines(path: str | None) -> list[str]:
    """The names in a list of files; bytes that are no UTF-8 are kept."""
    if path is None:
        return []
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as f:
                data = f.read()
    except OSError as exc:
        raise UsageError(f"--files-from {path}: {exc.strerror}", "give a text file with a name a line") from exc
    names = [os.fsdecode(line.removesuffix(b"\r")) for line in data.split(b"\n")]
    if not any(names):
        raise UsageError(f"--files-from {path}: it lists no file", "give a text file with a name a line")
    return [name for name in names if name]


def opened(listing: Listing, options: dict[str, Any]) -> Stack:
    """The stack of the listed files, or as much of it as --limit says."""
    from daskstack.api import limited, open_stack

    stack = open_stack(
        listing,
        labels=_labels(options["labels"], options["label"]),
        sort_by=options["sort_by"] or None,
        axes=options["axes"],
        join=options["join"],
        **{name: options[name] for name in READ_OPTIONS},
        files_per_block=options["files_per_block"],
    )
    return limited(stack, options["limit"])


def _labels(labels: str | None, label: Sequence[str]) -> str | dict[str, str] | None:
    """The labels that --labels, or each --label, asks for."""
    if not label:
        return labels
    if labels:
        raise UsageError("--labels and --label are both given", "use one of them")
    pairs = [text.partition("=") for text in label]
    for name, equals, _ in pairs:
        if not equals:
            raise UsageError(f"--label {name} has no =", "write it as NAME=REGEX")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise UsageError(f"--label gives a name twice: {', '.join(name for name, _, _ in pairs)}", "name each once")
    return {name: regex for name, _, regex in pairs}


def stack_or_output(paths: tuple[str, ...], options: dict[str, Any]) -> Stack | Output:
    """The output of that name, else what the files of those names make."""
    from daskstack.output import is_output, open_output

    made = len(paths) == 1 and is_output(paths[0])
    return open_output(paths[0]) if made else opened(listed_files(paths, options), options)
