"""Command-line options made from configuration classes, which hold names, defaults, choices and help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from alignedserve.cli.command import Command, OneOf, Option, completions, one_of
from alignedserve.engine.config import EngineConfig

Decorated = Callable[..., Any]

# Flags that may be followed by several values, as in vLLM. Each value is name=path or JSON; no other argument looks
# like that.
_WITH_SEVERAL_VALUES = ("--lora-modules",)


class EngineCommand(Command):
    """A command with engine_options. A flag may be followed by all of its values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, flag_by_flag(args))


def flag_by_flag(args: Sequence[str]) -> list[str]:
    """Returns the arguments with a flag that has several values repeated before each of them."""
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
    """Reports any OSError in the block, such as a full disk, as one line about `path`."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror or error}") from error


def engine_options(command: Decorated) -> Decorated:
    """Adds one option for each field of EngineConfig except the model, which is an argument of commands."""
    return options_of(EngineConfig)(command)


def options_of(
    config_class: type[Any],
    without: Collection[str] = (),
    prefix: str = "",
    groups: Mapping[str, str] | None = None,
) -> Callable[[Decorated], Decorated]:
    """Adds one option for each field that has a default and a help text, except those in `without`.

    A field is `Annotated[type, help]`. Its choices may follow, and the name of its group in help, which is also that of
    the fields below it. `groups`: other names of groups in this command.
    """
    hints = get_type_hints(config_class, include_extras=True)
    made, group = [], ""
    for field in fields(config_class):
        if get_origin(hints[field.name]) is not Annotated:
            continue
        kind, text, *more = get_args(hints[field.name])
        group = next((each for each in more if isinstance(each, str)), group)
        choices = next((each for each in more if not isinstance(each, str)), None)
        if field.default is not MISSING and field.name not in without:
            shown_in = (groups or {}).get(group, group)
            made.append(_option(f"{prefix}{field.name}", kind, field.default, text, choices, shown_in))

    def add(command: Decorated) -> Decorated:
        for option in reversed(made):
            command = option(command)
        return command

    return add


class PolicyName(click.types.StringParamType):
    """The name of a policy, or package.module:Class."""

    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from alignedserve.scheduling.policies import POLICIES

        if ":" in str(value):
            return str(value)
        return one_of(self, str(value), POLICIES, param, ctx, ", or package.module:Class")

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from alignedserve.scheduling.policies import POLICIES

        return completions(POLICIES, incomplete)


def _option(
    name: str, kind: Any, default: Any, text: str, choices: Sequence[str] | None, group: str
) -> Callable[[Decorated], Decorated]:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    is_repeatable = get_origin(kind) is tuple
    plain = kind if get_origin(kind) is None and isinstance(kind, type) else get_args(kind)[0]
    return click.option(
        flag,
        name,
        cls=Option,
        group=group,
        type=OneOf(choices) if choices else PolicyName() if name == "policy" else plain,
        default=default,
        multiple=is_repeatable,
        help=text if "[default: " in text else f"{text}{_default_text(default)}",
    )


def _default_text(default: Any) -> str:
    match default:
        case None | False | () | "":
            return ""
        case True:
            return " [default: on]"
        case float():
            return f" [default: {default:g}]"
        case tuple():
            return f" [default: {', '.join(map(str, default))}]"
    return f" [default: {default}]"
