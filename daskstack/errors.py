"""Every error that daskstack raises.

::

    DaskstackError
     ├── UsageError          (ValueError)         an argument or option that cannot be meant
     ├── SourceError         (FileNotFoundError)  a source that is not there, is empty or is no file
     ├── LabelError          (ValueError)         a file whose name does not give its labels
     ├── BadFileError        (ValueError)         one input file that is not what is due
     ├── BadFilesError       (ValueError)         all bad files of a run, in one report
     ├── OutputExistsError   (FileExistsError)    a final name that is taken
     ├── OutputError         (OSError)            a place that cannot be written
     └── NoSpaceError        (OSError)            disk, quota or file-size limit reached

Each is also the built-in kind in brackets, so that ``except FileExistsError`` works, and each can be
pickled, so that it can travel from a worker.  ``message`` says what is wrong, ``advice`` what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

from daskstack.text import first_of, shown


class DaskstackError(Exception):
    """The root of all errors of daskstack.

    Parameters
    ----------
    message : str
        What is wrong, in one sentence that names the file.
    advice : str, optional
        What to do about it.

    Examples
    --------
    >>> print(DaskstackError("train.npy exists", "choose another OUT"))
    train.npy exists
    next  choose another OUT
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message}\nnext  {self.advice}" if self.advice else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.advice)


class UsageError(DaskstackError, ValueError):
    """An argument or option that cannot be meant; exit status 2."""


class SourceError(DaskstackError, FileNotFoundError):
    """A source that is not there, matches nothing, or is not a regular file."""


class LabelError(DaskstackError, ValueError):
    """A file whose name (or whose row in the CSV) does not give its labels."""


class BadFileError(DaskstackError, ValueError):
    """One input file that cannot be read or is not what the stack is due.

    Parameters
    ----------
    path : str
        The file.
    found : str
        What it holds, or what is wrong with it.
    due : str, optional
        What it should hold.

    Examples
    --------
    >>> print(BadFileError("a.tif", "(184, 92) uint16", "(184, 184) uint16"))
    a.tif  found (184, 92) uint16, due (184, 184) uint16
    """

    def __init__(self, path: str, found: str, due: str = "") -> None:
        self.path, self.found, self.due = path, found, due
        super().__init__(f"{shown(path)}  {self.problem}")

    @property
    def problem(self) -> str:
        """The line without the file's name."""
        return f"found {self.found}, due {self.due}" if self.due else self.found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.found, self.due)


class BadFilesError(DaskstackError, ValueError):
    """All bad files of a run in one report.

    Parameters
    ----------
    message : str
        How many files are bad, and what that means for the output.
    advice : str
        What to do.
    files : sequence of BadFileError
        Every bad file, in the order of the stack.
    listed_in : str, optional
        A file that lists them all.

    Examples
    --------
    >>> bad = [BadFileError("a.tif", "empty file (0 bytes)")]
    >>> print(BadFilesError("1 of 9 files is bad", "mend it", bad))
    1 of 9 files is bad
      a.tif  empty file (0 bytes)
    next  mend it
    """

    def __init__(self, message: str, advice: str, files: Sequence[BadFileError], listed_in: str = "") -> None:
        super().__init__(message, advice)
        self.files = tuple(files)
        self.listed_in = listed_in

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in first_of([f.message for f in self.files]))]
        if self.listed_in:
            lines.append(f"list  {shown(self.listed_in)}")
        return "\n".join([*lines, f"next  {self.advice}"])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.advice, self.files, self.listed_in)


class OutputExistsError(DaskstackError, FileExistsError):
    """A final name that is taken; what holds it was not touched."""


class OutputError(DaskstackError, OSError):
    """A place where the output cannot be written."""


class NoSpaceError(DaskstackError, OSError):
    """The disk, a quota or a limit on file sizes is reached."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)
        self.errno = errno.ENOSPC


class StackWarning(UserWarning):
    """Something about the input that is legal but rarely meant, such as a gap in a numbering."""
