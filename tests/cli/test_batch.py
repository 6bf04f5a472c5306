"""`alignedserve batch` as a user types it, against a gateway with a real Redis and a scripted island."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from alignedserve.cli.main import cli
from alignedserve.cli.own_server import _until_ready, own_server
from alignedserve.launch.ports import free_port
from tests.cli.forked import forked
from tests.gateway.batching import QUICK, System, jsonl, play, question, questions

Run = Callable[..., Awaitable[tuple[int, str, str]]]


def commands(scenario: Callable[[System, Run], Awaitable[None]]) -> None:
    async def with_commands(at: System) -> None:
        async def run(*words: str) -> tuple[int, str, str]:
            """(exit code, output, errors)"""
            url = str(at.gateway.http.base_url)
            done = await asyncio.to_thread(forked, "batch", *words, "--url", url)
            return done.returncode, done.stdout, done.stderr

        await scenario(at, run)

    play(with_commands, QUICK)


def written(path: Path, lines: list[Any]) -> str:
    path.write_bytes(jsonl(lines))
    return str(path)


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_run_answers_all_of_a_file(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        source, output = written(tmp_path / "in.jsonl", questions(20)), tmp_path / "out.jsonl"
        code, out, err = await run("run", "-i", source, "-o", str(output))
        assert (code, out) == (0, ""), err
        assert "completed, 20/20 lines, 0 failed" in err
        assert ids_in(output) == [f"q{number}" for number in range(20)]
        assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}

    commands(scenario)


@pytest.mark.slow
def test_lines_that_fail_are_in_a_file_of_their_own_and_in_the_exit_code(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        source = written(tmp_path / "in.jsonl", [question(1), question(2, top_p=2.0)])
        code, _, err = await run("run", "-i", source, "-o", str(tmp_path / "out.jsonl"))
        assert code == 1 and err.endswith("Error: 1 of 2 lines failed\n")
        assert ids_in(tmp_path / "out.jsonl") == ["q1"]
        assert ids_in(tmp_path / "out.jsonl.errors") == ["q2"]

    commands(scenario)


def test_a_file_that_is_none_is_told_line_by_line(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        source = written(tmp_path / "in.jsonl", [question(1), question(1)])
        # The server's own words, with the option as it is typed.
        code, _, err = await run("submit", source, "--completion-window", "5m")
        assert (code, err) == (2, "Error: --completion-window 5m: must be from 10m to 7d\n")
        assert not (await at.client.files.list()).data
        code, _, err = await run("submit", source, "--wait")
        assert code == 1 and "line 2: custom_id='q1': another line has it too\n" in err
        for content, problem in (
            (b"", "is empty"),
            (b"\n\n", "is empty"),
            (b'\n{"url": ', "line 2 is not JSON: Expecting value: line 1 column 9 (char 8)"),
            (b'{"url": "\xff"}', "line 1 is not UTF-8"),
            (b"[1]", "line 1 is not a request with a url"),
        ):
            (tmp_path / "nonsense").write_bytes(content)
            code, _, err = await run("submit", str(tmp_path / "nonsense"))
            assert (code, err) == (2, f"Error: {tmp_path}/nonsense: {problem}\n")
        # That of the batch that failed.
        assert len((await at.client.files.list()).data) == 1

    commands(scenario)


def test_a_job_is_submitted_looked_at_cancelled_and_fetched(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        at.router.allowed = 0
        code, out, err = await run("submit", written(tmp_path / "in.jsonl", questions(3)))
        assert code == 0, err
        batch_id = out.strip()
        await at.router.until(lambda: len(at.router.submitted) == 3)
        at.router.allowed = None
        at.router._say(at.router.submitted[0].request.key)
        # A line that is submitted once more, as on a busy machine, is not answered either.
        at.router.allowed = 0
        while (await at.client.batches.retrieve(batch_id)).request_counts.completed != 1:  # type: ignore[union-attr]
            await asyncio.sleep(0.02)
        _, out, _ = await run("status", batch_id)
        assert json.loads(out)["status"] == "in_progress"
        _, out, _ = await run("list")
        assert out.split() == [batch_id, "in_progress", "1+0/3", "/v1/chat/completions"]
        code, _, err = await run("results", batch_id, "-o", str(tmp_path / "out.jsonl"))
        assert code == 1 and err == f"Error: batch {batch_id} is in_progress and has no results\n"
        assert (await run("cancel", batch_id, "--wait"))[1] == "cancelled\n"
        code, _, _ = await run("results", batch_id, "-o", str(tmp_path / "out.jsonl"))
        assert code == 0 and ids_in(tmp_path / "out.jsonl") == ["q0"]

    commands(scenario)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--polcy", "fcfs"], "No such option '--polcy'"),
        (["demo", "--kv-cache-dtype", "fp9"], "'fp9' is not one of auto, fp8, int8; did you mean 'fp8'?"),
        (["demo", "--port"], "'--port' requires an argument"),
    ],
)
def test_options_that_serve_does_not_have_start_no_server(
    tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.cli.own_server.own_server", pytest.fail)
    source = written(tmp_path / "in.jsonl", questions(1))
    done = CliRunner().invoke(cli, ["batch", "run", "-i", source, "-o", str(tmp_path / "out.jsonl"), *words])
    assert done.exit_code == 2 and message in done.stderr


def test_answers_that_could_not_be_written_are_not_asked_for(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        source = written(tmp_path / "in.jsonl", questions(1))
        for option in ("-o", "-e"):
            words = ["-o", str(tmp_path / "out"), option, str(tmp_path / "none" / "out")]
            code, _, err = await run("run", "-i", source, *words)
            assert code == 2 and f"'{tmp_path}/none' is not a directory that can be written to" in err
        assert (await at.gateway.client.batches.list()).data == []

    commands(scenario)


def test_no_file_is_written_over_another(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        source, output = written(tmp_path / "in.jsonl", questions(1)), tmp_path / "out.jsonl"
        (tmp_path / "link").symlink_to(source)
        for places, problem in (
            (["-o", source], "is the input, and would be overwritten"),
            (["-o", str(tmp_path / "link")], "is the input, and would be overwritten"),
            (["-o", str(output), "-e", source], "is the input, and would be overwritten"),
            (["-o", str(output), "-e", str(output)], "answers and errors must go to different files"),
            (["-o", "/dev/null"], "is not a plain file: name a file for errors with --errors"),
            (["-o", "/dev/stdout"], "is not a plain file: name a file for errors with --errors"),
        ):
            code, _, err = await run("run", "-i", source, *places)
            assert code == 2 and problem in err
        assert (await at.gateway.client.batches.list()).data == []

    commands(scenario)


def test_names_may_be_as_long_as_the_file_system_has_them(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        source = written(tmp_path / "in.jsonl", [question(0), question(1, max_tokens=-1)])
        longest = os.pathconf(tmp_path, "PC_NAME_MAX")
        output, errors = tmp_path / ("o" * longest), tmp_path / ("e" * longest)
        code, _, err = await run("run", "-i", source, "-o", str(output), "-e", str(errors))
        assert code == 1 and err.endswith("1 of 2 lines failed\n"), err
        assert len(ids_in(output)) == len(ids_in(errors)) == 1
        num_jobs = len((await at.gateway.client.batches.list()).data)
        for words, said in (
            (
                ["-o", str(output)],
                f"{output}.errors: File name too long: name a file for errors with --errors",
            ),
            (["-o", f"{output}o", "-e", str(errors)], f"{output}o: File name too long"),
            (["-o", str(output), "-e", f"{errors}e"], f"{errors}e: File name too long"),
        ):
            code, _, err = await run("run", "-i", source, *words)
            assert code == 2 and err.endswith(f": {said}\n"), err
        assert len((await at.gateway.client.batches.list()).data) == num_jobs

    commands(scenario)


def test_devices_links_and_rights_stay_what_they_are(tmp_path: Path) -> None:
    """As root, `-o /dev/null` once left a plain file in its place."""

    async def scenario(at: System, run: Run) -> None:
        source, kept = written(tmp_path / "in.jsonl", questions(2)), tmp_path / "kept.jsonl"
        kept.write_text("before")
        kept.chmod(0o600)
        (tmp_path / "link").symlink_to(kept)
        code, _, err = await run("run", "-i", source, "-o", str(tmp_path / "link"))
        assert code == 0, err
        assert (tmp_path / "link").is_symlink() and ids_in(kept) == ["q0", "q1"]
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        code, _, err = await run("run", "-i", source, "-o", "/dev/null", "-e", str(tmp_path / "errors"))
        assert code == 0 and Path("/dev/null").is_char_device(), err
        code, out, err = await run("run", "-i", source, "-o", "/dev/stdout", "-e", str(tmp_path / "errors"))
        assert code == 0 and [json.loads(line)["custom_id"] for line in out.splitlines()] == ["q0", "q1"], err
        # A full disk is a line, and the file is what it was.
        code, _, err = await run("run", "-i", source, "-o", "/dev/full", "-e", str(tmp_path / "errors"))
        assert code == 1 and err.endswith("Error: /dev/full: No space left on device\n")
        batch_id = (await at.gateway.client.batches.list()).data[0].id
        kept.write_text("before")
        code, _, err = await asyncio.to_thread(
            _run_on_a_full_disk, str(at.gateway.http.base_url), batch_id, kept
        )
        assert code == 1 and err.endswith(f"Error: {kept}: File too large\n")
        assert kept.read_text() == "before"
        names = {"in.jsonl", "kept.jsonl", "link"}
        assert {path.name for path in tmp_path.iterdir()} == names

    commands(scenario)


def _run_on_a_full_disk(url: str, batch_id: str, output: Path) -> tuple[int, str, str]:
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
    command = "from alignedserve.cli import main; main()"
    words = ["batch", "results", batch_id, "-o", str(output), "--url", url]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", limited + command, *words], capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout, done.stderr


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    async def scenario(at: System, run: Run) -> None:
        code, out, err = await run("status", "batch_none")
        assert (code, out) == (1, "") and err == "Error: batch_id='batch_none': there is no such batch\n"
        for words in (
            ["status", "../../etc"],
            ["cancel", ".."],
            ["results", "a?b", "-o", str(tmp_path / "out")],
        ):
            code, out, err = await run(*words)
            assert (code, out, err) == (1, "", f"Error: batch_id={words[1]!r}: there is no such batch\n")
        await at.redis.kill()
        code, _, err = await run("list")
        assert code == 1 and err.startswith("Error: files and batches: the store can't be reached now")
        assert err.count("\n") == 1

    commands(scenario)


def test_a_server_that_is_not_there_is_what_chat_says(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", questions(1))
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    done = forked("batch", "submit", source, "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: {url}: no server answers there; `alignedserve serve` starts one, --url names another\n"
    )


# ---- a server of its own ----


@pytest.mark.parametrize(
    "line",
    [
        "ready after 0.1 s: http://127.0.0.1:1234/v1",
        "2026-11-28 09:00:00 INFO launcher: ready after 17.5 s: http://127.0.0.1:1234/v1",
        '{"time": "09:00:00", "message": "ready after 17.5 s: http://127.0.0.1:1234/v1", "process": "launcher"}',
    ],
)
def test_the_url_of_its_server_is_found_in_every_format_of_log_lines(line: str) -> None:
    said: list[str] = []
    assert _until_ready(io.StringIO(f"starting\n{line}\n"), said.append) == "http://127.0.0.1:1234"
    with pytest.raises(click.ClickException, match="the server did not start"):
        _until_ready(io.StringIO("starting\n"), said.append)


def test_output_that_can_not_be_shown_does_not_hold_the_server_up() -> None:
    def say(line: str) -> None:
        raise BrokenPipeError

    assert _until_ready(io.StringIO("a\nready after 0.1 s: http://h:1/v1\nb\n"), say) == "http://h:1"


# Prints its options as `serve` would its lines, and waits to be stopped.
SERVE = """#!/bin/sh
echo "options: $*"
echo "ready after 0.1 s: http://127.0.0.1:1234/v1"
exec sleep 100
"""


def options_of_own_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> list[str]:
    program = tmp_path / "serve"
    program.write_text(SERVE)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    said: list[str] = []
    with own_server(options, said.append) as url:
        assert url == "http://127.0.0.1:1234"
    return said[0].partition(" serve ")[2].split()


def last_value(flag: str, words: list[str]) -> str:
    """What click takes of a flag that is given several times."""
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


def test_a_port_and_a_state_directory_that_are_given_are_those_of_its_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = options_of_own_server(monkeypatch, tmp_path, "M", "--port", "1234", "--state-dir", "kept")
    assert (last_value("--port", words), last_value("--state-dir", words)) == ("1234", "kept")
    words = options_of_own_server(monkeypatch, tmp_path, "M")
    assert int(last_value("--port", words)) > 1023
    # gone with the server
    assert not Path(last_value("--state-dir", words)).exists()


def test_a_server_that_ends_before_it_is_ready_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(click.ClickException, match="the server did not start"),
        own_server([], lambda line: None),
    ):
        pass


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_a_job_is_kept_in_the_state_directory(tmp_path: Path) -> None:
    source, output = written(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="kept-", dir="/tmp") as state:
        own = ["--port", str(port), "--state-dir", state]
        done = forked("batch", "run", "-i", source, "-o", str(output), *own)
        assert done.returncode == 0, done.stderr
        assert f"http://127.0.0.1:{port}/v1" in done.stderr and ids_in(output) == ["q0", "q1"]
        assert any(path.stat().st_size for path in Path(state).rglob("*") if path.is_file())
