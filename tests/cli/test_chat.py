"""`alignedserve chat` as a user types it: at a server of the demo model, and at a gateway whose island has a script.

The latter stands still, refuses and fails when it is told to. `doctor --url` is here too, for the server's sake.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from alignedserve import demo
from alignedserve.gateway.http.keys import owners_of
from alignedserve.launch.ports import free_port
from alignedserve.protocol.messages import Rejected, Submit
from tests.cli.forked import forked
from tests.cli.terminal import CTRL_C, CTRL_D, Terminal
from tests.doc_sessions import ROOT, form, sessions
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import Served, play, served
from tests.launch.server import Server, serving
from tests.test_doc_commands import PAGES, SHELL, blocks, commands_of


def alignedserve(*words: str, said: str = "", key: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alignedserve", *words]
    environment = os.environ | {"OPENAI_API_KEY": key}
    return subprocess.run(command, input=said, capture_output=True, text=True, timeout=60, env=environment)


# ---- at a server ----


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.mark.slow
@pytest.mark.drawn(one_in=2, whole=True)
def test_a_quick_question_is_answered_on_stdout(server: Server) -> None:
    done = alignedserve("chat", "--url", f"{server.url}/v1", "-q", "Count from 7 to 12.")
    assert (done.returncode, done.stdout, done.stderr) == (0, "7, 8, 9, 10, 11, 12\n", "")


QUICKSTART = ROOT / "docs/quickstart.md"


@pytest.mark.slow
def test_the_quickstart_shows_what_is_printed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the server's address and the batch's id in place of those that are shown."""
    for command in ("CHAT", "BATCH_SUBMIT", "BATCH_LIST", "BATCH_RESULTS"):
        monkeypatch.setenv(f"ALIGNEDSERVE_{command}_URL", server.url)
    found = re.search(r"^cat > in.jsonl <<'END'\n(.*)^END$", QUICKSTART.read_text(), re.DOTALL | re.MULTILINE)
    assert found
    (tmp_path / "in.jsonl").write_text(found[1])
    monkeypatch.chdir(tmp_path)
    start, *others = [each for each in sessions(QUICKSTART) if each.output]
    printed = form("\n".join(server.raw_lines))
    assert set(form(start.output)) <= set(printed) and form(start.output)[-1].startswith(
        "TIME ready after N s: "
    )
    batch_id = ""
    for session in others:
        done = alignedserve(*(batch_id if word == "BATCH_ID" else word for word in session.words[1:]))
        assert done.returncode == 0, done.stderr
        # A terminal shows a bar instead of a line for each status.
        said = [line for line in done.stderr.splitlines() if not line.startswith("batch_")]
        assert form(session.output) == form("\n".join([*done.stdout.splitlines(), *said])), session.command
        batch_id = next((line for line in done.stdout.splitlines() if line.startswith("batch_")), "").split(
            " "
        )[0]
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == "h-o-u-s-e"


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", QUICKSTART], ids=lambda page: page.stem)
def test_the_sample_of_a_page_counts_right(
    server: Server, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = [text for text in blocks(page, "python") if "openai.OpenAI(" in text]
    assert "http://127.0.0.1:8000/v1" in code
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), page.name, "exec"), {})
    assert capsys.readouterr().out == "7, 8, 9, 10, 11, 12"


@pytest.mark.slow
def test_a_load_without_options_is_answered(server: Server) -> None:
    done = alignedserve("bench", "serve", "--base-url", server.url, "--num-prompts", "10", "--disable-tqdm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Successful requests: +10\b", done.stdout) and "Correct answers" in done.stdout


@pytest.mark.slow
@pytest.mark.drawn(one_in=2, whole=True)
def test_through_a_pipe_each_line_is_a_message_of_one_chat(server: Server) -> None:
    lines = 'Count from 7 to 12.\n\n/help\nSpell the word "hippo".\n'
    done = alignedserve("chat", "--url", server.url, "--stats", said=lines)
    assert done.returncode == 0
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == ("7, 8, 9, 10, 11, 12", "h-i-p-p-o")
    figures = [int(each) for each in re.findall(r"(\d+) prompt tokens", done.stderr)]
    assert len(figures) == 3 and figures[0] < figures[1] < figures[2]
    assert re.search(
        r"^first token after \d+\.\d{3} s, .* tokens in .* tokens/s\)$", done.stderr, re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.drawn(one_in=2, whole=True)
def test_in_a_terminal_the_chat_goes_on_until_it_is_cleared_and_ended(server: Server) -> None:
    at = Terminal("chat", "--url", server.url, "--stats")
    at.until("demo at ")
    figures = []
    for line in ("Count from 7 to 12.", "Count from 7 to 12.", "/clear", "Count from 7 to 12."):
        at.until("> ")
        at.type(f"{line}\r")
        if not line.startswith("/"):
            at.until("7, 8, 9, 10, 11, 12")
            figures.append(int(re.findall(r"(\d+)$", at.until(" prompt tokens"))[0]))
    assert figures[0] == figures[2] < figures[1]
    at.until("> ")
    at.type(CTRL_D)
    assert at.end() == 0


@pytest.mark.slow
@pytest.mark.drawn(one_in=2, whole=True)
def test_a_server_that_runs_is_found_well(server: Server) -> None:
    done = alignedserve("doctor", "--url", f"{server.url}/v1", "--json")
    assert done.returncode == 0, done.stdout
    found = {each["area"]: each for each in json.loads(done.stdout)["findings"]}
    assert list(found) == ["health", "version", "processes", "model", "request"]
    assert {each["level"] for each in found.values()} == {"ok"}
    assert found["processes"]["text"] == "all 5 are up" and found["model"]["text"] == "demo"
    assert "first token after" in found["request"]["text"]


# Those of a block that starts a server of its own need that one's flags.
CURLS = [
    (page, words)
    for page in PAGES
    for text in blocks(page, *SHELL)
    if "alignedserve serve" not in text
    for words in commands_of(text)
    if words[0] == "curl"
]


@pytest.mark.slow
def test_what_the_pages_send_by_curl_is_answered(server: Server) -> None:
    assert len(CURLS) >= 4
    for page, words in CURLS:
        (url,) = [word for word in words if word.startswith("http")]
        fields = [words[number + 1] for number, word in enumerate(words) if word == "-H"]
        bodies = [words[number + 1] for number, word in enumerate(words) if word == "-d"]
        answer = httpx2.request(
            "POST" if bodies else "GET",
            url.replace("http://127.0.0.1:8000", server.url),
            headers={name: value for name, _, value in (field.partition(": ") for field in fields)},
            content=bodies[0] if bodies else None,
            timeout=60,
        )
        assert answer.status_code == 200, (page, answer.text)


# ---- at a gateway with a script ----


async def chat(at: Served, *words: str, said: str = "", key: str = "") -> subprocess.CompletedProcess[str]:
    url = str(at.http.base_url)
    environment = {"OPENAI_API_KEY": key}
    return await asyncio.to_thread(forked, "chat", "--url", url, *words, said=said, environment=environment)


def prompt_of(submit: Submit) -> str:
    return TOKENIZER.decode(submit.request.prompt)


def test_a_request_has_what_was_said_before_and_what_was_asked_for() -> None:
    async def scenario() -> None:
        async with served() as at:
            words = ["--system-prompt", "Be kind.", "--service-tier", "flex", "--temperature", "0.5"]
            done = await chat(at, *words, "--max-tokens", "99", "--seed", "7", said="How far?\nHow long?\n")
            assert done.stdout == "one two three\none two three\n", done.stderr
            second = at.router.submitted[1]
            said = prompt_of(second)
            places = [said.index(text) for text in ("Be kind.", "How far?", "one two three", "How long?")]
            assert places == sorted(places)
            params = second.request.params
            assert (params.temperature, params.max_tokens, params.seed) == (0.5, 99, 7)
            assert second.request.tier == "be"

    play(scenario)


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allowed = 2
            terminal = Terminal("chat", "--url", str(at.http.base_url))
            await asyncio.to_thread(terminal.until, "> ")
            terminal.type("How far?\r")
            await asyncio.to_thread(terminal.until, "on")
            terminal.type(CTRL_C)
            await asyncio.to_thread(terminal.until, "[stopped]", again=CTRL_C)
            # the request is closed as well
            await at.router.until(lambda: at.router.aborted == [at.router.submitted[0].request.key])
            at.router.allowed = None
            await asyncio.to_thread(terminal.until, "> ")
            terminal.type("/system Be brief.\r")
            await asyncio.to_thread(terminal.until, "> ")
            terminal.type("How long?\r")
            await asyncio.to_thread(terminal.until, "one two three")
            said = prompt_of(at.router.submitted[1])
            assert re.search(r"Be brief\..*How far\?.*on \[stopped\].*How long\?", said, re.DOTALL), said
            await asyncio.to_thread(terminal.until, "> ")
            terminal.type(CTRL_C)
            assert await asyncio.to_thread(terminal.end, again=CTRL_C) == 0

    play(scenario)


def test_what_is_refused_is_forgotten_and_the_chat_goes_on() -> None:
    async def scenario() -> None:
        async with served() as at:
            first = True

            def refuse(submit: Submit) -> Rejected | None:
                nonlocal first
                is_first, first = first, False
                return Rejected(submit.request.key, "full", "7 wait\nalready") if is_first else None

            at.router.refuse = refuse
            done = await chat(at, said="How far?\nHow long?\n")
            assert (done.returncode, done.stdout) == (1, "one two three\n")
            assert re.fullmatch(r"Error: .*7 wait already.*\n", done.stderr)
            assert "How far?" not in prompt_of(at.router.submitted[1])

    play(scenario)


def test_an_answer_that_fails_is_an_error() -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allowed = 1
            asking = asyncio.create_task(chat(at, "-q", "How far?"))
            await at.router.until(lambda: bool(at.router.submitted))
            at.router.fail("NaN in its logits")
            done = await asking
            assert done.returncode == 1 and done.stdout in ("", "o\n")
            assert re.fullmatch(r"Error: .*NaN in its logits.*\n", done.stderr)

    play(scenario)


def test_a_model_does_not_drive_the_terminal() -> None:
    async def scenario() -> None:
        answer = "red\x1b[31m\x07\x9b2J\x7f\tand\nblue"
        async with served(ScriptedRouter(answer=answer_of(answer))) as at:
            assert (await chat(at, "-q", "What?")).stdout == f"{answer}\n"
            terminal = Terminal("chat", "--url", str(at.http.base_url), "-q", "What?")
            assert await asyncio.to_thread(terminal.end) == 0
            hint, _, shown = terminal.shown.partition("\n")
            assert demo.ABILITIES in hint and shown == "red[31m2J\tand\r\nblue\r\n"

    play(scenario)


def test_what_is_wrong_is_one_line() -> None:
    async def scenario() -> None:
        async with served(key_owners=owners_of(["secret"], None)) as at:
            assert (await chat(at, "-q", "What?", key="secret")).stdout == "one two three\n"
            for words, reason in (
                ([], "the server needs an API key; give --api-key KEY, or set OPENAI_API_KEY"),
                (["--api-key", "wrong"], "the server does not know this API key; give --api-key KEY"),
                (
                    ["--api-key", "secret", "--model-name", "no/such"],
                    "Error: --model-name no/such: does not exist",
                ),
                (["--api-key", "secret", "--max-tokens", "0"], "Error: --max-tokens 0: must be"),
                (["--api-key", "secret", "-q", " "], "Error: -q: give a question"),
                (["--url", f"http://127.0.0.1:{free_port('127.0.0.1')}"], "`alignedserve serve` starts one"),
                (["--url", "nonsense"], "must be like http://"),
                (["--api-key", "sécret"], "printable ASCII"),
            ):
                command = ["chat", "--url", str(at.http.base_url), "-q", "What?", *words]
                done = await asyncio.to_thread(forked, *command, environment={"OPENAI_API_KEY": ""})
                is_usage = reason.startswith(("must be like http://", "printable ASCII", "Error: -"))
                code = 2 if is_usage else 1
                assert (done.returncode, done.stdout) == (code, ""), words
                assert done.stderr.startswith("Error: ") and reason in done.stderr, done.stderr
                assert done.stderr.count("\n") == 1

    play(scenario)


def test_the_demo_model_is_asked_at_temperature_0_unless_another_is_given() -> None:
    async def scenario() -> None:
        async with served() as at:
            await chat(at, "-q", "What?")
            await chat(at, "-q", "What?", "--temperature", "0.5")
            assert [each.request.params.temperature for each in at.router.submitted] == [0.0, 0.5]

    play(scenario)
