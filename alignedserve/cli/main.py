from __future__ import annotations

import importlib
import sys

import click

import alignedserve

# The module of each command, and its line of help.
_COMMANDS = {
    "generate": "alignedserve.cli.generate",
    "batch": "alignedserve.cli.batch",
    "bench": "alignedserve.cli.bench",
    "chat": "alignedserve.cli.chat",
    "doctor": "alignedserve.cli.doctor.command",
    "serve": "alignedserve.cli.serve",
    "profile": "alignedserve.cli.profile",
    "predict-lengths": "alignedserve.cli.predict_lengths",
    "replay": "alignedserve.cli.replay",
    "restart": "alignedserve.cli.restart",
    "simulate": "alignedserve.cli.simulate",
    "top": "alignedserve.cli.top",
    "vopr": "alignedserve.cli.vopr",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[name]).command
        return command


@click.group(cls=LazyGroup, context_settings={"auto_envvar_prefix": "ALIGNEDSERVE"})
@click.version_option(alignedserve.__version__)
def cli() -> None:
    """Serve large language models to real-time chat and best-effort documents at once."""


def main() -> None:
    try:
        cli()
    except ValueError as error:
        # An error of the user is printed in one line; any other error keeps its traceback.
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
