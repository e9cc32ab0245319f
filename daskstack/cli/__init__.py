"""The command line: the functions of the API, one clear message an error, and exit statuses."""

from __future__ import annotations

import click

import daskstack
from daskstack.cli import commands

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


@click.group(context_settings=CONTEXT, no_args_is_help=True)
@click.version_option(daskstack.__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Many image or array files as one array on disk.

    Sources first, the output last, as with cp. SRC is folders, files and
    quoted patterns ('frames/**/*.tif'); OUT ends in .npy or .zarr.
    """


main.add_command(commands.plan)
main.add_command(commands.build)
main.add_command(commands.sbatch)
main.add_command(commands.info)
main.add_command(commands.preview)
main.add_command(commands.verify)
main.add_command(commands.demo)
