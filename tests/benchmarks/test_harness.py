"""What benchmarks share: options, facts, tables, files, and rounds in turn."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import FOLDER, JSON_FILE, ROOT, in_turn, parser_of

ABOUT = {"command": "python -m benchmarks.one", "date": "today", "commit": "a" * 40, "processor": "a chip"}


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float


def test_a_parser_has_the_options_that_it_is_asked_for() -> None:
    args = parser_of("What it does.", rounds=3, out=JSON_FILE).parse_args(["--out", "found.json"])
    assert (args.rounds, args.out) == (3, Path("found.json"))
    assert parser_of("", out=FOLDER | {"default": Path()}).parse_args([]).out == Path()
    for words in (["--rounds", "1"], ["--out", "found.json"]):
        with pytest.raises(SystemExit):
            parser_of("What it does.").parse_args(words)


def test_the_help_has_the_whole_docstring_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/a/bin/python3", "-m", "benchmarks.one", "--rounds", "2"])
    monkeypatch.setattr("sys.argv", ["/a/benchmarks/one.py", "--rounds", "2"])
    text = parser_of(
        "What it does.\n\n    python -m benchmarks.one [--rounds 2]\n\nMore.", rounds=1
    ).format_help()
    assert text.startswith("usage: python -m benchmarks.one [-h] [--rounds ROUNDS]\n")
    assert "\n    python -m benchmarks.one [--rounds 2]\n\nMore." in text


def test_facts_name_the_command_without_paths_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", "benchmarks.one", "--python", "/a/venv/bin/python", "--serve", "--x 1"]
    monkeypatch.setattr("sys.orig_argv", ["/a/bin/python3", *words])
    found = harness.facts({"/a/venv/bin/python": "VENV/bin/python", None: "CHECKOUT"})
    assert found["command"] == "python -m benchmarks.one --python VENV/bin/python --serve '--x 1'"
    assert found.keys() == {"command", "date", "commit", "python", "processor", "num_cpus"}


def test_a_hidden_path_is_a_whole_word_or_an_options_value(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "-m", "benchmarks.one", "--before", ".", "--after=.", "--rounds=0.5", "--out", "./a.b"]
    monkeypatch.setattr("sys.orig_argv", words)
    command = harness.facts({Path("."): "CHECKOUT"})["command"]
    assert command == ("python -m benchmarks.one --before CHECKOUT --after=CHECKOUT --rounds=0.5 --out ./a.b")


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert harness.commit_of(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "First"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert harness.commit_of(tmp_path) == head.stdout.strip()
    assert (ROOT / "benchmarks/harness.py").exists()


def test_a_page_begins_with_where_its_figures_come_from() -> None:
    text = harness.heading("One", ABOUT, "2 threads")
    assert text == "# One\n\n`python -m benchmarks.one`, today, commit aaaaaaaaaaaa, a chip, 2 threads"


def test_a_table_has_names_on_the_left_and_numbers_on_the_right() -> None:
    rows = [("a", 1), ("b", 2.5)]
    assert harness.table(("case", "ms"), rows, 1) == "| case | ms |\n| --- | ---: |\n| a | 1 |\n| b | 2.5 |"
    assert harness.table(("case", "ms"), rows).splitlines()[1] == "| --- | --- |"


def test_results_are_written_if_there_is_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"rows": [Row("a", 1.5)], "best": {"b": Row("b", 1.0)}}
    harness.publish(None, "the page", content)
    assert capsys.readouterr().out == "the page\n"
    harness.publish(tmp_path / "new" / "found", "the page", content)
    assert (tmp_path / "new/found.md").read_text() == "the page"
    rows = [{"name": "a", "seconds": 1.5}]
    found = json.loads((tmp_path / "new/found.json").read_text())
    assert found == {"rows": rows, "best": {"b": {"name": "b", "seconds": 1.0}}}


def test_lines_of_runs_are_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (None, tmp_path / "runs.jsonl", tmp_path / "runs.jsonl"):
        harness.append_json(path, {"a": 1})
    assert (tmp_path / "runs.jsonl").read_text() == '{"a": 1}\n' * 2
    assert capsys.readouterr().out == '{"a": 1}\n' * 3


def test_rounds_take_turns_and_warm_ups_are_left_out() -> None:
    order: list[str] = []
    said: list[tuple[str, int]] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    runs = {name: partial(run, name) for name in "ab"}
    found = in_turn(runs, 2, num_warm_ups=1, told=lambda name, result: said.append((name, result)))
    assert order == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}
    assert said == [("a", 3), ("b", 4), ("a", 5), ("b", 6)]


def test_ratios_are_taken_within_rounds() -> None:
    # medians of both would give 1
    assert harness.median_ratio([2.0, 3.0, 9.0], [1.0, 3.0, 3.0]) == 2.0


def test_sigterm_ends_the_process_as_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        harness.exit_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
