"""Writes docs/reference/flags.md, the options of all commands, from the commands themselves: `make flags`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import click

from alignedserve.cli.command import Command
from alignedserve.cli.main import cli

PAGE = Path(__file__).parent / "reference/flags.md"
HEAD = """\
# Flags

This page lists the options of every command. In a terminal, `alignedserve serve --help` shows the options that matter,
and `alignedserve serve --help=all` all of them.

An option of `alignedserve serve` can also be an environment variable: `ALIGNEDSERVE_SERVE_PORT=8001` is `--port 8001`.
Options without a value turn something on.
"""
TABLE = ["| flag | value | default | what it sets |", "| --- | --- | --- | --- |"]
# the brackets at the end of an option's help
BRACKETS = re.compile(r"\s*\[([^\]]*)\]$")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")

# It passes on options that are not its own.
PASSES_ON = "alignedserve batch run"

Options = Mapping[str, click.Option]


def text() -> str:
    found = dict(_commands(click.Context(cli, info_name="alignedserve")))
    serve = _options(found["alignedserve serve"])
    lines = [HEAD]
    for path, context in found.items():
        lines += [f"## `{path}`", "", f"{_summary(context)}", ""]
        lines += _section(path, context, {} if path == "alignedserve serve" else serve)
    return "\n".join(lines)


def _commands(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Yields the path and the context of each command that is no group."""
    assert isinstance(context.command, click.Group)
    for name in context.command.list_commands(context):
        command = context.command.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _commands(inner)
        else:
            yield inner.command_path, inner


def _options(context: click.Context) -> dict[str, click.Option]:
    options = [each for each in context.command.params if isinstance(each, click.Option) and not each.hidden]
    return {str(each.name): each for each in options}


def _summary(context: click.Context) -> str:
    return (context.command.help or "").split("\n\n")[0].replace("\n", " ")


def _section(path: str, context: click.Context, serve: Options) -> Iterator[str]:
    options = _options(context)
    if arguments := [each for each in context.command.params if isinstance(each, click.Argument)]:
        yield from [f"Arguments: `{' '.join(each.make_metavar(context) for each in arguments)}`", ""]
    shared = [name for name, each in options.items() if name in serve and each.help == serve[name].help]
    groups = context.command.groups if isinstance(context.command, Command) else ()
    parts: dict[str, Sequence[str]] = {group.title: group.options for group in groups}
    if serve:
        parts = {"": [name for names in parts.values() or [tuple(options)] for name in names]}
    for title, names in parts.items():
        own = [options[name] for name in names if name in options and name not in shared]
        if own:
            yield from [f"### {title}", ""] if title else []
            yield from [*TABLE, *(_row(path if serve else "", each, context) for each in own), ""]
    if shared or path == PASSES_ON:
        yield from [*_also(shared, serve, path == PASSES_ON), ""]


def _row(path: str, option: click.Option, context: click.Context) -> str:
    # A switch that is off has its second name for scripts only.
    has_two = option.is_flag and option.default is not False
    names = [*sorted(option.opts, key=len, reverse=True), *(option.secondary_opts if has_two else ())]
    flags = ", ".join(f"`{path} {name}`" if path else f"`{name}`" for name in names)
    help_text, default = option.get_help_record(context)[1], ""  # type: ignore[index]
    while inner := BRACKETS.search(help_text):
        help_text = help_text[: inner.start()]
        default = inner[1] if not default else f"{inner[1]}; {default}"
    value = "" if option.is_flag else option.make_metavar(context).strip("[]").replace("|", ", ")
    cells = [flags, value.lower() if value.isupper() else value, default.removeprefix("default: "), help_text]
    return f"| {' | '.join(_as_code(cell) if number else cell for number, cell in enumerate(cells))} |"


def _as_code(cell: str) -> str:
    return FLAG.sub(lambda found: f"`{found[0]}`", cell.replace("|", "\\|"))


def _also(shared: Collection[str], serve: Options, has_all: bool) -> list[str]:
    if has_all or len(shared) == len(serve):
        return ["It also takes the options of `alignedserve serve`."]
    names = ", ".join(f"`{serve[name].opts[0]}`" for name in shared)
    return ["| options of `alignedserve serve` that it also takes |", "| --- |", f"| {names} |"]


if __name__ == "__main__":
    PAGE.write_text(text())
