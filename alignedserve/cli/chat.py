"""`alignedserve chat`: chats with a server in a terminal, or one line at a time through a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from alignedserve import demo
from alignedserve.cli.batch import DEFAULT_URL, Decorated, server_options
from alignedserve.cli.command import Command, OneOf, WrongOption

if TYPE_CHECKING:
    from alignedserve.cli.chat_client import ChatAnswer, ChatSession

TIERS = ("auto", "default", "priority", "flex")
HELP = """\
/clear        start a new chat
/system TEXT  change the system prompt; without TEXT: remove it
/help         show this help
/quit         end the chat, like Ctrl-D
Ctrl-C stops an answer."""
# Small models do badly at temperature 1, the server's default. The demo model miscounts. SmolLM2's authors use the
# first two of these values, and without the others it may repeat a sentence until its context is full.
OF_SMALL_MODELS: dict[str, dict[str, Any]] = {
    demo.NAME: {"temperature": 0.0},
    "smollm2": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 1024},
}
# Control characters, which can steer a terminal. New lines and tabs are text.
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


def asking_options(command: Decorated) -> Decorated:
    """Adds what makes an `Asking`."""
    command = click.option("--stats", is_flag=True, help="print times and token counts after each answer")(
        command
    )
    text = "send one message, print the answer and exit"
    command = click.option("-q", "--quick", metavar="TEXT", help=text)(command)
    return click.option("--system-prompt", help="system prompt of the chat")(command)


@click.command("chat", cls=Command)
@server_options(DEFAULT_URL)
@click.option("--model-name", help="model to use [default: the first that the server lists]")
@asking_options
@click.option("--service-tier", type=OneOf(TIERS), help="flex is best effort; the others are real time")
@click.option(
    "--temperature",
    type=float,
    help="sampling temperature [default: 0 for the demo model, 0.2 for smollm2, else the server's]",
)
@click.option("--max-tokens", type=int, help="maximum tokens of an answer")
@click.option("--seed", type=int, help="seed for sampling")
def command(
    url: str,
    api_key: str | None,
    model_name: str | None,
    system_prompt: str | None,
    quick: str | None,
    stats: bool,
    **options: Any,
) -> None:
    """Chat with a running server. If the input is not a terminal, each of its lines is a message."""
    given = {name: value for name, value in options.items() if value is not None}
    chat_with(url, api_key, model_name, given, Asking(system_prompt, quick, stats))


@dataclass(frozen=True)
class Asking:
    system_prompt: str | None
    # The only message; None: those of the input.
    quick: str | None
    stats: bool

    def __post_init__(self) -> None:
        if self.quick is not None and not self.quick.strip():
            raise WrongOption("-q: give a question")


def chat_with(
    url: str, api_key: str | None, model_name: str | None, given: dict[str, Any], asking: Asking
) -> None:
    """`given`: parameters of each request besides its messages."""
    from alignedserve.cli.chat_client import ChatClient, ChatSession, NoAnswer, find_model
    from alignedserve.cli.http import http_client

    with http_client(url, api_key) as http:
        try:
            model = find_model(http, model_name)
            client = ChatClient(http, model, OF_SMALL_MODELS.get(model, {}) | given)
            chat = ChatSession(client, asking.system_prompt)
            is_terminal = sys.stdin.isatty()
            if model == demo.NAME and sys.stderr.isatty() and (asking.quick is not None or is_terminal):
                _say(demo.ABILITIES)
            if asking.quick is not None:
                _answer(chat, asking.quick, asking.stats)
            elif is_terminal and sys.stdout.isatty():
                _say(f"{client.model} at {url}; /help lists commands")
                _talk(chat, asking.stats)
            elif not _pipe(chat, asking.stats):
                sys.exit(1)
        except NoAnswer as error:
            # The server names its own parameters, and the command its options.
            raise ValueError(re.sub("^model=", "model_name=", _one_line(error))) from None


def _talk(chat: ChatSession, stats: bool) -> None:
    with contextlib.suppress(ImportError):
        # This import adds line editing and a history of lines.
        import readline  # noqa: F401
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (line := input("> ").strip()) != "/quit":
            if line.startswith("/"):
                _obey(chat, line)
            elif line:
                _turn(chat, line, stats)
        return
    click.echo()


def _turn(chat: ChatSession, line: str, stats: bool) -> None:
    from alignedserve.cli.chat_client import STOPPED, NoAnswer

    try:
        _answer(chat, line, stats)
    except KeyboardInterrupt:
        _say(STOPPED)
    except NoAnswer as error:
        _say(f"Error: {_one_line(error)}")


def _obey(chat: ChatSession, line: str) -> None:
    word, _, rest = line.partition(" ")
    match word:
        case "/clear":
            chat.clear()
        case "/system":
            chat.system_prompt = rest.strip() or None
        case _:
            _say(HELP)


def _pipe(chat: ChatSession, stats: bool) -> bool:
    """Returns whether all messages were answered."""
    from alignedserve.cli.chat_client import NoAnswer

    all_answered = True
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            try:
                _answer(chat, text, stats)
            except NoAnswer as error:
                all_answered = False
                click.echo(f"Error: {_one_line(error)}", err=True)
    return all_answered


def _answer(chat: ChatSession, text: str, stats: bool) -> None:
    is_terminal, has_begun = sys.stdout.isatty(), False

    def show(piece: str) -> None:
        nonlocal has_begun
        has_begun = True
        click.echo(piece.translate(_CONTROLS) if is_terminal else piece, nl=False)

    try:
        answer: ChatAnswer = chat.ask(text, show)
    finally:
        if has_begun:
            click.echo()
    if stats:
        _say(answer.stats)


def _say(line: str) -> None:
    click.secho(line.translate(_CONTROLS), dim=True, err=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).translate(_CONTROLS).split())
