"""The options of the commands: how each is written, checked and explained; in the API they have the same names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

READ_OPTIONS = ("dtype", "series", "level", "pages")
STACK_OPTIONS = ("files_from", "labels", "label", "sort_by", "axes", "join", *READ_OPTIONS, "files_per_block", "limit")
STORE_OPTIONS = (
    "threads",
    "scheduler",
    "workers",
    "memory_limit",
    "overwrite",
    "chunks",
    "shards",
    "compression",
    "zarr_format",
    "cluster",
    "jobs",
    "cores",
    "memory",
    "walltime",
    "queue",
    "account",
    "interface",
    "cluster_options",
    "insecure",
    "wait",
)

Command = Callable[..., Any]


def stack_options(command: Command) -> Command:
    """The options that say which files, in which order, as what."""
    options = [
        click.option(
            "--files-from",
            metavar="FILE",
            shell_complete=file_names,
            help="Take the files listed in FILE, a line each (- is stdin), in that order.",
        ),
        click.option(
            "--labels",
            metavar="REGEX",
            help="Labels from names: a regular expression with named groups, as in 't(?P<t>\\d+)'; or a CSV file.",
        ),
        click.option(
            "--label",
            multiple=True,
            metavar="NAME=REGEX",
            help="One label: whether REGEX is found, or its group's text. Repeatable.",
        ),
        click.option("--sort-by", multiple=True, metavar="LABEL", help="Sort by this label. Repeatable."),
        click.option(
            "--axes",
            metavar="LABEL,LABEL",
            callback=_words,
            help="Labels that make a grid, slowest first: t,c gives (t, c, y, x).",
        ),
        click.option(
            "--join",
            type=click.Choice(["stack", "concat"]),
            default="stack",
            show_default=True,
            help="Each file is an item, or its pages (entries along axis 0) are.",
        ),
        click.option("--dtype", metavar="NAME", help="Cast all numbers, as in float32; each must be held exactly."),
        click.option(
            "--series", metavar="N|NAME", callback=_number_or_name, help="TIFF: which series of pages each file's is."
        ),
        click.option(
            "--level", type=click.IntRange(min=0), metavar="N", help="TIFF: which resolution of a pyramid; default 0."
        ),
        click.option("--pages", metavar="N|SLICE", help="TIFF: which pages of each file, as in 3 or 0:10:2."),
        click.option(
            "--files-per-block",
            type=click.IntRange(min=1),
            metavar="N",
            help="Files that one task reads; default: 16 MiB of them.",
        ),
        click.option(
            "--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N items only, for a trial."
        ),
    ]
    return _decorated(command, options)


def store_options(command: Command) -> Command:
    """The options that say how the array is stored."""
    options = [
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            metavar="N",
            help="Blocks at work at once; default: the cores it may use.",
        ),
        click.option(
            "--scheduler", metavar="NAME", help="threads, synchronous, processes, tcp://... or a scheduler file."
        ),
        click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Start N worker processes for it."),
        click.option("--chunks", metavar="N,N,...", callback=_sizes, help="Zarr: what is read at once, items first."),
        click.option("--shards", metavar="N,N,...", callback=_sizes, help="Zarr: what one file holds, whole chunks."),
        click.option("--compression", metavar="CODEC", help="Zarr: none, zstd:3, gzip:5, blosc:lz4:5:shuffle, ..."),
        click.option(
            "--zarr-format", type=click.Choice(["2", "3"]), callback=_number, help="Zarr: its version; default 3."
        ),
        click.option("--memory-limit", metavar="SIZE", help='Bound on the data held at once, as in "2 GB".'),
        click.option(
            "--overwrite", is_flag=True, help="Replace an output of daskstack's own, once the new one is complete."
        ),
    ]
    return _decorated(_cluster_options(command), options)


def _cluster_options(command: Command) -> Command:
    """The options that say which jobs of a batch system do the work."""
    which = click.option(
        "--cluster", metavar="NAME", help="Start jobs of slurm, pbs, lsf, sge, ... for it; or be one: srun."
    )
    how = [
        click.option(
            "--insecure", is_flag=True, default=None, help="Let traffic be unencrypted where it cannot be (srun)."
        ),
        click.option(
            "--wait", type=float, metavar="SECONDS", help="How long a cluster may be without workers; default 60, 600."
        ),
    ]
    return which(job_options(_decorated(command, how)))


def job_options(command: Command) -> Command:
    """The options that say what each job is given."""
    options = [
        click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="How many jobs; default 1."),
        click.option("--cores", type=click.IntRange(min=1), metavar="N", help="Cores of each job."),
        click.option("--memory", metavar="SIZE", help="Memory of each job, as in 16GB."),
        click.option("--walltime", metavar="TIME", help="Time limit of each job, as in 01:00:00."),
        click.option("--partition", "--queue", "queue", metavar="NAME", help="Where the jobs queue."),
        click.option("--account", metavar="NAME", help="Who pays for the jobs."),
        click.option("--interface", metavar="NAME", help="Network interface to listen on, as in ib0; no other is."),
        click.option(
            "--cluster-option",
            "cluster_options",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_named,
            help="Any other argument of dask-jobqueue's class. Repeatable.",
        ),
    ]
    return _decorated(command, options)


def run_options(command: Command) -> Command:
    """The options that say how a build is carried out."""
    options = [
        click.option("--dry-run", is_flag=True, help="Show the plan; the same as daskstack plan."),
        click.option(
            "--on-error",
            type=click.Choice(["raise", "fill"]),
            default="raise",
            show_default=True,
            help="Bad files: an error once all else is done, or items that hold the fill value, on record.",
        ),
        click.option("--part", metavar="I/N", help="Do a part only: 0/16 to 15/16, as many processes as one likes."),
        click.option("--restart", is_flag=True, help="Throw away what an earlier run has kept for this output."),
    ]
    return _decorated(command, options)


def common_options(command: Command) -> Command:
    """What every command takes."""
    options = [
        click.option("-v", "--verbose", is_flag=True, help="Log what is done."),
        click.option("-q", "--quiet", is_flag=True, help="No progress, no result; errors only."),
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
    ]
    return _decorated(command, options)


def json_option(command: Command) -> Command:
    """The option of a command whose result programs may read."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def _decorated(command: Command, options: Sequence[Callable[[Any], Any]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def _sizes(_: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers, separated by commas."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter("write whole numbers with commas, as in 64,64,64", param=parameter) from None


def _words(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Words, separated by commas."""
    return None if text is None else tuple(text.split(","))


def _number(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """A whole number, given as one of several choices."""
    return None if text is None else int(text)


def _named(_: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any] | None:
    """Values by name; JSON where they are, else text."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.BadParameter("write it as NAME=VALUE", param=parameter)
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values or None


def file_names(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """What the shell completes: names of files and folders."""
    return [CompletionItem(begun, type="file")]


def _number_or_name(_: click.Context, __: click.Parameter, text: str | None) -> int | str | None:
    """A whole number, or a text that is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else text
