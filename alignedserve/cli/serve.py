"""`alignedserve serve`: the whole system on this machine, or on a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

import click

from alignedserve.cli.options import Command, EngineCommand, options_of
from alignedserve.launch.settings import NO_FLAGS, sections, settings_of
from alignedserve.process.whole_lines import write_whole_lines


def serve_options(command: Command) -> Command:
    for section in reversed([*sections()]):
        command = options_of(section.config_class, NO_FLAGS, section.prefix)(command)
    return click.argument("model", required=False)(command)


@click.command("serve", cls=EngineCommand)
@serve_options
def command(model: str | None, **options: Any) -> None:
    """Serve MODEL (the demo model if none is named) behind the OpenAI API."""
    from alignedserve.launch.serve import serve

    write_whole_lines()
    try:
        serve(settings_of(model, options), _say)
    except RuntimeError as error:
        # This is a ProcessFailed; importing that by name would import ray for every --help.
        raise click.ClickException(str(error)) from error


def _say(line: str) -> None:
    try:
        click.echo(line)
    except OSError:
        # The terminal has closed, or the reader of the output is gone. Later lines are in the files of --log-dir only.
        for number in (1, 2):
            _forget_output(number)


def _forget_output(number: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), number)
