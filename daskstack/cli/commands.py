"""The commands, each thin over a function of the API."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from daskstack.cli.options import (
    STACK_OPTIONS,
    STORE_OPTIONS,
    common_options,
    file_names,
    job_options,
    json_option,
    run_options,
    stack_options,
    store_options,
)
from daskstack.cli.outcome import fail, reported, say
from daskstack.cli.sources import listed_files, opened, sources_and_out, stack_or_output
from daskstack.errors import BadFilesError, OutputExistsError, UsageError
from daskstack.text import plural, printable, table

if TYPE_CHECKING:
    from daskstack.discover import Listing


@click.command(short_help="What build would do; nothing is written.")
@click.argument("paths", nargs=-1, required=True, metavar="SRC... OUT", shell_complete=file_names)
@click.option("--check", is_flag=True, help="Read every file's header, and name all bad files.")
@json_option
@click.option("--bad", metavar="FILE", help="With --check: list all bad files in FILE, a CSV.")
@stack_options
@store_options
@common_options
def plan(paths: tuple[str, ...], *, check: bool, bad: str | None, **options: Any) -> None:
    """Show what build would do with SRC and OUT; nothing is written but a list that --bad asks for."""
    with reported(options):
        if bad is not None and not check:
            raise UsageError("--bad without --check", "give both")
        if bad is not None and os.path.lexists(bad):
            raise OutputExistsError(f"{bad} exists; it was not touched", "choose another name for --bad")
        *sources, out = sources_and_out(paths, options)
        try:
            _show_plan(listed_files(sources, options), out, options, check=check)
        except BadFilesError as exc:
            raise exc if bad is None else _with_list(exc, bad) from None


@click.command(short_help="Make one array of many files.")
@click.argument("paths", nargs=-1, required=True, metavar="SRC... OUT", shell_complete=file_names)
@stack_options
@store_options
@run_options
@json_option
@common_options
def build(paths: tuple[str, ...], **options: Any) -> None:
    """Make one array, OUT, of the files that SRC stands for.

    OUT has its name only once it is complete. Beside it lie its index
    (which row came from which file), its labels, and how it was made.
    A run that was stopped goes on where it was when the same command is
    given again.
    """
    with reported(options):
        from daskstack.api.building import build_listed
        from daskstack.api.storing import make_how

        *sources, out = sources_and_out(paths, options)
        how = make_how(
            progress=_progress(options),
            on_error=options["on_error"],
            part=options["part"],
            restart=options["restart"],
        )
        if options["dry_run"]:
            _show_plan(listed_files(sources, options), out, options, fill=how.fill, restart=how.restart)
            return
        report = build_listed(
            lambda: listed_files(sources, options),
            lambda listing: opened(listing, options),
            out,
            asked=(sources, sorted((k, v) for k, v in options.items() if k in STACK_OPTIONS)),
            how=how,
            **_store_arguments(options),
        )
        say(_json(report) if options["as_json"] else report, options)


@click.command(short_help="Print a batch script for a build.", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, required=True, metavar="SRC... OUT", type=click.UNPROCESSED)
@click.option(
    "--way",
    type=click.Choice(["array", "scheduler"]),
    default="array",
    show_default=True,
    help="Jobs that each do a part, or one job with a Dask scheduler and workers.",
)
@job_options
def sbatch(arguments: tuple[str, ...], *, way: str, **options: Any) -> None:
    """Print a script for SLURM that builds OUT of SRC; further options are those of build.

    With --cluster-option NAME=VALUE any other option of sbatch.
    """
    with reported(dict.fromkeys(("verbose", "quiet", "debug"), False)):
        from daskstack.batch import script
        from daskstack.jobs import make_jobs

        with build.make_context("build", list(arguments)):  # what build would refuse is refused now
            pass
        jobs = make_jobs("slurm", **options)
        click.echo(script(jobs, arguments, way=way), nl=False)  # type: ignore[arg-type]  # a cluster is named


@click.command(short_help="What a source or an output is.")
@click.argument("paths", nargs=-1, metavar="SRC... | OUT", shell_complete=file_names)
@stack_options
@json_option
@common_options
def info(paths: tuple[str, ...], **options: Any) -> None:
    """Show what files would make as a stack, or how an output was made."""
    with reported(options):
        shown = stack_or_output(paths, options)
        click.echo(_json(shown) if options["as_json"] else repr(shown).partition("\n")[2])


@click.command(short_help="A picture of what is in it: a contact sheet.")
@click.argument("paths", nargs=-1, metavar="SRC... | OUT", shell_complete=file_names)
@click.option(
    "-o",
    "--picture",
    default="preview.png",
    show_default=True,
    metavar="PNG",
    help="Where it goes.",
    shell_complete=file_names,
)
@click.option("-n", "items", type=click.IntRange(1, 400), default=16, show_default=True, help="How many items.")
@stack_options
@common_options
def preview(paths: tuple[str, ...], *, picture: str, items: int, **options: Any) -> None:
    """Draw evenly spaced items of a source or an output on one sheet."""
    with reported(options):
        sheet = stack_or_output(paths, options).preview(items)
        sheet.save(picture)
        say(table([("done", f"{printable(picture)}: {sheet.caption}")]), options)


@click.command(short_help="Whether an output is what it should be.")
@click.argument("out", metavar="OUT", shell_complete=file_names)
@click.option("--data", is_flag=True, help="Compare each item's checksum.")
@click.option("--inputs", is_flag=True, help="Read the files again, and compare the pixels.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Look at N items only, chosen at random.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="S", help="Chooses other ones.")
@json_option
@common_options
def verify(out: str, *, as_json: bool, **options: Any) -> None:
    """Compare OUT with its record: structure, sizes and metadata.

    With --data its items, with --inputs the files it was made of. Status:
    0 equal, 1 different, 3 could not check.
    """
    with reported(options):
        from daskstack.verification import verified

        chosen = {name: options[name] for name in ("data", "inputs", "sample", "seed")}
        report = verified(out, **chosen, progress=_progress(options))
        text = _json(report) if as_json else str(report)
        if as_json or not report.status:
            say(text, options)
        if report.status:
            fail("" if as_json else text, report.status)


@click.command(short_help="Try it on files it makes itself.")
@click.option(
    "--files", "count", type=click.IntRange(min=64), default=3000, show_default=True, help="How many TIFF files."
)
@common_options
def demo(count: int, **options: Any) -> None:
    """Make a folder of small TIFF files, build a .npy and a Zarr of them, compare, and show the figures."""
    with reported(options):
        from daskstack.demo import run_demo

        run_demo(count, say=lambda text: say(text, options), progress=_progress(options))


def _show_plan(
    listing: Listing,
    out: str,
    options: dict[str, Any],
    *,
    check: bool = False,
    fill: bool = False,
    restart: bool = False,
) -> None:
    """Show the plan, what a sample of the files and a finished output say of it, and the bad files met."""
    from daskstack.checks import check_output
    from daskstack.reads import ADVICE_FILES

    stack = opened(listing, options)
    made = stack.plan(out, **_store_arguments(options))
    finished = check_output(made, stack, fill=fill, restart=restart)
    measured, met = stack.measured(made)
    if options["as_json"]:
        click.echo(json.dumps({**measured.as_dict(), "was_there": finished is not None}, indent=1))
    else:
        click.echo("\n".join(str(part) for part in (measured, finished) if part is not None))
    if check:
        stack.check(met)
        say("Nothing was written; every header is as due.", options | {"quiet": options["as_json"]})
        return
    bad = {b.path: b for b in (*stack.condemned(), *met)}
    if bad:
        found = f"{plural(len(bad), 'bad file')} among those looked at; nothing was written"
        raise BadFilesError(found, ADVICE_FILES, list(bad.values()))
    say("Nothing was written. --check reads every header first.", options | {"quiet": options["as_json"]})


def _with_list(exc: BadFilesError, path: str) -> BadFilesError:
    """The same report, all its files in a new CSV."""
    from daskstack.files import write_new, writing
    from daskstack.report import bad_files_csv

    with writing(path):
        write_new(path, bad_files_csv(exc.files))
    return BadFilesError(exc.message, exc.advice, exc.files, path)


def _progress(options: dict[str, Any]) -> bool | None:
    """Whether progress is shown: as the API decides, but for --quiet."""
    return False if options["quiet"] else None


def _store_arguments(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in STORE_OPTIONS}


def _json(shown: Any) -> str:
    return json.dumps(shown.as_dict(), indent=1)
