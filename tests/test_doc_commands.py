"""Commands in the pages' code blocks are ones that this version takes: parsed as they stand, and not run.

tests/test_docs.py checks the flags of commands within sentences. Here are whole command lines, continued ones too, in
all blocks, also those within lists: subcommands, flags, values and their types, `make`'s targets, files that exist.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import click
import pytest
import yaml

from alignedserve.cli.main import FORMER, cli
from tests import frozen

ROOT = Path(__file__).parents[1]
NAMED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PAGES = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "benchmarks/results").glob("*.md"))

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "bash", "console")
HEREDOC = re.compile(r"<<'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\w+=")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield dedent(text) if indent else text


def commands(page: Path) -> Iterator[list[str]]:
    """Yields the words of each simple command of a page's blocks, without redirections."""
    for text in blocks(page, *SHELL):
        yield from commands_of(text)


def commands_of(text: str) -> Iterator[list[str]]:
    if re.search(r"^\$ ", text, re.MULTILINE):
        # a session: what is typed, and what is printed
        text = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE))
    text = HEREDOC.sub("", text).replace("\\\n", " ")
    # each line ends a command
    lexer = shlex.shlex(text.replace("\n", "\n;"), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    before = ""
    for word in [*lexer, ";"]:
        if before in ("<", ">", ">>"):
            # the file of a redirection
            pass
        elif word and set(word) <= set("();<>|&"):
            if words and word not in ("<", ">", ">>"):
                yield words
                words = []
        elif words or not VARIABLE.match(word):
            words.append(word.replace("\n;", "\n"))
        before = word


def parse(words: list[str]) -> None:
    """Parses a command line of `alignedserve`. Raises click.ClickException."""
    command: click.Command = cli
    context, args = None, words[1:]
    while True:
        context = command.make_context(command.name, args, parent=context, resilient_parsing=False)
        if not isinstance(command, click.Group):
            return
        name, found, args = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, name
        command = found


# ---- commands ----


@each_page
def test_commands_of_alignedserve_can_be_parsed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # files that only users have
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)
    for words in commands(page):
        if words[0].rpartition("/")[2] == "alignedserve":
            try:
                parse(words)
            except click.exceptions.Exit as ended:
                # of --help or --version
                assert ended.exit_code == 0
            except click.ClickException as error:
                pytest.fail(f"{shlex.join(words)}: {error.format_message()}")


@each_page
def test_commands_have_their_present_names(page: Path) -> None:
    assert not re.search(rf"alignedserve ({'|'.join(FORMER)})\b", page.read_text())


class _Parsed(Exception):
    """A benchmark has parsed its arguments."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'(benchmarks|research):RuntimeWarning")
@each_page
def test_commands_of_benchmarks_can_be_parsed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        original(parser)
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    for words in commands(page):
        if words[:2] == ["python", "-m"] and words[2].startswith(("benchmarks", "research")):
            if frozen.are_frozen(words):
                continue
            monkeypatch.setattr("sys.argv", words[2:])
            try:
                runpy.run_module(words[2], run_name="__main__")
            except _Parsed:
                continue
            except SystemExit as ended:
                assert ended.code == 0, shlex.join(words)
                continue
            pytest.fail(f"{words[2]} parses no arguments")


@each_page
def test_targets_and_files_of_commands_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        if words[0] in ("pytest", "python", ".venv/bin/python"):
            files = [word for word in words[1:] if re.match(r"(tests|examples|deploy|docs)/", word)]
            assert all((ROOT / file).exists() for file in files), words


# ---- other blocks ----


@each_page
def test_other_blocks_are_what_they_say(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "json"):
        json.loads(text.replace("…", ""))
    for text in blocks(page, "yaml"):
        yaml.safe_load(text)
    for text in blocks(page, "toml"):
        tomllib.loads(text)


@each_page
def test_bodies_of_calls_are_json(page: Path) -> None:
    for words in commands(page):
        if words[0] == "curl" and "-d" in words:
            assert json.loads(words[words.index("-d") + 1])


def test_names_that_are_imported_exist() -> None:
    for page in PAGES:
        for text in blocks(page, "python"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("alignedserve"):
                    found = __import__(node.module or "", fromlist=["*"])
                    assert not [name.name for name in node.names if not hasattr(found, name.name)], page


# ---- the finder itself ----


def test_commands_are_found() -> None:
    text = """
cat > in.jsonl <<'END'
{"a": "alignedserve no command"}
END
A=1 alignedserve serve --port 1 \\
  --host h   # a comment; it's not a command
(umask 077; echo "x; y" > file) && alignedserve chat < questions.txt | tee log
"""
    assert list(commands_of(text)) == [
        ["cat"],
        ["alignedserve", "serve", "--port", "1", "--host", "h"],
        ["umask", "077"],
        ["echo", "x; y"],
        ["alignedserve", "chat"],
        ["tee", "log"],
    ]
    assert list(commands_of("$ alignedserve top \\\n  --once\nsome output\n")) == [
        ["alignedserve", "top", "--once"]
    ]


@pytest.mark.parametrize(
    "command",
    ["serve --no-such-flag", "serve --port many", "no-such-command", "simulate --policy", "restart surplus"],
)
def test_commands_that_are_wrong_are_found(command: str) -> None:
    with pytest.raises(click.ClickException):
        parse(["alignedserve", *shlex.split(command)])


def test_most_pages_have_commands() -> None:
    assert sum(bool(list(commands(page))) for page in PAGES) > 30
    assert sum(words[0] == "alignedserve" for page in PAGES for words in commands(page)) > 25
