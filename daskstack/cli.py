"""The command line: the functions of the API, one clear message an error, and exit statuses.

0 done and durable, 1 an error, 2 usage, 75 stopped; of verify 0 equal, 1 different, 3 could not check.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

import daskstack
from daskstack.errors import SHOWN_BAD_FILES, BadFilesError, DaskstackError, OutputExistsError, StackWarning, UsageError
from daskstack.files import STOPS
from daskstack.progress import in_terminal
from daskstack.text import plural, printable, table

if TYPE_CHECKING:
    from daskstack.api import Stack
    from daskstack.discover import Listing
    from daskstack.output import Output

ERROR, USAGE, STOPPED = 1, 2, 75
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}

PART_OPTIONS = ("series", "level", "pages")
READ_OPTIONS = ("dtype", *PART_OPTIONS)
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

COLOURS = {"done": "green", "equal:": "green", "next": "cyan", "warning:": "yellow"}
COLOURS |= dict.fromkeys(("error:", "different:", "stopped"), "red")
COLOURED = rf"^({'|'.join(COLOURS)})(?= )"

Command = Callable[..., Any]


class _Stopped(BaseException):
    """A signal to stop; no Exception, so that nothing on the way takes it for a failure of its own."""


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


def _file_names(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """What the shell completes: names of files and folders."""
    return [CompletionItem(begun, type="file")]


def _number_or_name(_: click.Context, __: click.Parameter, text: str | None) -> int | str | None:
    """A whole number, or a text that is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def _stack_options(command: Command) -> Command:
    """The options that say which files, in which order, as what."""
    options = [
        click.option(
            "--files-from",
            metavar="FILE",
            shell_complete=_file_names,
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


def _store_options(command: Command) -> Command:
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
    options = [
        click.option(
            "--cluster", metavar="NAME", help="Start jobs of slurm, pbs, lsf, sge, ... for it; or be one: srun."
        ),
        *_job_options(),
        click.option(
            "--insecure", is_flag=True, default=None, help="Let traffic be unencrypted where it cannot be (srun)."
        ),
        click.option(
            "--wait", type=float, metavar="SECONDS", help="How long a cluster may be without workers; default 60, 600."
        ),
    ]
    return _decorated(command, options)


def _job_options() -> list[Callable[[Any], Any]]:
    """The options that say what each job is given."""
    return [
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


def _with_job_options(command: Command) -> Command:
    return _decorated(command, _job_options())


def _run_options(command: Command) -> Command:
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


def _common_options(command: Command) -> Command:
    """What every command takes."""
    options = [
        click.option("-v", "--verbose", is_flag=True, help="Log what is done."),
        click.option("-q", "--quiet", is_flag=True, help="No progress, no result; errors only."),
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
    ]
    return _decorated(command, options)


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def _decorated(command: Command, options: Sequence[Callable[[Any], Any]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT, no_args_is_help=True)
@click.version_option(daskstack.__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Many image or array files as one array on disk.

    Sources first, the output last, as with cp. SRC is folders, files and
    quoted patterns ('frames/**/*.tif'); OUT ends in .npy or .zarr.
    """


@main.command(short_help="What build would do; nothing is written.")
@click.argument("paths", nargs=-1, required=True, metavar="SRC... OUT", shell_complete=_file_names)
@click.option("--check", is_flag=True, help="Read every file's header, and name all bad files.")
@_json_option
@click.option("--bad", metavar="FILE", help="With --check: list all bad files in FILE, a CSV.")
@_stack_options
@_store_options
@_common_options
def plan(paths: tuple[str, ...], *, check: bool, bad: str | None, **options: Any) -> None:
    """Show what build would do with SRC and OUT; nothing is written but a list that --bad asks for."""
    with _reported(options):
        if bad is not None and not check:
            raise UsageError("--bad without --check", "give both")
        if bad is not None and os.path.lexists(bad):
            raise OutputExistsError(f"{bad} exists; it was not touched", "choose another name for --bad")
        *sources, out = _sources_and_out(paths, options)
        try:
            _plan(_listing(sources, options), out, options, check=check)
        except BadFilesError as exc:
            raise exc if bad is None else _with_list(exc, bad) from None


@main.command(short_help="Make one array of many files.")
@click.argument("paths", nargs=-1, required=True, metavar="SRC... OUT", shell_complete=_file_names)
@_stack_options
@_store_options
@_run_options
@_json_option
@_common_options
def build(paths: tuple[str, ...], **options: Any) -> None:
    """Make one array, OUT, of the files that SRC stands for.

    OUT has its name only once it is complete. Beside it lie its index
    (which row came from which file), its labels, and how it was made.
    A run that was stopped goes on where it was when the same command is
    given again.
    """
    with _reported(options):
        from daskstack.api import build_listed, make_how

        *sources, out = _sources_and_out(paths, options)
        how = make_how(
            progress=False if options["quiet"] else None,
            on_error=options["on_error"],
            part=options["part"],
            restart=options["restart"],
        )
        if options["dry_run"]:
            _plan(_listing(sources, options), out, options, fill=how.fill, restart=how.restart)
            return
        report = build_listed(
            lambda: _listing(sources, options),
            lambda listing: _opened(listing, options),
            out,
            asked=(sources, sorted((k, v) for k, v in options.items() if k in STACK_OPTIONS)),
            how=how,
            **_store_arguments(options),
        )
        _say(_json(report) if options["as_json"] else report, options)


@main.command(short_help="Print a batch script for a build.", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, required=True, metavar="SRC... OUT", type=click.UNPROCESSED)
@click.option(
    "--way",
    type=click.Choice(["array", "scheduler"]),
    default="array",
    show_default=True,
    help="Jobs that each do a part, or one job with a Dask scheduler and workers.",
)
@_with_job_options
def sbatch(arguments: tuple[str, ...], *, way: str, **options: Any) -> None:
    """Print a script for SLURM that builds OUT of SRC; further options are those of build.

    With --cluster-option NAME=VALUE any other option of sbatch.
    """
    with _reported(dict.fromkeys(("verbose", "quiet", "debug"), False)):
        from daskstack.batch import script
        from daskstack.jobs import make_jobs

        with build.make_context("build", list(arguments)):  # what build would refuse is refused now
            pass
        jobs = make_jobs("slurm", **options)
        click.echo(script(jobs, arguments, way=way), nl=False)  # type: ignore[arg-type]  # a cluster is named


@main.command(short_help="What a source or an output is.")
@click.argument("paths", nargs=-1, metavar="SRC... | OUT", shell_complete=_file_names)
@_stack_options
@_json_option
@_common_options
def info(paths: tuple[str, ...], **options: Any) -> None:
    """Show what files would make as a stack, or how an output was made."""
    with _reported(options):
        shown = _stack_or_output(paths, options)
        click.echo(_json(shown) if options["as_json"] else repr(shown).partition("\n")[2])


@main.command(short_help="A picture of what is in it: a contact sheet.")
@click.argument("paths", nargs=-1, metavar="SRC... | OUT", shell_complete=_file_names)
@click.option(
    "-o",
    "--picture",
    default="preview.png",
    show_default=True,
    metavar="PNG",
    help="Where it goes.",
    shell_complete=_file_names,
)
@click.option("-n", "items", type=click.IntRange(1, 400), default=16, show_default=True, help="How many items.")
@_stack_options
@_common_options
def preview(paths: tuple[str, ...], *, picture: str, items: int, **options: Any) -> None:
    """Draw evenly spaced items of a source or an output on one sheet."""
    with _reported(options):
        sheet = _stack_or_output(paths, options).preview(items)
        sheet.save(picture)
        _say(table([("done", f"{printable(picture)}: {sheet.caption}")]), options)


@main.command(short_help="Whether an output is what it should be.")
@click.argument("out", metavar="OUT", shell_complete=_file_names)
@click.option("--data", is_flag=True, help="Compare each item's checksum.")
@click.option("--inputs", is_flag=True, help="Read the files again, and compare the pixels.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Look at N items only, chosen at random.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="S", help="Chooses other ones.")
@_json_option
@_common_options
def verify(out: str, *, as_json: bool, **options: Any) -> None:
    """Compare OUT with its record: structure, sizes and metadata.

    With --data its items, with --inputs the files it was made of. Status:
    0 equal, 1 different, 3 could not check.
    """
    with _reported(options):
        from daskstack.verification import verified

        chosen = {name: options[name] for name in ("data", "inputs", "sample", "seed")}
        report = verified(out, **chosen, progress=False if options["quiet"] else None)
        text = _json(report) if as_json else str(report)
        if as_json or not report.status:
            _say(text, options)
        if report.status:
            _fail("" if as_json else text, report.status)


@main.command(short_help="Try it on files it makes itself.")
@click.option(
    "--files", "count", type=click.IntRange(min=64), default=3000, show_default=True, help="How many TIFF files."
)
@_common_options
def demo(count: int, **options: Any) -> None:
    """Make a folder of small TIFF files, build a .npy and a Zarr of them, compare, and show the figures."""
    with _reported(options):
        from daskstack.demo import run_demo

        run_demo(count, say=lambda text: _say(text, options), progress=False if options["quiet"] else None)


def _stack_or_output(paths: tuple[str, ...], options: dict[str, Any]) -> Stack | Output:
    """The output of that name, else what the files of those names make."""
    from daskstack.output import is_output, open_output

    made = len(paths) == 1 and is_output(paths[0])
    return open_output(paths[0]) if made else _opened(_listing(paths, options), options)


def _json(shown: Any) -> str:
    return json.dumps(shown.as_dict(), indent=1)


def _plan(
    listing: Listing,
    out: str,
    options: dict[str, Any],
    *,
    check: bool = False,
    fill: bool = False,
    restart: bool = False,
) -> None:
    from daskstack.checks import check_output

    stack = _opened(listing, options)
    made = stack.plan(out, **_store_arguments(options))
    finished = check_output(made, stack, fill=fill, restart=restart)
    measured, met = stack.measured(made)
    if options["as_json"]:
        click.echo(json.dumps({**measured.as_dict(), "was_there": finished is not None}, indent=1))
    else:
        click.echo("\n".join(str(part) for part in (measured, finished) if part is not None))
    if check:
        stack.check(met)
        _say("Nothing was written; every header is as due.", options | {"quiet": options["as_json"]})
        return
    bad = {b.path: b for b in (*stack.condemned(), *met)}
    if bad:
        found = f"{plural(len(bad), 'bad file')} among those looked at; nothing was written"
        raise BadFilesError(found, "mend or leave out these files", list(bad.values()))
    _say("Nothing was written. --check reads every header first.", options | {"quiet": options["as_json"]})


def _with_list(exc: BadFilesError, path: str) -> BadFilesError:
    """The same report, all its files in a new CSV."""
    from daskstack.files import write_new, writing
    from daskstack.report import bad_files_csv

    with writing(path):
        write_new(path, bad_files_csv(exc.files))
    return BadFilesError(exc.message, exc.advice, exc.files, path)


def _store_arguments(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in STORE_OPTIONS}


def _sources_and_out(paths: tuple[str, ...], options: dict[str, Any]) -> tuple[str, ...]:
    if len(paths) == 1 and not options["files_from"]:
        raise UsageError(f"{paths[0]!r} alone: sources and an output are due", "daskstack build SRC... OUT")
    return paths


def _listing(sources: tuple[str, ...] | list[str], options: dict[str, Any]) -> Listing:
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


def _opened(listing: Listing, options: dict[str, Any]) -> Stack:
    from daskstack.api import limited, open_stack

    if options["labels"] and options["label"]:
        raise UsageError("--labels and --label are both given", "use one of them")
    labels: Any = options["labels"]
    if options["label"]:
        pairs = [text.partition("=") for text in options["label"]]
        for name, equals, _ in pairs:
            if not equals:
                raise UsageError(f"--label {name} has no =", "write it as NAME=REGEX")
        if len({name for name, _, _ in pairs}) < len(pairs):
            raise UsageError(f"--label gives a name twice: {', '.join(name for name, _, _ in pairs)}", "name each once")
        labels = {name: regex for name, _, regex in pairs}
    stack = open_stack(
        listing,
        labels=labels,
        sort_by=options["sort_by"] or None,
        axes=options["axes"],
        join=options["join"],
        **{name: options[name] for name in READ_OPTIONS},
        files_per_block=options["files_per_block"],
    )
    return limited(stack, options["limit"])


def _say(text: object, options: dict[str, Any]) -> None:
    """Tell what was done; that nobody can hear it does not undo it."""
    if not options["quiet"]:
        try:
            click.echo(_coloured(str(text), sys.stdout))
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _reported(options: dict[str, Any]) -> Iterator[None]:
    """Turn what goes wrong into one message on stderr and an exit status."""
    level = logging.DEBUG if options["verbose"] else logging.ERROR if options["quiet"] else logging.WARNING
    logger = logging.getLogger("daskstack")
    logger.setLevel(level)
    if not logger.handlers:  # not of the root, which distributed would fill with all that it does
        logger.addHandler(logging.StreamHandler())
    warnings.showwarning = _show_warning
    if options["quiet"]:
        warnings.simplefilter("ignore", StackWarning)
    try:
        with _stopping():
            yield
        _let_go_of_streams()
    except DaskstackError as exc:
        if options["debug"]:
            raise
        kept = "".join(f"\nkept  {note}; the same command goes on" for note in getattr(exc, "__notes__", []))
        if isinstance(exc, BadFilesError) and options["verbose"]:
            for bad in exc.files[SHOWN_BAD_FILES:]:
                click.echo(f"bad   {bad}", err=True)
        _fail(f"error: {exc}{kept}", USAGE if isinstance(exc, UsageError) else ERROR)
    except _Stopped as exc:
        command = shlex.join(["daskstack", *sys.argv[1:]])
        kept = "; ".join(getattr(exc, "__notes__", ["nothing was kept"]))
        _fail(f"stopped ({exc}): {kept}\nnext  {command}", STOPPED)
    except BrokenPipeError:  # the reader of our output went away, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ERROR)
    except Exception as exc:
        if options["debug"]:
            raise
        kept = "".join(f"\nkept  {note}" for note in getattr(exc, "__notes__", []))
        what = f"error: {type(exc).__name__}: {exc}{kept}"
        _fail(f"{what}\nnext  --debug shows where; if daskstack is at fault, report it", ERROR)


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
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _fail(message: str, status: int) -> None:
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
