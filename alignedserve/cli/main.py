"""The command `alignedserve`. A subcommand's module is imported when the subcommand is used."""

from __future__ import annotations

import importlib

import click

import alignedserve
from alignedserve.cli.command import Group

# The line of help and the module of each command, in the order in which help lists them.
COMMANDS = {
    "serve": ("Serve a model over the OpenAI API.", "alignedserve.cli.serve"),
    "run": ("Serve a model, and chat with it.", "alignedserve.cli.run"),
    "models": ("List, download and delete models.", "alignedserve.cli.models"),
    "chat": ("Chat with a running server.", "alignedserve.cli.chat"),
    "generate": ("Answer prompts without a server.", "alignedserve.cli.generate"),
    "batch": ("Run files of requests as batch jobs.", "alignedserve.cli.batch"),
    "doctor": ("Check whether a model will run on this machine.", "alignedserve.cli.doctor.command"),
    "top": ("Watch a running server.", "alignedserve.cli.top"),
    "restart": ("Restart all processes of a running server.", "alignedserve.cli.restart"),
    "simulate": ("Simulate a cluster under your traffic.", "alignedserve.cli.simulate.command"),
    "bench": ("Measure the engine or servers.", "alignedserve.cli.bench"),
    "profile": ("Measure iteration times for the cost model.", "alignedserve.cli.profile"),
    "predict-lengths": ("Evaluate the length predictor.", "alignedserve.cli.predict_lengths"),
    "dev": ("Commands for developers of AlignedServe.", "alignedserve.cli.dev"),
}
# Former names, which help does not list.
FORMER = {"replay": "alignedserve.cli.replay", "vopr": "alignedserve.cli.vopr"}


class LazyGroup(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        module = COMMANDS[name][1] if name in COMMANDS else FORMER.get(name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (text, _) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"auto_envvar_prefix": "ALIGNEDSERVE", "max_content_width": 100},
    epilog="alignedserve COMMAND --help shows a command's options, and --help=WORD those with a word in their names.",
)
@click.version_option(alignedserve.__version__)
def cli() -> None:
    """Serve large language models for real-time chat and best-effort batch jobs at the same time."""


def main() -> None:
    cli()
