"""Command-line options made from configuration classes, which state names, defaults and help once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click

from alignedserve.engine.config import EngineConfig

Command = Callable[..., Any]


# Of these flags one may have several values, as vLLM's have: name=path or JSON, which no other argument looks like.
_WITH_SEVERAL_VALUES = ("--lora-modules",)


class EngineCommand(click.Command):
    """A command with engine_options: a flag may be followed by all of its values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, flag_by_flag(args))


def flag_by_flag(args: Sequence[str]) -> list[str]:
    """Repeats a flag that is followed by several values before each of them."""
    found: list[str] = []
    flag = ""
    for arg in args:
        if flag and found[-1] != flag and _is_value(arg):
            found.append(flag)
        elif arg.startswith("-") or (flag and found[-1] != flag):
            name = arg.partition("=")[0]
            flag = name if name in _WITH_SEVERAL_VALUES else ""
        found.append(arg)
    return found


def _is_value(arg: str) -> bool:
    return not arg.startswith("-") and ("=" in arg or arg.lstrip().startswith("{"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever keeps the block from writing to `path`, a full disk for instance, is told in a line."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror or error}") from error


def engine_options(command: Command) -> Command:
    """Adds one option for each field of EngineConfig except the model, which commands take as an argument."""
    return options_of(EngineConfig)(command)


def options_of(
    config_class: type[Any], without: Collection[str] = (), prefix: str = ""
) -> Callable[[Command], Command]:
    """Adds one option for each field that has a default and a help text, except those in `without`."""
    hints = get_type_hints(config_class, include_extras=True)

    def add(command: Command) -> Command:
        for field in reversed(fields(config_class)):
            has_help = get_origin(hints[field.name]) is Annotated
            if has_help and field.default is not MISSING and field.name not in without:
                kind, text = get_args(hints[field.name])
                command = _option(f"{prefix}{field.name}", kind, field.default, text)(command)
        return command

    return add


def _option(name: str, kind: Any, default: Any, text: str) -> Callable[[Command], Command]:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    is_repeatable = get_origin(kind) is tuple
    plain = kind if get_origin(kind) is None and isinstance(kind, type) else get_args(kind)[0]
    return click.option(
        flag,
        name,
        type=plain,
        default=default,
        multiple=is_repeatable,
        show_default=default is not None and not is_repeatable,
        help=text,
    )
