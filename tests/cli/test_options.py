from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from alignedserve.cli.main import cli
from alignedserve.cli.options import EngineCommand, engine_options, flag_by_flag


@pytest.mark.parametrize(
    "words",
    [
        "--lora-modules a=1 b=2 --port 3 M",
        "M --lora-modules a=1 b=2 --port 3",
        "--lora-modules a=1 b=2 M --port 3",
        "--lora-modules=a=1 b=2 M --port 3",
        "--lora-modules a=1 --lora-modules b=2 M --port 3",
    ],
)
def test_a_flag_may_be_followed_by_all_of_its_values(words: str) -> None:
    @click.command(cls=EngineCommand)
    @click.argument("model")
    @click.option("--port")
    @engine_options
    def command(model: str, port: str, lora_modules: tuple[str, ...], **others: object) -> None:
        click.echo(f"{model} {port} {lora_modules}")

    result = CliRunner().invoke(command, words.split())
    assert result.output == "M 3 ('a=1', 'b=2')\n"


def test_other_words_are_left_alone() -> None:
    json = '{"name": "a", "path": "b"}'
    for words in (["--x", "a=1", "b=2"], ["--lora-modules", "a=1", "M", "b=2"], ["--lora-modules"], []):
        assert flag_by_flag(words) == words
    assert flag_by_flag(["--lora-modules", "a=1", json]) == ["--lora-modules", "a=1", "--lora-modules", json]


@pytest.mark.parametrize(
    ("begun", "offered"),
    [("serve --policy a", "aligned"), ("serve --log-level w", "warning"), ("chat --service-tier f", "flex")],
)
def test_a_shell_is_offered_the_words_of_an_option(begun: str, offered: str) -> None:
    words = ["alignedserve", *begun.split()]
    shell = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner(env=shell | {"_ALIGNEDSERVE_COMPLETE": "bash_complete"}).invoke(
        cli, prog_name="alignedserve", complete_var="_ALIGNEDSERVE_COMPLETE"
    )
    assert f"plain,{offered}" in done.stdout.splitlines()
