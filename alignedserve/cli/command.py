"""The base of all commands: errors name options as they are typed, and help comes in groups.

`alignedserve COMMAND --help` shows the options that matter and the names of the groups. `--help=GROUP` shows one
group, `--help=all` everything, and any other word the options with that word in their name. A command with few options
has no groups: it always shows everything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

ALL = "all"
# The value of a bare `--help`.
PLAIN = ""
# Text in quotes is a value, or what a file holds. An apostrophe inside a word is none of them.
_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)"""
_VALUE = rf"{_QUOTED}|\([^)]*\)|[^\s:,;)]+"


@dataclass(frozen=True)
class OptionGroup:
    # What follows `--help=`.
    name: str
    title: str
    # Parameters that a bare `--help` shows.
    main: tuple[str, ...] = ()
    # The others, in the order in which they are shown. A command appends those that are declared in the group.
    others: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        return (*self.main, *self.others)


class Option(click.Option):
    """An option that is declared in a group. A switch that is on by default is shown as --[no-]name, and one that is
    off as --name."""

    def __init__(self, *args: Any, group: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or not self.secondary_opts:
            return record
        name = self.opts[0].removeprefix("--")
        return (f"--[no-]{name}" if self.default else f"--{name}"), record[1]


class WrongOption(click.ClickException):
    """An option has a value that is not allowed. The message names the option, in one line."""

    exit_code = 2


class Command(click.Command):
    """A command with or without groups of options. With groups, each option is in exactly one of them."""

    def __init__(self, *args: Any, groups: Sequence[OptionGroup] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = _with_declared(groups, self.params)
        self._help = _help_option(self._show_help, has_groups=bool(groups))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            message = str(error)
            named = in_flags(message, self.params, texts_in(ctx.params.values()))
            raise (WrongOption(named) if named != message else click.ClickException(message)) from error

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        return self._help

    def _show_help(self, ctx: click.Context, option: click.Parameter, wanted: str | None) -> None:
        if wanted is None or ctx.resilient_parsing:
            return
        click.echo(self.help_on(ctx, wanted.lower()), color=ctx.color)
        ctx.exit()

    def help_on(self, ctx: click.Context, wanted: str) -> str:
        """Returns the help on a group, on all groups, or on options that have a word in their names.

        Without groups, that is always the whole help.
        """
        if wanted == PLAIN or not self.groups:
            return self.get_help(ctx)
        if wanted == ALL:
            shown = {group.title: group.options for group in self.groups}
        elif found := [group for group in self.groups if group.name == wanted]:
            shown = {group.title: group.options for group in found}
        else:
            word = wanted.strip("-").replace("-", "_")
            names = tuple(name for group in self.groups for name in group.options if word and word in name)
            shown = {f'Options with "{wanted}"': names}
            if not names:
                known = [*(group.name for group in self.groups), ALL]
                raise click.UsageError(
                    f"--help={wanted}: no such group; there are {', '.join(known)}{did_you_mean(wanted, known)}",
                    ctx,
                )
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        if wanted == ALL:
            self.format_help_text(ctx, formatter)
        self._write_groups(ctx, formatter, shown)
        if wanted != ALL:
            formatter.write_paragraph()
            formatter.write_text(
                f"These are not all options: {ctx.command_path} --help lists the groups, --help={ALL} shows everything."
            )
        return formatter.getvalue().rstrip("\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.groups:
            super().format_options(ctx, formatter)
            return
        self._write_groups(ctx, formatter, {group.title: group.main for group in self.groups})
        rows = [(f"--help={group.name}", f"{group.title} ({len(group.options)})") for group in self.groups]
        with formatter.section("All options, by group"):
            formatter.write_dl([*rows, (f"--help={ALL}", "Everything")])

    def _write_groups(
        self, ctx: click.Context, formatter: click.HelpFormatter, shown: dict[str, tuple[str, ...]]
    ) -> None:
        options = {each.name: each for each in self.params if isinstance(each, click.Option)}
        for title, names in shown.items():
            records = [options[name].get_help_record(ctx) for name in names if not options[name].hidden]
            if rows := [record for record in records if record]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _with_declared(
    groups: Sequence[OptionGroup], params: Sequence[click.Parameter]
) -> tuple[OptionGroup, ...]:
    """Returns the groups with the options that are declared in them, after those that they list."""
    listed = {name for group in groups for name in group.options}
    others: dict[str, list[str]] = {group.name: [*group.others] for group in groups}
    for each in params:
        if isinstance(each, Option) and each.name and each.name not in listed and each.group in others:
            others[each.group].append(each.name)
    return tuple(replace(group, others=tuple(others[group.name])) for group in groups)


def _help_option(show: Callable[..., None], has_groups: bool) -> click.Option:
    """Returns --help, which may be followed by =WORD."""
    return click.Option(
        ["--help", "wanted_help"],
        metavar="[=GROUP]" if has_groups else "",
        is_flag=False,
        flag_value=PLAIN,
        is_eager=True,
        expose_value=False,
        allow_from_autoenv=False,
        callback=show,
        help=f"Show this message{', or one group of options,' if has_groups else ''} and exit.",
    )


class Group(click.Group):
    """A command with subcommands. It suggests one for a name that does not exist."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._help = _help_option(self._show_help, has_groups=False)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        return self._help

    def _show_help(self, ctx: click.Context, option: click.Parameter, wanted: str | None) -> None:
        # Its help is short, so it is the same for any word.
        if wanted is not None and not ctx.resilient_parsing:
            click.echo(self.get_help(ctx), color=ctx.color)
            ctx.exit()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            hint = did_you_mean(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}{hint}")
        return super().resolve_command(ctx, args)


class OneOf(click.types.StringParamType):
    """One of several words. The error for another one suggests the closest."""

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.known)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return one_of(self, str(value), self.known, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completions(self.known, incomplete)


def completions(known: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in known if word.startswith(incomplete)]


def one_of(
    kind: click.types.StringParamType,
    value: str,
    known: Collection[str],
    param: click.Parameter | None,
    ctx: click.Context | None,
    more: str = "",
) -> str:
    """Returns the value. Raises BadParameter if it is not known."""
    if value not in known:
        kind.fail(f"{value!r} is not one of {', '.join(known)}{more}{did_you_mean(value, known)}", param, ctx)
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: the known word that is closest, if one is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_flags(message: str, params: Iterable[click.Parameter], given: Iterable[str] = ()) -> str:
    """Returns the message with options as they are typed: `--port 1` for `port=1`.

    Quoted text stays as it is, and so do the texts that the user has `given`, such as the names of files.
    """
    flags = {each.name: each for each in params if isinstance(each, click.Option) and each.name}
    if not flags:
        return message
    names = "|".join(map(re.escape, _longest_first(flags)))
    kept = "|".join([_QUOTED, *(rf"(?<!\w){re.escape(text)}(?!\w)" for text in _longest_first(given))])
    pattern = rf"(?P<kept>{kept})|(?<![\w.=/-])(?P<name>{names})(?:=(?P<value>{_VALUE})|(?![\w=./-]))"

    def typed(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"]
        if found["kept"] is not None:
            return found["kept"]
        option = flags[name]
        flag = max(option.opts, key=len)
        if value is None:
            # Other words of a sentence may be names, too: "policy", "port", "output".
            is_named = "_" in name or (found.start() == 0 and message[found.end() :].startswith((":", ", ")))
            return flag if is_named else found[0]
        if option.is_flag and value in ("True", "False"):
            return flag if value == "True" else (option.secondary_opts or [flag])[0]
        plain = value[1:-1] if value[0] in "'\"" else value
        return f"{flag} {plain if plain and ' ' not in plain else value}"

    return re.sub(pattern, typed, message)


def texts_in(values: Iterable[object]) -> Iterator[str]:
    """Yields the texts among the values of options, and those in lists of them."""
    for value in values:
        if isinstance(value, tuple):
            yield from texts_in(value)
        elif isinstance(value, str | Path) and str(value):
            yield str(value)


def _longest_first(texts: Iterable[str]) -> list[str]:
    """So that a pattern of all of them never matches only the beginning of one."""
    return sorted(texts, key=len, reverse=True)
