"""`alignedserve dev replay`: checks that this version schedules like the version that wrote an event log."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from alignedserve.cli.command import Command
from alignedserve.cli.progress import busy


@click.command("replay", cls=Command)
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def command(log: Path) -> None:
    """Check that an event log leads to the same orders.

    A new router gets the events in LOG, and its orders are compared with the recorded ones. LOG is a file of
    `alignedserve serve --event-log DIR`. The exit status is 1 if the orders differ.
    """
    from alignedserve.router.replay_diff import compare, format_divergence

    with busy("Replaying"):
        found = compare(log)
    if found.divergence:
        click.echo(f"{found.num_events - 1} events, the same orders; then another: - then, + now")
        for line in format_divergence(found.divergence):
            click.echo(line)
        sys.exit(1)
    click.echo(f"{found.num_events} events, the same orders")
    if found.num_torn_bytes:
        click.echo(f"The last {found.num_torn_bytes} bytes are part of a record, and were left out")
    elif found.num_unanswered:
        click.echo("The log ends before the orders that follow from its last event")
