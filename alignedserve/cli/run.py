"""`alignedserve run`: serves a model for as long as a chat with it lasts."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from contextlib import ExitStack

import click

from alignedserve.cli.chat import Asking, asking_options, chat_with
from alignedserve.cli.own_server import WithServer, check_serve_options, own_server
from alignedserve.cli.progress import busy

# Lines of the server that are shown if it fails.
NUM_LINES = 40


@click.command("run", cls=WithServer, context_settings={"ignore_unknown_options": True})
@click.argument("model")
@asking_options
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str, system_prompt: str | None, quick: str | None, stats: bool, serve_options: tuple[str, ...]
) -> None:
    """Serve MODEL and chat with it. The server ends with the chat.

    MODEL is what `serve` takes, and SERVE_OPTIONS are its options. A model that is not here is downloaded. If the input
    is not a terminal, each of its lines is a message.
    """
    asking = Asking(system_prompt, quick, stats)
    options = (model, *serve_options)
    settings = check_serve_options(options)
    engine, keys = settings.engine, settings.keys
    # With a file of keys it is that of the environment, as for `chat`. Without keys, none is sent.
    of_file = os.environ.get("OPENAI_API_KEY") if keys.has_files else None
    key = next(iter((*keys.api_key, *keys.operator_key)), of_file)
    for number in (signal.SIGHUP, signal.SIGTERM):
        # The server and its files go, too. It stays ignored under nohup.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    from alignedserve.models.locate import locate_model

    # A download shows its progress here, and an error is one line.
    locate_model(engine.model, engine.load_format, engine.revision)
    last: deque[str] = deque(maxlen=NUM_LINES)
    with ExitStack() as stack:
        try:
            with busy(f"Starting {model}", quiet_s=0.0):
                url = stack.enter_context(own_server(options, last.append))
        except click.ClickException:
            click.echo("\n".join(last), err=True)
            raise
        chat_with(url, key, None, {}, asking)
