"""`alignedserve restart`: every process of a running system is replaced, one after the other, under load."""

from __future__ import annotations

import socket

import click

from alignedserve.gateway.config import HttpConfig
from alignedserve.launch.control import ASK_RESTART, DONE, FAILED, check_directory, control_path


@click.command("restart")
@click.option("--host", default=HttpConfig.host, show_default=True, help="of the system")
@click.option("--port", default=HttpConfig.port, show_default=True, help="of the system")
def command(host: str, port: int) -> None:
    """Replace every process of the system that `serve` started here, one after the other, while it serves.

    No call fails. Streams pause while the process that makes their tokens is replaced. For the same options as before:
    for others, stop it and start it again."""
    with socket.socket(socket.AF_UNIX) as sock:
        check_directory()
        try:
            sock.connect(control_path(host, port))
        except OSError:
            raise click.ClickException(f"no system of this user's serves {host}:{port} here") from None
        sock.sendall(ASK_RESTART)
        last = ""
        for line in sock.makefile():
            last = line.rstrip("\n")
            if last != DONE:
                click.echo(last)
    if last != DONE:
        raise click.ClickException(
            "not all processes were replaced" if last.startswith(FAILED) else "the system has ended"
        )
