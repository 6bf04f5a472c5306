"""`alignedserve serve`: runs the whole system on this machine or on a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

import click

from alignedserve.cli.help_groups import SERVE
from alignedserve.cli.options import Decorated, EngineCommand, options_of
from alignedserve.launch.settings import NO_FLAGS, sections, settings_of
from alignedserve.process.whole_lines import write_whole_lines


def serve_options(command: Decorated) -> Decorated:
    """Adds the argument MODEL and all options of `serve`."""
    for section in reversed([*sections()]):
        command = options_of(section.config_class, NO_FLAGS, section.prefix)(command)
    return click.argument("model", required=False)(command)


@click.command("serve", cls=EngineCommand, groups=SERVE)
@serve_options
def command(model: str | None, **options: Any) -> None:
    """Serve MODEL over the OpenAI API. MODEL is a directory or a name on the Hugging Face hub.

    Without MODEL, the demo model is served.
    """
    settings = settings_of(model, options)
    # Values are checked before anything slow is imported.
    from alignedserve.launch.serve import serve

    write_whole_lines()
    try:
        serve(settings, _say)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


def _say(line: str) -> None:
    try:
        click.echo(line)
    except OSError:
        # The terminal is closed, or the reader of the output exited. Later lines are in the files of --log-dir only.
        for number in (1, 2):
            _forget_output(number)


def _forget_output(number: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)
