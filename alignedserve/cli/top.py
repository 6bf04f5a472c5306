"""`alignedserve top`: shows the state of a server in a terminal. It uses the same API as the page (gateway/page)."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

import click

from alignedserve.cli.batch import DEFAULT_URL, server_options
from alignedserve.cli.command import Command


@click.command("top", cls=Command)
@click.option(
    "--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="seconds between updates"
)
@server_options(DEFAULT_URL)
def command(url: str, api_key: str | None, every: float) -> None:
    """Show the classes, processes and batch jobs of a running server. Press q to quit."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("needs a terminal; programs can read /metrics")
    from rich.console import Console
    from rich.live import Live

    from alignedserve.cli.http import http_client
    from alignedserve.cli.top_reading import Away, ReadingHistory, look
    from alignedserve.cli.top_view import screen

    console, history = Console(), ReadingHistory()
    with (
        http_client(url, api_key) as http,
        _keys(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        problem: str | None = None
        is_over = False
        live.update(screen(history, url, problem, console.height), refresh=True)
        while not is_over:
            try:
                history.add(look(http))
                problem = None
            except Away as error:
                problem = str(error)
            live.update(screen(history, url, problem, console.height), refresh=True)
            is_over = _is_quit_within(every)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Reads keys as they are pressed, without showing them. Ctrl-C ends the block."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    except KeyboardInterrupt:
        return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit_within(seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            # Empty if the terminal is closed.
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b"\x04", b""):
                return True
    return False
