"""What notebooks show: a card of HTML with a strip of thumbnails, and a contact sheet.

The HTML is whole in itself (no scripts, no network), takes the colours of the page around it, dark or
light, and escapes every name.
"""

from __future__ import annotations

import io
import math
import os
import textwrap
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Any

from daskstack import files
from daskstack.errors import OutputExistsError, UsageError
from daskstack.extras import needed
from daskstack.pictures import Contrast, Look, contrast, data_uri, painted
from daskstack.text import count, plural, printable, shown

THUMBNAILS = 8
SIDE = 72  # of a thumbnail, in pixels
THIN = 8  # pixels that a thumbnail has at least
BAD_COLOUR = "#d64523"
MOST_NBYTES = 8 << 20  # that are read for one thumbnail
SHEET_SIDE = 256
MOST_IN_A_SHEET = 400
MOST_IN_A_ROW = 4  # of a sheet that has no more
INCHES = 1.9  # of a picture in a sheet
DPI = 110
SOFTWARE = "daskstack"

STYLE = """
.daskstack{border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:8px 12px;max-width:52em;
color:inherit;font-size:13px;line-height:1.45}
.daskstack b{font-size:14px}
.daskstack table{border-collapse:collapse;margin:4px 0!important;border:0!important;width:auto!important;
font-size:inherit;color:inherit}
.daskstack tr,.daskstack td{background:none!important;border:0!important}
.daskstack td{text-align:left!important;vertical-align:top;padding:1px 12px 1px 0!important;
white-space:normal!important;overflow-wrap:anywhere;color:inherit}
.daskstack td:first-child{opacity:.65;white-space:nowrap!important}
.daskstack div{display:flex;flex-wrap:wrap;gap:4px;margin-top:4px}
.daskstack figure{margin:0;width:76px;font-size:10px;line-height:1.25;overflow:hidden}
.daskstack figcaption{opacity:.75;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;text-align:left}
.daskstack img{image-rendering:pixelated;display:block;max-width:none;margin:0;border:1px solid rgba(128,128,128,.4)}
.daskstack small{opacity:.75;display:block;margin-top:2px}
"""


def html(make: Callable[[], str], kind: str) -> str:
    """What ``make`` gives; where it fails, what it failed of: a repr raises nothing."""
    try:
        return make()
    except Exception as exc:  # noqa: BLE001  # a file that has gone, a disk that fails
        return f"<pre>{escape(printable(f'<{kind}> cannot be shown: {type(exc).__name__}: {exc}'))}</pre>"


def card(title: str, rows: Iterable[tuple[str, str]], looks: Sequence[Look] = (), items: int = 0) -> str:
    """A title, a table of words and what they stand for, and the thumbnails of some of the items."""
    body = "".join(f"<tr><td>{escape(word)}</td><td>{escape(text)}</td></tr>" for word, text in rows)
    return (
        f'<div class="daskstack-card"><style>{STYLE}</style><section class="daskstack">'
        f"<b>{escape(title)}</b><table>{body}</table>{_strip(looks, items) if looks else ''}</section></div>"
    )


def rows_of(text: str) -> list[tuple[str, str]]:
    r"""The rows of a text whose lines begin with a word, or with blanks where they go on.

    Examples
    --------
    >>> rows_of("done  a.npy\n      a.npy.json\nread  it")
    [('done', 'a.npy'), ('', 'a.npy.json'), ('read', 'it')]
    """
    lines = [line.partition(" ") for line in text.splitlines()]
    return [(word, rest.strip()) for word, _, rest in lines]


def _strip(looks: Sequence[Look], items: int) -> str:
    values = contrast(looks)
    size = next((_size(one.plane.shape) for one in looks if one.plane is not None), (SIDE, SIDE))
    figures = []
    for one in looks:
        whole = ": ".join(filter(None, [printable(one.name), one.about, printable(one.problem)]))
        picture = _crossed(*size) if one.plane is None else _image(one, values)
        caption = escape(_end(os.path.basename(printable(one.name)), 13))
        figures.append(f'<figure title="{escape(whole)}">{picture}<figcaption>{caption}</figcaption></figure>')
    return f"<div>{''.join(figures)}</div><small>{escape(_caption(looks, items))}</small>"


def _image(one: Look, values: Contrast) -> str:
    pixels = painted(one, values)
    height, width = _size(pixels.shape)
    return f'<img src="{data_uri(pixels)}" width="{width}" height="{height}" alt="{escape(printable(one.name))}">'


def _size(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of a thumbnail; a thin one is drawn thicker."""
    height, width = (max(THIN, round(n * SIDE / max(shape[:2]))) for n in shape[:2])
    return height, width


def _crossed(height: int, width: int) -> str:
    """The place of a picture that cannot be made: an empty box with a cross."""
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="no picture" stroke="currentColor" fill="none">'
        f'<rect x="1" y="1" width="{width - 2}" height="{height - 2}" stroke-dasharray="4 3" opacity=".6"/>'
        f'<path d="M4 4L{width - 4} {height - 4}M{width - 4} 4L4 {height - 4}" stroke="{BAD_COLOUR}"/></svg>'
    )


def _caption(looks: Sequence[Look], items: int) -> str:
    """How many of how many, in which contrast, and what could not be shown."""
    of = f"{count(len(looks))} of {plural(items, 'item')}"
    bad = [one for one in looks if one.plane is None]
    without = ""
    if bad:
        which = "first " if len(bad) > 1 else ""
        problem = f"{printable(bad[0].name)}: {printable(bad[0].problem)}"
        without = f"; {count(len(bad))} without a picture, {which}{problem}"
    return f"{of}, {contrast(looks).caption}{without}"


@dataclass(frozen=True, repr=False)
class Preview:
    """A contact sheet; a notebook shows it.  Made by ``preview``.

    Attributes
    ----------
    png : bytes
        The picture, as a PNG file.
    caption : str
        Which items it shows, and in which contrast.
    """

    png: bytes
    caption: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a PNG file.

        Parameters
        ----------
        path : path
            Ends in ``.png``; an earlier contact sheet of that name is replaced.

        Raises
        ------
        UsageError
            The name does not end in ``.png``.
        OutputExistsError
            There is something else than an earlier contact sheet under that name.
        NoSpaceError, OutputError
            It cannot be written.

        Examples
        --------
        >>> Preview(b"the bytes of a PNG", "3 of 3 items").save("sheet.png")
        """
        out = os.fspath(path)
        if not out.lower().endswith(".png"):
            raise UsageError(f"the picture {printable(out)!r} does not end in .png", "let it end in .png")
        taken = os.path.lexists(out)
        if taken and not _is_sheet(out):
            raise OutputExistsError(
                f"{shown(out)} exists and is no contact sheet of daskstack's; it was not touched", "choose another name"
            )
        fresh = f"{out}.{uuid.uuid4().hex}.tmp"
        with files.writing(out):
            try:
                files.write_new(fresh, self.png)
                (os.replace if taken else files.move_new)(fresh, out)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(fresh)

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"<daskstack.Preview: {self.caption}>"


def _is_sheet(path: str) -> bool:
    try:
        return f"Software\0{SOFTWARE}".encode() in files.read_regular(path, 1 << 30)[:4096]
    except OSError:
        return False


def sheet(looks_of: Callable[[int, int], Iterable[Look]], n: int, grid: Sequence[int], title: str) -> Preview:
    """The contact sheet of ``n`` of the items that ``looks_of`` gives when it is told how many, and how large.

    Raises
    ------
    UsageError
        matplotlib is not installed, or ``n`` is no sensible number of items.
    """
    if not 1 <= n <= MOST_IN_A_SHEET:
        raise UsageError(f"n={n}", f"give a number of items, from 1 to {MOST_IN_A_SHEET}")
    matplotlib = needed("matplotlib", "notebook", "preview")
    looks = list(looks_of(n, SHEET_SIDE))
    caption = _caption(looks, math.prod(grid))
    written = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"text.usetex": False}):
        warnings.simplefilter("ignore")  # of letters that the font lacks
        figure = _drawn(looks, printable(title), caption)
        figure.savefig(written, format="png", metadata={"Software": SOFTWARE})
    return Preview(written.getvalue(), caption)


def _drawn(looks: Sequence[Look], title: str, caption: str) -> Any:
    """A figure of all pictures, as square as their number allows."""
    from matplotlib.figure import Figure

    values = contrast(looks)
    columns = len(looks) if len(looks) <= MOST_IN_A_ROW else math.ceil(math.sqrt(len(looks)))
    rows, width = -(-len(looks) // columns), max(columns, 3)
    flat = max((one.plane.shape[0] / one.plane.shape[1] for one in looks if one.plane is not None), default=1.0)
    flat = min(max(flat, 1 / 8), 1)
    height = flat * INCHES * width / columns + 0.4
    figure = Figure(figsize=(width * INCHES, rows * height + 0.75), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.supxlabel(textwrap.fill(caption, width * 33), fontsize=7, parse_math=False)
    for one, axes in zip(looks, figure.subplots(rows, columns, squeeze=False).flat, strict=False):
        _draw(axes, one, values, flat)
    for axes in figure.axes[len(looks) :]:
        axes.set_axis_off()
    return figure


def _draw(axes: Any, one: Look, values: Contrast, flat: float) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    text = "\n".join(_end(part, 30) for part in (printable(one.name), one.about) if part)
    axes.set_title(text, fontsize=6, parse_math=False)
    if one.plane is None:
        axes.set_box_aspect(flat)
        axes.plot([0, 1], [0, 1], [0, 1], [1, 0], color=BAD_COLOUR, linewidth=1, alpha=0.3)
        problem = textwrap.fill(_end(printable(one.problem), 120), 24)
        axes.text(0.5, 0.5, problem, ha="center", va="center", fontsize=6, parse_math=False)
        return
    pixels = painted(one, values)
    thin = max(pixels.shape[:2]) > 8 * min(pixels.shape[:2])
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto" if thin else "equal")
    if thin:
        axes.set_box_aspect(1 / 8 if pixels.shape[1] > pixels.shape[0] else 8)


def _end(text: str, most: int) -> str:
    """A text, or its end: names differ there."""
    return text if len(text) <= most else "…" + text[1 - most :]
