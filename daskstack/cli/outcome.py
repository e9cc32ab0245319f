"""How a command ends: what it says, in which colours, the one message of an error, and the exit status.

0 done and durable, 1 an error, 2 usage, 75 stopped; of verify 0 equal, 1 different, 3 could not check.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

from daskstack.errors import BadFilesError, DaskstackError, StackWarning, UsageError
from daskstack.files import STOPS
from daskstack.progress import in_terminal
from daskstack.text import SHOWN

ERROR, USAGE, STOPPED = 1, 2, 75

COLOURS = {"done": "green", "equal:": "green", "next": "cyan", "warning:": "yellow"}
COLOURS |= dict.fromkeys(("error:", "different:", "stopped"), "red")
COLOURED = rf"^({'|'.join(COLOURS)})(?= )"


class _Stopped(BaseException):
    """A signal to stop; no Exception, so that nothing on the way takes it for a failure of its own."""


def say(text: object, options: dict[str, Any]) -> None:
    """Tell what was done; that nobody can hear it does not undo it."""
    if not options["quiet"]:
        try:
            click.echo(_coloured(str(text), sys.stdout))
        except OSError:
            _drop(sys.stdout)


@contextmanager
def reported(options: dict[str, Any]) -> Iterator[None]:
    """Turn what goes wrong into one message on stderr and an exit status."""
    level = logging.DEBUG if options["verbose"] else logging.ERROR if options["quiet"] else logging.WARNING
    warnings.showwarning = _show_warning
    if options["quiet"]:
        warnings.simplefilter("ignore", StackWarning)
    try:
        with _logged(level), _stopping():
            yield
        _let_go_of_streams()
    except DaskstackError as exc:
        if options["debug"]:
            raise
        kept = "".join(f"\nkept  {note}; the same command goes on" for note in getattr(exc, "__notes__", []))
        if isinstance(exc, BadFilesError) and options["verbose"]:
            for bad in exc.files[SHOWN:]:
                click.echo(f"bad   {bad}", err=True)
        fail(f"error: {exc}{kept}", USAGE if isinstance(exc, UsageError) else ERROR)
    except _Stopped as exc:
        command = shlex.join(["daskstack", *sys.argv[1:]])
        kept = "; ".join(getattr(exc, "__notes__", ["nothing was kept"]))
        fail(f"stopped ({exc}): {kept}\nnext  {command}", STOPPED)
    except BrokenPipeError:  # the reader of our output went away, as head does
        _drop(sys.stdout)
        sys.exit(ERROR)
    except Exception as exc:
        if options["debug"]:
            raise
        kept = "".join(f"\nkept  {note}" for note in getattr(exc, "__notes__", []))
        what = f"error: {type(exc).__name__}: {exc}{kept}"
        fail(f"{what}\nnext  --debug shows where; if daskstack is at fault, report it", ERROR)


@contextmanager
def _logged(level: int) -> Iterator[None]:
    """Have the log on stderr, as it is now: a later command of this process may have another."""
    logger = logging.getLogger("daskstack")  # not the root, which distributed would fill with all that it does
    logger.setLevel(level)
    handler = None if logger.handlers else logging.StreamHandler()
    if handler is not None:
        logger.addHandler(handler)
    try:
        yield
    finally:
        if handler is not None:
            logger.removeHandler(handler)


@contextmanager
def _stopping() -> Iterator[None]:
    """Have signals end the run in an orderly way; a second one ends it at once."""

    def stop(number: int, _: object) -> None:
        for name in STOPS:
            signal.signal(name, signal.SIG_DFL)
        raise _Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _let_go_of_streams() -> None:
    """What nobody takes (a full disk, a pipe whose reader has gone) is dropped: at exit it would become status 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # a stream of a test, or a closed one
                _drop(stream)


def _drop(stream: TextIO) -> None:
    """Send what is still to be written, and all that follows, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(message: str, status: int) -> None:
    """End the program with a message on stderr, if there is one, and an exit status."""
    if message:
        click.echo(_coloured(message, sys.stderr), err=True)
    sys.exit(status)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(_coloured(f"warning: {message}", sys.stderr), err=True)


def _coloured(text: str, stream: Any) -> str:
    """The words that lines begin with in colour: in a terminal alone, and not where NO_COLOR is set."""
    if not in_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return re.sub(COLOURED, lambda word: click.style(word[0], fg=COLOURS[word[0]]), text, flags=re.MULTILINE)
