"""A server that a command starts for itself, with options of `serve`."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

import click

from alignedserve.cli.command import ALL, PLAIN, Command

if TYPE_CHECKING:
    from alignedserve.launch.settings import Settings


class WithServer(Command):
    """Takes the options of `serve`, too, and its help shows them on demand."""

    def help_on(self, ctx: click.Context, wanted: str) -> str:
        from alignedserve.cli.serve import command as serve

        own = self.get_help(ctx)
        if wanted == PLAIN:
            return (
                f"{own}\n\nOptions of serve: {ctx.command_path} --help={ALL}, or a word, as in --help=memory"
            )
        of_serve = serve.help_on(click.Context(serve, ctx.find_root(), serve.name), wanted)
        return f"{own}\n\n{of_serve}" if wanted == ALL else of_serve


def check_serve_options(words: Sequence[str]) -> Settings:
    """Returns what `serve` would do. Raises UsageError or ValueError for options that it does not have, before a server
    is started."""
    from alignedserve.cli.serve import command as serve
    from alignedserve.launch.settings import settings_of

    root = click.get_current_context().find_root()
    with serve.make_context(serve.name, [*words], parent=root) as context:
        model = context.params.pop("model")
        return settings_of(model, context.params)


@contextmanager
def own_server(options: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """Starts a server with these options of `serve`, yields its URL, and stops it.

    Without --port it gets a free port. Without --state-dir its state is temporary. However this process ends, the
    server is stopped.
    """
    from alignedserve.launch.first_process import end_with_parent
    from alignedserve.launch.ports import free_port

    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as state:
        # The last of several values counts, so the user's options come after these.
        own = ["--log-level", "warning", "--port", str(free_port("127.0.0.1")), "--state-dir", state]
        process = subprocess.Popen(
            [sys.executable, "-m", "alignedserve", "serve", *own, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
        try:
            assert process.stdout
            yield _until_ready(process.stdout, say)
        finally:
            process.terminate()
            process.wait()


# In the text format this ends the line, and in JSON it is a part of one.
_READY = re.compile(r"ready after [\d.]+ s: (\S+?)/v1\b")


def _until_ready(output: IO[str], say: Callable[[str], None]) -> str:
    """Passes on the server's output, now and later. Returns the server's URL when it is ready."""
    ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in output:
                # It goes on reading: otherwise the server would wait for it.
                with suppress(OSError, ValueError):
                    say(line.rstrip())
                if found := _READY.search(line):
                    ready.put(found[1])
        finally:
            ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    url = ready.get()
    if url is None:
        raise click.ClickException("the server did not start")
    return url
