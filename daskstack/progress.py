"""Progress: a bar in a terminal or notebook, a line a minute elsewhere, nothing where it is not wanted."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from daskstack.text import WIDTH, count, duration, nbytes, plural

LINE_EVERY = 60.0  # seconds between lines where there is no terminal


class Progress:
    """Counts files and bytes as blocks are done.

    Parameters
    ----------
    total : int
        Files (or items) in all.
    unit : str
        "files" or "items".
    wanted : bool or None
        False is silent.
    before : int, optional
        How many of them were done before.
    blocks : int, optional
        How many updates are due, where each is a block.
    """

    def __init__(self, total: int, unit: str, *, wanted: bool | None, before: int = 0, blocks: int = 0) -> None:
        self.total, self.unit, self.before = total, unit, before
        self.done = before
        self.nbytes = self.bad = self.updates = 0
        self.blocks = blocks
        self.begin = self.told = time.monotonic()
        self.bar: Any = None
        self.wanted = wanted is not False and sys.stderr is not None and not getattr(sys.stderr, "closed", False)
        if self.wanted and (in_terminal(sys.stderr) or _in_notebook()):
            self.bar = _tqdm()(
                total=total,
                initial=before,
                desc=self.text(),
                ncols=None if _in_notebook() else min(WIDTH, _terminal_width()),
                nrows=20,  # a terminal that does not know its size says 0, and tqdm would show nothing
                ascii=" #",
                leave=False,
                bar_format="{percentage:3.0f}% |{bar}| {desc}",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.wanted:
            self._line()

    def update(self, files: int, nbytes: int, bad: int) -> None:
        """Count a block that is done."""
        self.done += files
        self.nbytes += nbytes
        self.bad += bad
        self.updates += 1
        if self.bar is not None:
            self.bar.set_description_str(self.text(), refresh=False)
            self.bar.update(files)
        elif self.wanted and time.monotonic() - self.told >= LINE_EVERY:
            self._line()

    @property
    def elapsed(self) -> float:
        """Seconds since the begin."""
        return max(1e-9, time.monotonic() - self.begin)

    @property
    def left(self) -> float | None:
        """Seconds that the rest will take; None where nobody knows."""
        now = self.done - self.before
        return self.elapsed * (self.total - self.done) / now if now else None

    def text(self) -> str:
        """What is done, how fast, how many are bad, how long it will take."""
        left = duration(self.left) if self.left is not None else "?"
        rate = self.nbytes / self.elapsed
        speed = f"{rate / 1e9:.2f} GB/s" if rate >= 1e7 else f"{rate / 1e6:.2f} MB/s"
        done = f"{count(self.done)}/{count(self.total)} {self.unit}  {nbytes(self.nbytes)}"
        return f"{done}  {speed}  bad {self.bad}  left {left}"

    def _more(self) -> str:
        """What a line has room for beside: files a second, blocks, the time of day when it will be done."""
        text = f"  {count(round((self.done - self.before) / self.elapsed))} {self.unit}/s"
        if self.blocks:
            text += f"  {count(self.updates)}/{plural(self.blocks, 'block')}"
        if self.left:
            text += time.strftime("  until %Y-%m-%d %H:%M", time.localtime(time.time() + self.left))
        return text

    def _line(self) -> None:
        self.told = time.monotonic()
        try:
            sys.stderr.write(f"{100 * self.done // max(1, self.total):3d}%  {self.text()}{self._more()}\n")
            sys.stderr.flush()
        except OSError:  # who reads it has gone, or its disk is full: no reason to stop
            self.wanted = False


def _tqdm() -> Any:
    """The bar of a notebook where it has widgets, else that of a terminal."""
    from importlib.util import find_spec

    if _in_notebook() and find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as in_notebook

        return in_notebook
    from tqdm.std import tqdm

    return tqdm


def in_terminal(stream: Any) -> bool:
    """Whether a stream, which may be closed or stand in for one, shows in a terminal."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and not getattr(stream, "closed", False) and isatty())


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None else None
    return found is not None and hasattr(found, "kernel")


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns
