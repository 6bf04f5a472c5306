"""`alignedserve dev`: commands for developers of AlignedServe."""

from __future__ import annotations

import click

from alignedserve.cli import replay, vopr
from alignedserve.cli.command import Group


@click.group("dev", cls=Group)
def command() -> None:
    """Test and debug AlignedServe itself."""


command.add_command(replay.command)
command.add_command(vopr.command)
