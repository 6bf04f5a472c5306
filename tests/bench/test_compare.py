"""Servers side by side: our gateway with its batch API, and a server without one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from alignedserve.bench.best_effort import ENDPOINT, start_best_effort
from alignedserve.bench.client import Outcome
from alignedserve.bench.compare import Measured, Server, remarks, servers_of, table, verdict
from alignedserve.bench.compare_config import CompareConfig
from alignedserve.bench.results import evaluate
from alignedserve.cli.bench import command
from tests.gateway.batching import System, play

QUICK = ("--num-prompts", "4", "--request-rate", "40", "--job-warmup-s", "0.3", "--job-lines", "3000")
SHORT = ("--input-len", "5", "--output-len", "3", "--job-input-len", "5", "--job-output-len", "3")


class Plain(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that has chat and nothing else."""

    num_plain = 0

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "plain"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            self.answer(404, b'{"detail": "Not Found"}')
        elif json.loads(body).get("stream"):
            chunk = {"choices": [{"delta": {"content": "yes"}}]}
            self.answer(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        else:
            type(self).num_plain += 1
            time.sleep(0.02)
            self.answer(200, b'{"choices": []}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def plain_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Plain) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_with_a_batch_api_beside_one_without(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "found.json", tmp_path / "plot.png"

    async def scenario(at: System) -> None:
        with plain_server() as other:
            ours = str(at.gateway.http.base_url)
            words = ["compare", ours, f"{other}/v1", "--label", "ours", "--label", "other", *QUICK, *SHORT]
            words += ["--output", str(output), "--plot", str(plot), "--api-key", "secret"]
            done = await asyncio.to_thread(CliRunner().invoke, command, words)
            assert done.exit_code == 0, done.output
            rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| o")]
            assert [(row[0].strip(), row[1].strip(), row[2].strip()) for row in rows] == [
                ("ours", "alone", "4/4"),
                ("ours", "beside batch", "4/4"),
                ("other", "alone", "4/4"),
                ("other", "beside batch", "4/4"),
            ]
            assert (
                "other has no batch API: best effort was sent as plain requests, 64 at a time" in done.stdout
            )
            assert "ours has no batch API" not in done.stdout
            assert done.stdout.splitlines()[-1].startswith("Beside the batch job, chat is in time for ")
            # the job is stopped
            (batch,) = (await at.gateway.client.batches.list()).data
            assert batch.status in ("cancelling", "cancelled", "completed")

    play(scenario)
    assert Plain.num_plain > 0 and plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(output.read_text())
    assert [each["has_batch_api"] for each in found["servers"]] == [True, False]
    assert all(each["lines_per_s"] > 0 for each in found["servers"])
    assert "secret" not in output.read_text()


def run(*outcomes: Outcome) -> Any:
    return evaluate(outcomes, 10.0, {"ttft": 1000.0}, [50.0, 99.0])


def measured(label: str = "a") -> Measured:
    quick = Outcome("rt", 0.0, 0.0, [0.1, 0.2], "", 1, 2, None)
    late = Outcome("rt", 0.0, 0.0, [2.0, 2.5], "", 1, 2, None)
    lost = Outcome("rt", 0.0, error="HTTP 503")
    server = Server(label, f"http://{label}", None)
    return Measured(server, "m", run(quick, quick), run(quick, late, lost), 3.0, True, True, None)


def test_each_server_has_two_rows() -> None:
    head, _, alone, beside = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table([measured()])
    )
    assert head[-1] == "batch lines/s"
    assert alone == ["a", "alone", "2/2", "100.0 %", "100", "100", "100", "100", "-"]
    assert beside[:5] == ["a", "beside batch", "2/3", "33.3 %", "1050"] and beside[-1] == "3.00"


def test_what_was_not_as_it_should_be_is_said() -> None:
    config = CompareConfig()
    assert not [*remarks([measured()], config)]
    odd = replace(measured("b"), has_batch_api=False, has_job_lasted=False, error="HTTP 503")
    assert [line.partition(":")[0] for line in remarks([odd], config)] == ["b has no batch API", "b", "b"]
    assert verdict([measured(), odd]) == (
        "Beside the batch job, chat is in time for 33.3 % on a, 33.3 % on b; "
        "batch lines per second: 3.00 on a, 3.00 on b."
    )


def test_servers_have_their_labels_and_keys() -> None:
    urls = ["http://a:1/v1/", "https://b"]
    assert servers_of(CompareConfig(), urls, "k") == [
        Server("a:1", "http://a:1", "k"),
        Server("b", "https://b", "k"),
    ]
    config = CompareConfig(label=("x", "y"), api_key=("1", "2"))
    assert servers_of(config, urls, "k") == [Server("x", "http://a:1", "1"), Server("y", "https://b", "2")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://a"], "at least two servers"),
        (["http://a", "b"], "'b': must begin with http:// or https://"),
        (["http://a", "http://b", "--label", "x"], "--label: 1 given for 2 servers"),
        (["http://a", "http://b", "--job-lines", "0"], "--job-lines 0: must be above 0"),
        (["http://a", "http://b", "--goodput", "ttft=100"], "--goodput ttft=100: write ttft:100"),
        (["http://a", "http://b", "--dataset-name", "custom"], "--dataset-path: custom needs one"),
        (["http://127.0.0.1:9", "http://b"], "http://127.0.0.1:9: lists no models"),
        (
            ["http://a", "http://b", "--plot", "/nodir/x.png"],
            "'/nodir' is not a directory that can be written to",
        ),
    ],
)
def test_what_can_not_be_is_refused_by_name(words: list[str], message: str) -> None:
    done = CliRunner().invoke(command, ["compare", *words])
    assert done.exit_code in (1, 2) and message in done.stderr


class Refusing:
    """A server that answers the first line, and refuses the others."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path != ENDPOINT:
            return httpx2.Response(404)
        self.num += 1
        return httpx2.Response(200, json={}) if self.num == 1 else httpx2.Response(429, text="too many")


def test_lines_that_are_refused_are_used_up_as_well() -> None:
    async def scenario() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(Refusing())) as http:
            load, has_batch_api = await start_best_effort(http, "http://host", [{}] * 9, concurrency=2)
            assert not has_batch_api and await load.is_going_on()
            while await load.is_going_on():
                await asyncio.sleep(0)
            assert await load.num_done() == 1
            await load.stop()

    asyncio.run(scenario())


def test_without_an_objective_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="goodput: needs an objective"):
        CompareConfig(goodput=" ")
