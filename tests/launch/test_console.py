"""Each line of `serve` has a time or is a JSON object, whatever wrote it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignedserve.launch.console import FormattedLines, own_line
from alignedserve.launch.ports import free_port
from alignedserve.process.logs import FORMATS
from tests.launch.restarting import restart
from tests.launch.server import POOL, Server, serving

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "
LOGGED = "2026-01-02T03:04:05.678Z INFO decode-0 alignedserve.x [-] a  line"
AS_JSON = '{"time": "2026-01-02T03:04:05.678Z", "level": "info", "message": "a line", "process": "decode-0"}'


def printed(form: str, *texts: str) -> list[str]:
    written = io.StringIO()
    lines = FormattedLines(written, form, "warning")
    for text in texts:
        lines.write(text)
        lines.flush()
    return written.getvalue().splitlines()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ready after 5.4 s\n", "ready after 5.4 s"),
        ("(DecodeActor pid=7) from a library\n", r"\(DecodeActor pid=7\) from a library"),
        ("\x1b[36m(DecodeActor pid=7, ip=10.0.0.2)\x1b[0m odd\n", r"\(DecodeActor pid=7, ip=10.0.0.2\) odd"),
        ("(raylet) no memory\n", r"\(raylet\) no memory"),
        ("a bell \a and \u202e\n", r"a bell \\x07 and \\u202e"),
    ],
)
def test_a_line_without_a_time_gets_one(text: str, expected: str) -> None:
    (line,) = printed("text", text)
    assert re.fullmatch(TIME + expected, line), line


def test_lines_of_processes_lose_rays_prefix() -> None:
    prefix = "(DecodeActor pid=7) "
    assert printed("text", f"{prefix}{LOGGED}\n{prefix}    raise ValueError\n") == [
        LOGGED,
        "    raise ValueError",
    ]
    assert printed("json", f"{prefix}{AS_JSON}\n") == [AS_JSON]


@pytest.mark.parametrize("form", FORMATS)
def test_what_ray_repeats_at_length_and_empty_lines_are_left_out(form: str) -> None:
    said = "(raylet) A worker died or was killed while executing a task by an unexpected system error.\n"
    assert printed(form, said, "\n", "(DecodeActor pid=7) \n") == []


def test_a_line_is_written_once_it_has_ended() -> None:
    (line,) = printed("text", "one ", "line", "\n", "another")
    assert line.endswith("Z one line")


def test_what_any_thread_has_begun_is_written_at_the_end() -> None:
    written = io.StringIO()
    lines = FormattedLines(written, "text", "warning")
    lines.write("one")
    # It goes on as long as its thread does.
    is_over = threading.Event()

    def run() -> None:
        lines.write("two")
        is_over.wait()
        lines.write("three")

    other = threading.Thread(target=run)
    other.start()
    while "two" not in [begun.text for begun in list(lines._open)]:
        time.sleep(0.001)
    assert written.getvalue() == ""
    lines.finish()
    is_over.set()
    other.join()
    lines.write("four\n")
    assert [line.split()[1] for line in written.getvalue().splitlines()] == ["one", "two", "three", "four"]


SHOWING = """
import sys, time
from alignedserve.launch import console
console.SHOW_S = 0.1
console.format_output(sys.argv[1])
def until_told():
    assert sys.stdin.readline()
"""


@contextmanager
def showing(form: str, program: str) -> Iterator[tuple[Callable[[], str], Callable[[], None]]]:
    """A process that writes like this. Yields what returns the message of its next line, and what tells it to go on."""
    command = [sys.executable, "-c", SHOWING + program, form]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdin and process.stdout
        asking, answers = process.stdin, process.stdout

        def message() -> str:
            line = answers.readline()
            if form == "json":
                return str(json.loads(line)["message"])
            found = re.fullmatch(f"{TIME}(.*)\n", line)
            assert found, line
            return found[1]

        def go_on() -> None:
            asking.write("\n")
            asking.flush()

        yield message, go_on
        asking.close()
        answers.read()
        assert process.wait() == 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_question_is_shown_before_its_answer(form: str, stream: str) -> None:
    program = f"""
print("sure? [y/n] ", end="", file=sys.{stream})
until_told()
print("yes", file=sys.{stream})
print("and ", end="", file=sys.{stream})
"""
    with showing(form, program) as (message, go_on):
        assert message().rstrip() == "sure? [y/n]"
        go_on()
        # The last of them at the end of the process.
        assert (message(), message().rstrip()) == ("yes", "and")


@pytest.mark.parametrize("form", FORMATS)
def test_the_progress_of_a_download_is_shown(form: str) -> None:
    program = """
from tqdm import tqdm
with tqdm(total=4, desc="weights", mininterval=0, file=sys.stderr) as bar:
    for _ in range(2):
        until_told()
        bar.update()
        bar.update()
"""
    with showing(form, program) as (message, go_on):
        for percent in (0, 50, 100):
            # If the process is slow, states between these are shown as well.
            while f" {percent}%" not in (found := message()):
                assert found.startswith("weights:") and found.count("weights") == 1
            if percent < 100:
                go_on()


def test_what_overwrites_a_line_is_none_of_a_process() -> None:
    text, as_json = (
        printed(form, f"an error \r{line}\n") for form, line in (("text", LOGGED), ("json", AS_JSON))
    )
    assert re.fullmatch(TIME + re.escape(LOGGED), text[0]) and len(text) == 1
    assert json.loads(as_json[0])["process"] == "launcher" and json.loads(as_json[0])["message"] == AS_JSON


def test_each_line_is_an_object() -> None:
    lines = printed(
        "json",
        "ready\n",
        "(DecodeActor pid=7, ip=10.0.0.2) odd\n",
        "(autoscaler +5s) Adding 1 node\n",
        '(DecodeActor pid=7) {"time": "no", "and": no JSON\n',
    )
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert all(re.fullmatch(TIME, f"{each['time']} ") for each in found)
    assert [(each["process"], each["level"], each["message"]) for each in found] == [
        ("launcher", "warning", "ready"),
        ("DecodeActor", "info", "odd"),
        ("autoscaler", "info", "Adding 1 node"),
        ("DecodeActor", "info", '{"time": "no", "and": no JSON'),
    ]
    assert (found[1]["pid"], found[1]["host"]) == (7, "10.0.0.2") and "pid" not in found[0]


def test_a_line_of_the_launcher_is_as_in_its_log() -> None:
    line = own_line("json", "warning", "alignedserve.launch.serve", "decode-0 is down")
    (found,) = map(json.loads, printed("json", f"{line}\n"))
    assert (found["level"], found["logger"], found["message"]) == (
        "warning",
        "alignedserve.launch.serve",
        "decode-0 is down",
    )
    assert own_line("text", "warning", "x", "decode-0 is down") == "decode-0 is down"


def check_lines(server: Server, form: str) -> set[str]:
    """The names of the processes in the lines."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", "\n".join(server.raw_lines))
    if form == "json":
        found = [json.loads(line) for line in server.raw_lines]
        assert all(each["time"] and each["level"] and each["message"] for each in found)
        return {each["process"] for each in found}
    assert all(re.match(TIME, line) for line in server.raw_lines), server.raw_lines
    return {words[2] for line in server.raw_lines if (words := line.split()) and words[1] == "INFO"}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_every_line_of_a_server_has_the_format(form: str, tmp_path: Path) -> None:
    """Also those about a death and a restart."""
    with serving("--log-format", form, "--log-dir", str(tmp_path), *POOL) as server:
        httpx2.get(f"{server.url}/v1/models", verify=False)
        server.until_said("answered")
        os.kill(server.pid_of("decode-0"), signal.SIGKILL)
        server.until_said("decode-0 is down")
        server.until_whole()
        restart(server)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        names = check_lines(server, form)
    assert "gateway-0" in names and ("launcher" in names) == (form == "json")
    if form == "json":
        logged = (tmp_path / "launcher.log").read_text().splitlines()
        for lines in (server.raw_lines, logged):
            (down,) = [found for found in map(json.loads, lines) if "decode-0 is down" in found["message"]]
            assert (down["level"], down["logger"]) == ("warning", "alignedserve.launch.serve")


def test_an_error_that_ends_the_start_is_an_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "alignedserve", "serve", "--log-format", "json"]
    options = ["--port", str(free_port("127.0.0.1")), "--api-key-file", str(tmp_path / "missing")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = map(json.loads, done.stderr.splitlines())
    assert line["message"].startswith("Error: --api-key-file ") and line["level"] == "error"
