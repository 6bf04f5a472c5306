"""Servers side by side: our gateway with its batch API, and a server without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from alignedserve.bench import best_effort
from alignedserve.bench.best_effort import ENDPOINT, first_line, start_best_effort
from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.compare import (
    ComparedServer,
    MeasuredServer,
    measure,
    remarks,
    servers_of,
    table,
    verdict,
)
from alignedserve.bench.compare_config import ALONE, BESIDE, JOB, WARM_UP, CompareConfig
from alignedserve.bench.results import evaluate
from alignedserve.bench.workload import make_workload
from alignedserve.cli.bench import command, with_one_goodput
from alignedserve.cli.progress import bar
from alignedserve.protocol.messages import Submit
from alignedserve.types import InstanceId
from tests.gateway.batching import System, play

NUM_LINES = 2000
QUICK = ("--num-prompts", "4", "--request-rate", "40", "--job-warmup-s", "0.3", "--job-lines", str(NUM_LINES))
SHORT = ("--input-len", "5", "--output-len", "3", "--job-input-len", "5", "--job-output-len", "3")


class Plain(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that has chat and nothing else. A stream permits a few plain answers, so that however
    slow or quick the machine is, some come beside chat and never all."""

    num_plain, num_streams = 0, 0
    permits = Semaphore(1)

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "plain"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            self.answer(404, b'{"detail": "Not Found"}')
        elif json.loads(body).get("stream"):
            type(self).num_streams += 1
            self.permits.release(5)
            chunk = {"choices": [{"delta": {"content": "yes"}}]}
            self.answer(200, f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        else:
            type(self).num_plain += 1
            self.permits.acquire(timeout=60)
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
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            Plain.permits.release(NUM_LINES)
            server.shutdown()
            thread.join()
            Plain.permits = Semaphore(1)


def answer_chat_among_lines(at: System) -> None:
    """Has the island answer chat beside a job only when it has got some more of the job's lines."""
    pass_on, num_lines = at.router._submit, 0

    async def later(gateway: InstanceId, submit: Submit) -> None:
        wanted = min(num_lines + 200, NUM_LINES)
        await at.router.until(lambda: num_lines >= wanted)
        pass_on(gateway, submit)

    def submitted(gateway: InstanceId, submit: Submit) -> None:
        nonlocal num_lines
        num_lines += submit.request.tier == "be"
        if submit.request.tier == "be" or not num_lines:
            pass_on(gateway, submit)
        else:
            waiting.append(asyncio.create_task(later(gateway, submit)))

    waiting: list[asyncio.Task[None]] = []
    at.router._submit = submitted  # type: ignore[method-assign]


def test_a_server_with_a_batch_api_beside_one_without(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "found.json", tmp_path / "plot.png"

    async def scenario(at: System) -> None:
        answer_chat_among_lines(at)
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
            await check_nothing_is_left(at)
            (job,) = [batch async for batch in at.gateway.client.batches.list()]
            assert job.request_counts and job.request_counts.completed > 0

    before = Plain.num_streams
    play(scenario)
    # Four to warm up, four alone, and four beside the job.
    assert Plain.num_plain > 0 and Plain.num_streams == before + 12
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(output.read_text())
    assert [each["has_batch_api"] for each in found["servers"]] == [True, False]
    assert all(each["lines_per_s"] > 0 for each in found["servers"])
    assert "secret" not in output.read_text()


async def check_nothing_is_left(at: System) -> None:
    """The job has ended, and its files are gone."""
    assert {batch.status async for batch in at.gateway.client.batches.list()} <= {"cancelled", "completed"}
    assert not [file async for file in at.gateway.client.files.list()]


def test_a_job_ends_with_a_measurement_that_is_interrupted() -> None:
    async def scenario(at: System) -> None:
        # One chat request alone, then a job that runs alone for an hour.
        config = CompareConfig(num_prompts=1, job_lines=300, job_warmup_s=3600, input_len=5, job_input_len=5)
        server = ComparedServer("ours", str(at.gateway.http.base_url), None)
        measuring = asyncio.create_task(
            measure(config, server, "demo", lambda total, title: bar(total, title, "req"))
        )
        while not (batches := (await at.gateway.client.batches.list()).data):
            await asyncio.sleep(0.02)
        await at.gateway.until(batches[0], "in_progress")
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        await check_nothing_is_left(at)

    play(scenario)


def test_nothing_is_measured_unless_all_servers_answer() -> None:
    before = Plain.num_streams
    with plain_server() as url:
        done = CliRunner().invoke(
            command, ["compare", url, "http://127.0.0.1:9", *QUICK, "--num-warmups", "2"]
        )
        assert done.exit_code == 1 and "http://127.0.0.1:9: lists no models" in done.stderr
        assert Plain.num_streams == before + 2
        # Also where no server is asked for its models.
        done = CliRunner().invoke(command, ["compare", url, "http://127.0.0.1:9", "--model", "m", *QUICK])
        assert (
            done.exit_code == 1 and "http://127.0.0.1:9: answers no chat request: ConnectError" in done.stderr
        )
        assert Plain.num_streams == before + 2 + 4


def run(*outcomes: RequestOutcome) -> Any:
    return evaluate(outcomes, 10.0, {"ttft": 1000.0}, [50.0, 99.0])


def measured(label: str = "a", num_alone: int = 2) -> MeasuredServer:
    quick = RequestOutcome("rt", 0.0, 0.0, [0.1, 0.2], "", 1, 2, None)
    late = RequestOutcome("rt", 0.0, 0.0, [2.0, 2.5], "", 1, 2, None)
    lost = RequestOutcome("rt", 0.0, error="HTTP 503")
    server = ComparedServer(label, f"http://{label}", None)
    return MeasuredServer(server, "m", run(*num_alone * [quick]), run(quick, late, lost), 3.0, True, None)


def test_each_server_has_two_rows() -> None:
    head, _, alone, beside = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table([measured()])
    )
    assert head[-1] == "batch lines/s"
    assert alone == ["a", "alone", "2/2", "100.0 %", "100", "100", "100", "100", "-"]
    assert beside[:5] == ["a", "beside batch", "2/3", "33.3 %", "1050"] and beside[-1] == "3.00"


def test_what_was_not_as_it_should_be_is_said() -> None:
    config, many = CompareConfig(), measured(num_alone=101)
    assert not [*remarks([replace(many, beside=many.alone)], config)]
    odd = replace(many, has_batch_api=False, lines_per_s=None, error="HTTP 503", left_behind="HTTP 500")
    assert [*remarks([odd], config)] == [
        "a has no batch API: best effort was sent as plain requests, 64 at a time",
        "a: all 2000 lines were answered or refused before chat ended; raise --job-lines",
        "a: chat requests failed, the first with: HTTP 503",
        "a: the batch job or its files may still be there: HTTP 500",
        "p99 of 2 requests is nearly their maximum; raise --num-prompts to measure the tail",
    ]
    odd = measured("b")
    assert verdict([measured(), odd]) == (
        "Beside the batch job, chat is in time for 33.3 % on a, 33.3 % on b; "
        "batch lines per second: 3.00 on a, 3.00 on b."
    )


def test_a_job_that_ended_before_chat_gives_neither_a_figure_nor_a_verdict() -> None:
    ended = replace(measured("b"), lines_per_s=None)
    assert [line.split("|")[-2].strip() for line in table([ended])][-1] == "-"
    assert verdict([measured(), ended]) == "No verdict: chat ran beside no job for some of the time on b."
    assert (ended.as_dict()["lines_per_s"], ended.as_dict()["has_job_lasted"]) == (None, False)
    assert measured().as_dict()["has_job_lasted"] is True


def test_servers_have_their_labels_and_keys() -> None:
    urls = ["http://a:1/v1/", "https://b"]
    assert servers_of(CompareConfig(), urls, "k") == [
        ComparedServer("a:1", "http://a:1", "k"),
        ComparedServer("b", "https://b", "k"),
    ]
    config = CompareConfig(label=("x", "y"), api_key=("1", "2"))
    assert servers_of(config, urls, "k") == [
        ComparedServer("x", "http://a:1", "1"),
        ComparedServer("y", "https://b", "2"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://a"], "at least two servers"),
        (["http://a", "b"], "Invalid value for 'URL URL': 'b' must begin with http:// or https://"),
        (["http://a", "http://b", "--label", "x"], "--label: 1 given for 2 servers"),
        (["http://a", "http://b", "--job-lines", "0"], "--job-lines 0: must be above 0"),
        (["http://a", "http://b", "--goodput", "ttft=100"], "--goodput ttft=100: write ttft:100"),
        (["--goodput", "ttft:100", "tpot=5", "http://a", "http://b"], "--goodput tpot=5: write tpot:5"),
        (["http://a", "http://b", "--num-warmups", "0"], "--num-warmups 0: must be above 0"),
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


class Scripted:
    """A batch API, which validates a job for its first looks, and refuses it if told to."""

    def __init__(self, is_refused: bool = False) -> None:
        self.is_refused, self.looks, self.deleted, self.status = is_refused, 0, list[str](), "validating"

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if request.method == "DELETE":
            self.deleted.append(path)
        elif path.endswith("/cancel"):
            self.status = "cancelling"
        elif path == "/v1/batches" and self.is_refused:
            return httpx2.Response(429, text="too many")
        elif request.method == "GET":
            self.looks += 1
            if self.looks == 6:
                self.status = "in_progress"
            elif self.status == "cancelling" and self.looks % 2:
                self.status = "cancelled"
        counts = {"completed": int(self.looks >= 9)}
        files = {"input_file_id": "in", "output_file_id": "out", "error_file_id": None}
        found = {"id": "it", "status": self.status, "request_counts": counts, **files}
        return httpx2.Response(200, json=found)


def test_a_job_runs_before_chat_begins_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_effort, "_POLL_S", 0.0)
    server = Scripted()

    async def scenario() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(server)) as http:
            load, has_batch_api = await start_best_effort(http, "http://host", [{}], concurrency=2)
            await first_line(load, "http://host", timeout_s=60)
            assert has_batch_api and server.looks >= 9 and not server.deleted
            await load.stop()

    asyncio.run(scenario())
    assert server.status == "cancelled" and server.deleted == ["/v1/files/in", "/v1/files/out"]


def test_a_job_that_does_not_begin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(Scripted())) as http:
            load, _ = await start_best_effort(http, "http://host", [{}], concurrency=2)
            with pytest.raises(ValueError, match="http://host: best effort got no answer within 0.05 s"):
                await first_line(load, "http://host", timeout_s=0.05)

    asyncio.run(scenario())


def test_the_file_of_a_job_that_is_refused_is_deleted() -> None:
    server = Scripted(is_refused=True)

    async def scenario() -> None:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(server)) as http:
            with pytest.raises(ValueError, match="HTTP 429: too many"):
                await start_best_effort(http, "http://host", [{}], concurrency=2)

    asyncio.run(scenario())
    assert server.deleted == ["/v1/files/it"]


def test_no_two_sets_of_requests_have_the_same_prompts(tmp_path: Path) -> None:
    seeds = [
        [
            *(config.chat("http://a", each).seed for each in (WARM_UP, ALONE, BESIDE)),
            config.job("http://a").seed,
        ]
        for config in (CompareConfig(seed=0), CompareConfig(seed=1))
    ]
    assert len({seed for each in seeds for seed in each}) == 8 and seeds[0][JOB] == 3
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(12)))
    config = CompareConfig(dataset_name="custom", dataset_path=str(path), num_prompts=4, num_warmups=2)
    sets = [
        [item.prompt[0]["content"] for item in make_workload(config.chat("http://a", each))]  # type: ignore[index]
        for each in (WARM_UP, ALONE, BESIDE)
    ]
    assert sets == [["0", "1"], ["2", "3", "4", "5"], ["6", "7", "8", "9"]]
    assert not [line for line in remarks([measured()], config) if "prefix cache" in line]
    said = [*remarks([measured()], replace(config, num_prompts=6))][-1]
    assert said.startswith(f"{path} holds 12 prompts for 14 requests") and "prefix cache" in said


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("--goodput ttft:1 tpot:2 --seed 1", ["--goodput", "ttft:1 tpot:2", "--seed", "1"]),
        ("--goodput=ttft:1 tpot:2 http://a", ["--goodput=ttft:1 tpot:2", "http://a"]),
        ("http://a --goodput ttft:1 http://b c", ["http://a", "--goodput", "ttft:1", "http://b", "c"]),
        ("--goodput --seed 1", ["--goodput", "--seed", "1"]),
    ],
)
def test_goodput_may_have_several_values(typed: str, taken: list[str]) -> None:
    assert with_one_goodput(typed.split()) == taken


def test_without_an_objective_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="goodput: needs an objective"):
        CompareConfig(goodput=" ")
