"""`alignedserve restart`: replaces every process of a running system, one after the other, under load."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import click

from alignedserve.cli.command import Command
from alignedserve.gateway.config import HttpConfig
from alignedserve.launch.control import ASK_RESTART, DONE, FAILED, check_directory, control_path


@click.command("restart", cls=Command)
@click.option("--host", default=HttpConfig.host, show_default=True, help="address of the system")
@click.option("--port", default=HttpConfig.port, show_default=True, help="port of the system")
def command(host: str, port: int) -> None:
    """Replace every process of a system that `serve` started on this machine, one after the other, under load.

    No request fails. A stream pauses while the process that computes its tokens is replaced. The options stay the
    same. To change options, stop the system and start it again.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        check_directory()
        try:
            sock.connect(control_path(host, port))
        except OSError:
            raise click.ClickException(f"no server of yours on {host}:{port}") from None
        sock.sendall(ASK_RESTART)
        last = _printed(sock.makefile())
    if last != DONE:
        raise click.ClickException(
            "not all processes were replaced" if last.startswith(FAILED) else "the system has ended"
        )


def _printed(lines: Iterable[str]) -> str:
    """Prints the lines, except DONE. Returns the last one."""
    last = ""
    for line in lines:
        last = line.rstrip("\n")
        if last != DONE:
            click.echo(last)
    return last
