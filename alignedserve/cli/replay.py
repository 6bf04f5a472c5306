"""`alignedserve replay`: whether this version schedules as the version that wrote an event log did."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("replay")
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def command(log: Path) -> None:
    """Tell a new router what LOG says that one was told, and compare its orders.

    LOG is a file of `alignedserve serve --event-log DIR`. Exit status 1: the orders differ."""
    from alignedserve.router.replay_diff import compare, format_divergence

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
