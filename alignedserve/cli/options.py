"""Command-line options made from configuration classes: names, defaults and help are stated there, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

import click

from alignedserve.config import EngineConfig

Command = Callable[..., Any]


def engine_options(command: Command) -> Command:
    """One option for each field of EngineConfig but the model, which commands take as an argument."""
    return options_of(EngineConfig)(command)


def options_of(config_class: type[Any]) -> Callable[[Command], Command]:
    """Adds one option for each field that has a default."""
    hints = get_type_hints(config_class, include_extras=True)

    def add(command: Command) -> Command:
        for field in reversed(fields(config_class)):
            if field.default is not MISSING:
                kind, text = get_args(hints[field.name])
                command = _option(field.name, kind, field.default, text)(command)
        return command

    return add


def taken(config_class: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that are the class's."""
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in options.items() if name in names}


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
