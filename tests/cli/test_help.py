"""Help in groups, and errors that name options as they are typed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import pytest
from click.testing import CliRunner, Result

from alignedserve.cli.command import ALL, Command, Option, OptionGroup, did_you_mean, in_flags, texts_in
from alignedserve.cli.main import COMMANDS, FORMER, cli
from alignedserve.cli.options import options_of as make_options


def invoke(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, words, env=environment)


def commands(group: click.Group = cli, *path: str) -> Iterator[tuple[str, ...]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


def command_at(path: tuple[str, ...]) -> Command:
    found: click.Command = cli
    for name in path:
        assert isinstance(found, click.Group)
        command = found.get_command(click.Context(found), name)
        assert command
        found = command
    assert isinstance(found, Command), "errors of this command would not name flags"
    return found


ALL_COMMANDS = list(commands())
GROUPED = [path for path in ALL_COMMANDS if command_at(path).groups]


def options_of(command: Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


@pytest.mark.parametrize("path", GROUPED, ids=" ".join)
def test_each_option_is_in_one_group(path: tuple[str, ...]) -> None:
    command = command_at(path)
    grouped = Counter(name for group in command.groups for name in group.options)
    assert grouped == Counter(each.name for each in options_of(command))
    assert len({group.name for group in command.groups} | {ALL}) == len(command.groups) + 1
    declared = {
        each.name: each.group for each in options_of(command) if isinstance(each, Option) and each.group
    }
    listed = {name: group.name for group in command.groups for name in group.options if name in declared}
    assert listed == declared


def test_a_group_has_the_options_declared_in_it_after_those_it_lists() -> None:
    @dataclass(frozen=True)
    class Config:
        first: Annotated[int, "a number", "one"] = 0
        second: Annotated[str, "a word", ("x", "y")] = "x"
        third: Annotated[bool, "a switch", "two"] = False
        fourth: Annotated[bool, "another", "one"] = False

    groups = [OptionGroup("one", "One", ("second",)), OptionGroup("three", "Three")]

    @click.command(cls=Command, groups=groups)
    @make_options(Config, groups={"two": "three"})
    def made(**options: object) -> None: ...

    assert isinstance(made, Command)
    assert [group.options for group in made.groups] == [("second", "first", "fourth"), ("third",)]


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_long_help_is_grouped_and_each_option_has_a_text(path: tuple[str, ...]) -> None:
    command = command_at(path)
    assert command.groups or len(options_of(command)) < 16
    assert all(each.help for each in options_of(command))


@pytest.mark.parametrize("path", GROUPED, ids=" ".join)
def test_help_is_two_screens_and_all_of_it_is_there(path: tuple[str, ...]) -> None:
    command = command_at(path)
    short, whole = (invoke(*path, each).stdout for each in ("--help", "--help=all"))
    assert len(short.splitlines()) <= 100
    for option in options_of(command):
        assert max(option.opts, key=len).removeprefix("--") in whole
    for group in command.groups:
        assert f"--help={group.name}" in short
        found = invoke(*path, f"--help={group.name}")
        assert found.exit_code == 0 and f"\n{group.title}:\n" in found.stdout


def test_one_group_and_options_by_a_word() -> None:
    found = invoke("serve", "--help=memory").stdout
    assert "--kv-cache-memory-bytes" in found and "--port" not in found
    found = invoke("serve", "--help", "--slo-ttft").stdout
    assert "--slo-priority-ttft-ms" not in found
    found = invoke("serve", "--help=slo").stdout
    assert "--slo-priority-ttft-ms" in found and "--port" not in found
    found = invoke("serve", "--help=Network").stdout
    assert "--port" in found
    wrong = invoke("serve", "--help=memry")
    assert wrong.exit_code == 2 and "did you mean 'memory'?" in wrong.stderr


def test_help_on_some_options_says_how_to_see_the_others() -> None:
    for wanted in ("memory", "slo"):
        found = " ".join(invoke("serve", f"--help={wanted}").stdout.split())
        assert found.endswith("cli serve --help lists the groups, --help=all shows everything.")


def test_a_command_without_groups_shows_everything() -> None:
    plain = invoke("top", "--help").stdout
    assert "--every" in plain and "GROUP" not in plain
    assert plain == invoke("top", "--help=all").stdout == invoke("top", "--help=every").stdout


def test_groups_of_commands_show_their_help_whatever_is_asked_for() -> None:
    for words in ((), ("batch",)):
        assert invoke(*words, "--help").stdout == invoke(*words, "--help=all").stdout
    whole = " ".join(invoke("--help").stdout.split())
    assert whole.endswith("--help=WORD those with a word in their names.") and " --help Show this" in whole


def test_help_on_batch_run_shows_the_options_of_serve_too() -> None:
    plain, whole, some = (invoke("batch", "run", f"--help{each}").stdout for each in ("", "=all", "=memory"))
    assert "--completion-window" in plain and "--kv-cache-memory-bytes" not in plain
    assert plain.endswith("Options of serve: cli batch run --help=all, or a word, as in --help=memory\n")
    assert "--completion-window" in whole and "--kv-cache-memory-bytes" in whole and "--port" in whole
    assert some == invoke("serve", "--help=memory").stdout
    wrong = invoke("batch", "run", "--help=memry")
    assert wrong.exit_code == 2 and "did you mean 'memory'?" in wrong.stderr


def test_switches_and_choices_are_short() -> None:
    found = invoke("serve", "--help=all").stdout
    assert "--[no-]enable-prefix-caching" in found and "--no-enforce-eager" not in found
    assert "[auto|fp8|int8]" in found
    assert "--help=all" not in found


def test_help_is_not_read_from_the_environment() -> None:
    assert (
        "Usage"
        not in invoke("generate", "-p", "x", "no-such-model", ALIGNEDSERVE_GENERATE_WANTED_HELP="all").stdout
    )


# ---- commands ----


def test_each_command_has_a_line_that_is_shown_whole() -> None:
    found = invoke("--help").stdout
    assert all(f"{name} " in found and text in found for name, (text, _) in COMMANDS.items())
    for group in {path[0] for path in ALL_COMMANDS if len(path) > 1}:
        assert "..." not in invoke(group, "--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serv"], "serve"),
        (["simulat"], "simulate"),
        (["bench", "sreve"], "serve"),
        (["batch", "rum"], "run"),
    ],
)
def test_a_command_that_does_not_exist_suggests_one_that_does(words: list[str], hint: str) -> None:
    done = invoke(*words)
    assert done.exit_code == 2 and f"did you mean '{hint}'?" in done.stderr


@pytest.mark.parametrize("name", FORMER)
def test_former_names_work_and_are_not_listed(name: str) -> None:
    here, there = invoke(name, "--help"), invoke("dev", name, "--help")
    assert here.exit_code == there.exit_code == 0
    assert here.stdout.partition("\n")[2] == there.stdout.partition("\n")[2]
    assert f"  {name} " not in invoke("--help").stdout and f"  {name} " in invoke("dev", "--help").stdout


# ---- errors ----

PARAMS = [
    click.Option(["--max-model-len"], type=int),
    click.Option(["--min-islands"], type=int),
    click.Option(["--policy"]),
    click.Option(["--input", "-i", "source"]),
    click.Option(["--hidden-cache/--no-hidden-cache"]),
    click.Argument(["model"]),
]


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("max_model_len=-1: must be at least 1", "--max-model-len -1: must be at least 1"),
        ("policy='a b': unknown", "--policy 'a b': unknown"),
        ("policy='x': unknown", "--policy x: unknown"),
        ("policy: needs more", "--policy: needs more"),
        ("the policy is wrong, max_model_len too", "the policy is wrong, --max-model-len too"),
        ("max_model_len=5: at least min_islands=6", "--max-model-len 5: at least --min-islands 6"),
        ("hidden_cache=True: can't", "--hidden-cache: can't"),
        ("hidden_cache=False: can't", "--no-hidden-cache: can't"),
        ("source=x: is no file", "--input x: is no file"),
        ("model='x': is none", "model='x': is none"),
        ("see --max-model-len and my_policy=3", "see --max-model-len and my_policy=3"),
        ("max_model_len_s=4: other", "max_model_len_s=4: other"),
        ("policy='': must be given", "--policy '': must be given"),
        # What is quoted is a value, or what a file holds.
        ("line 1: has 'max_model_len', `min_islands`", "line 1: has 'max_model_len', `min_islands`"),
        (
            'model is "max_model_len=3\'s"; see max_model_len',
            'model is "max_model_len=3\'s"; see --max-model-len',
        ),
        ("policy='it\\'s min_islands=1': wrong", "--policy 'it\\'s min_islands=1': wrong"),
        ("the model's max_model_len isn't 3", "the model's --max-model-len isn't 3"),
    ],
)
def test_options_are_named_as_they_are_typed(message: str, typed: str) -> None:
    assert in_flags(message, PARAMS) == typed


def test_what_the_user_has_given_stays_as_it_is() -> None:
    given = [*texts_in([Path("max_model_len"), ("policy", 5), None, ""])]
    assert given == ["max_model_len", "policy"]
    assert in_flags("policy: holds no requests", PARAMS, given) == "policy: holds no requests"
    assert (
        in_flags("max_model_len, line 3: min_islands=1", PARAMS, given)
        == "max_model_len, line 3: --min-islands 1"
    )
    assert in_flags("policy_of: policy", PARAMS, given) == "policy_of: policy"


def test_an_error_about_an_option_exits_with_2_and_another_with_1() -> None:
    @click.command(cls=Command)
    @click.option("--policy")
    def command(policy: str) -> None:
        raise ValueError(f"policy={policy!r}: wrong" if policy == "x" else f"{policy}: all is wrong")

    done = CliRunner().invoke(command, ["--policy", "x"])
    assert (done.exit_code, done.stderr) == (2, "Error: --policy x: wrong\n")
    # What was given may look like an option.
    done = CliRunner().invoke(command, ["--policy", "policy='x'"])
    assert (done.exit_code, done.stderr) == (1, "Error: policy='x': all is wrong\n")


def test_only_a_word_that_is_close_is_suggested() -> None:
    assert did_you_mean("alignd", ["aligned", "fcfs"]) == "; did you mean 'aligned'?"
    assert did_you_mean("lifo", ["aligned", "fcfs"]) == ""
