"""The whole system, real: Ray, all processes, the demo model. It answers exactly, survives kills, leaves nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest

from alignedserve import LLM, SamplingParams, demo
from alignedserve.launch.leftovers import descendants
from alignedserve.offline.outputs import PositionLogprobs
from benchmarks.attack.nobody import IS_POSSIBLE, as_nobody
from benchmarks.attack.surface import reached, surface_of
from benchmarks.footprint import Footprint
from tests.launch.batch_job import check_answers, client_of, num_completed, submit
from tests.launch.batch_job import until as until_batch
from tests.launch.restarting import check_restart, restart
from tests.launch.server import EXACT, POOL, START_S, Server, is_gone, serving, starting, until
from tests.launch.storm import storm
from tests.launch.streams import ask_all, engine_alone


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "new"


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    # Nothing hangs here. A death that is noticed only by a process's silence takes longer than any test waits for it.
    silence = ("--silence-s", str(10 * START_S))
    log = ("--log-format", "json", "--log-dir", str(logs))
    with serving(*EXACT, *log, *silence, "--batch-max-num-lines", "32", "--shutdown-timeout", "600") as found:
        yield found


def test_what_comes_up_is_said_line_by_line(server: Server) -> None:
    for name in ("Ray", "redis", "router", "kvpool-0", "prefill-0", "decode-0", "gateway"):
        server.until_said(f"^{name} is up after [0-9.]+ s", 1)
    assert server.lines[-1] == server.until_said("^ready after .* s: http://127.0.0.1", 1)


def test_every_process_is_described(server: Server) -> None:
    found = {each["instance_id"]: each for each in server.processes()}
    assert list(found) == ["router", "kvpool-0", "prefill-0", "decode-0", "gateway-0"]
    pids = {pid for pid, _ in descendants(server.pid)}
    for each in found.values():
        assert each["state"] == "up" and each["pid"] in pids and each["epoch"] > 0
        assert each["blocks"]["used"] == 0 and each["requests"] == {}
    assert server.get("/health").json() == {"status": "ok"}


def test_computing_gives_way_to_passing_messages_on(server: Server) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for each in server.processes():
        # Ray's own would be 15
        assert os.getpriority(os.PRIO_PROCESS, each["pid"]) == own, each["instance_id"]
        threads = [int(path.name) for path in Path(f"/proc/{each['pid']}/task").iterdir()]
        is_nice = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} > {own}
        assert is_nice == (each["role"] in ("prefill", "decode")), each["instance_id"]


def test_every_process_has_a_log_file(server: Server, logs: Path) -> None:
    assert httpx2.get(f"{server.url}/v1/models", headers={"X-Request-Id": "mine"}).status_code == 200
    found = {path.stem: path for path in logs.iterdir()}
    assert found.keys() == {"launcher", *(each["instance_id"] for each in server.processes())}
    assert lines_of(found["launcher"])[-1]["message"].startswith("ready after")
    # it is written once the answer is out
    gateway = found["gateway-0"]
    until(lambda: "mine" in [line["request_id"] for line in lines_of(gateway)], gateway.read_text)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Those that are complete."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_nothing_listens_beyond_this_machine(server: Server) -> None:
    inodes = {inode for pid, _ in descendants(server.pid) for inode in socket_inodes(pid)}
    listening = [each for each in listening_sockets() if each[1] in inodes]
    # HTTP, and Ray's own
    assert len(listening) >= 5
    assert {address for address, _ in listening} <= {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.skipif(not IS_POSSIBLE, reason="it takes root to be another user")
def test_another_user_can_open_nothing_of_it(server: Server) -> None:
    surface = surface_of(server.pid)
    (router,) = (path for path in surface.paths if path.name == "router.sock")
    # what is looked at is there
    assert reached(surface) and str(router.parent) in {str(path) for path in surface.private}
    assert as_nobody(lambda: reached(surface)) == []


def test_no_port_but_http_s_answers_who_has_no_key(server: Server) -> None:
    for port in surface_of(server.pid).ports - {server.port}:
        for said in (
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
                answer = b""
                with suppress(ConnectionResetError):
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                    while piece := sock.recv(1 << 16):
                        answer += piece
            # it is turned away, if it hears anything: by TLS, or for the lack of a token
            assert not answer or answer.startswith((b"\x15\x03", b"HTTP/1.1 4", b"HTTP/1.0 4")), (
                port,
                answer,
            )


def socket_inodes(pid: int) -> set[str]:
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening_sockets() -> list[tuple[str, str]]:
    """(address in hex, inode)"""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [(row[1].split(":")[0], row[9]) for row in rows if row[3] == "0A"]


@pytest.mark.slow
def test_streams_say_what_the_engine_alone_says(server: Server) -> None:
    texts, _ = ask_all(server.url)
    assert texts == engine_alone()
    server.until_whole()


KILLS = {
    "decode": [["decode-0"]],
    "prefill": [["prefill-0"]],
    "pool": [["kvpool-0"]],
    "router": [["router"]],
    "decode, then pool": [["decode-0"], ["kvpool-0"]],
    "pool, then router": [["kvpool-0"], ["router"]],
    "decode as soon as it is back": [["decode-0"], ["decode-0"]],
}
# Those of every run, with every kind of process. `make test` has the first one.
ALWAYS = {"decode and pool": [["decode-0", "kvpool-0"]]}
ALWAYS_SLOW = {"router, and prefill while it is away": [["router", "prefill-0"]]}


@pytest.mark.parametrize(
    "kills",
    [
        *(pytest.param(kills, id=name) for name, kills in ALWAYS.items()),
        *(pytest.param(kills, id=name, marks=pytest.mark.slow) for name, kills in ALWAYS_SLOW.items()),
        *(
            pytest.param(kills, id=name, marks=[pytest.mark.slow, pytest.mark.drawn(one_in=14)])
            for name, kills in KILLS.items()
        ),
    ],
)
def test_no_stream_notices_that_a_process_is_killed(server: Server, kills: list[list[str]]) -> None:
    epochs = {each["instance_id"]: each["epoch"] for each in server.processes()}
    killed: set[int] = set()
    texts, silence = ask_all(server.url, lambda: killed.update(server.kill(*kills)))
    assert texts == engine_alone()
    victims = {name for names in kills for name in names}

    def newer() -> set[str]:
        now = {each["instance_id"]: each["epoch"] for each in server.processes()}
        return {name for name, epoch in now.items() if epoch > epochs[name]}

    def have_successors() -> bool:
        return newer() >= victims and killed.isdisjoint(int(each["pid"]) for each in server.processes())

    # One that was killed, even twice, may still stand as up.
    until(have_successors, lambda: server.output)
    server.until_whole()
    assert newer() == victims
    print(f"longest silence {silence:.2f} s")


@pytest.mark.slow
def test_a_death_is_told_before_there_is_a_successor_and_costs_no_structured_output(server: Server) -> None:
    def ask(number: int) -> Plan | None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            done = client.chat.completions.parse(
                model="demo",
                messages=[{"role": "user", "content": f"Count from {number} to 9."}],
                response_format=Plan,
                temperature=1.5,
                seed=number,
            )
        return done.choices[0].message.parsed

    with ThreadPoolExecutor(8) as threads:
        plain = list(threads.map(ask, range(16)))
        asking = threads.map(ask, range(16))
        server.kill(["decode-0"])
        until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["reason"] == "no decode process is up"
        states = {each["instance_id"]: each["state"] for each in server.processes()}
        assert states["decode-0"] == "down"
        assert list(asking) == plain
    assert all(isinstance(each, Plan) for each in plain)
    server.until_whole()
    assert server.get("/health").status_code == 200


class Plan(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    day: Literal["Monday", "Friday"]
    hours: list[bool] = pydantic.Field(max_length=4)
    is_long: bool


@pytest.mark.slow
def test_prompt_logprobs_are_the_engines(server: Server) -> None:
    """Of a long prompt too, which is computed in chunks; also in an echo, where nothing else is asked for."""
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in ("Count from 3 to 9.", "Count from 3 to 90, please. " * 60)]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
    alone = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    expected = [
        [by_name_of_token(each) for each in result.prompt_logprobs]
        for result in alone
        if result.prompt_logprobs
    ]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 4, "prompt_logprobs": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [
        [
            each and {token: found["logprob"] for token, found in each.items()}
            for each in choice["prompt_logprobs"]
        ]
        for choice in choices
    ] == expected
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 0, "logprobs": 0, "echo": True}
    echoed = server.post("/v1/completions", body).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in echoed] == [
        [None, *(each[str(token)] for token, each in zip(prompt[1:], found[1:], strict=True) if each)]
        for prompt, found in zip(prompts, expected, strict=True)
    ]


def by_name_of_token(found: PositionLogprobs | None) -> dict[str, float] | None:
    return None if found is None else {str(token): each.logprob for token, each in found.items()}


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_clients_that_leave_at_any_point_leave_nothing_behind(server: Server) -> None:
    early, in_the_middle = storm(server.url)
    left = time.monotonic()
    server.until_whole()
    print(f"empty {time.monotonic() - left:.2f} s after the last one left")
    assert early > 50 and in_the_middle > 50
    texts, _ = ask_all(server.url)
    assert texts == engine_alone()
    server.until_whole()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_lines", "num_kills"),
    [(200, 3), pytest.param(500, 10, marks=pytest.mark.drawn(one_in=8))],
)
def test_a_batch_survives_kills_with_every_answer_once(
    server: Server, num_lines: int, num_kills: int
) -> None:
    random_ = random.Random(7)
    victims = ("redis", "gateway", "router")
    client = client_of(server)
    job = submit(client, num_lines)
    for number in range(num_kills):
        # at any moment of a line's way: before it is taken, while it runs, while its answer is stored
        time.sleep(random_.uniform(0, 1.0))
        os.kill(until_there_is(victims[number % 3], server), signal.SIGKILL)
    check_answers(client, job, num_lines)
    server.until_whole()


def until_there_is(victim: str, server: Server) -> int:
    """The process id of the one that runs now: not of one that was killed."""
    found: list[int] = []

    def is_there() -> bool:
        # The gateway may be about to start again.
        with suppress(httpx2.HTTPError):
            pids = [server.redis_pid()] if victim == "redis" else up(victim)
            found.extend(pid for pid in pids if not is_gone(pid))
        return bool(found)

    def up(role: str) -> list[int]:
        return [each["pid"] for each in server.processes() if (each["role"], each["state"]) == (role, "up")]

    until(is_there, lambda: server.output)
    return found[0]


@pytest.mark.slow
def test_who_connects_while_the_gateway_is_dead_waits_for_the_next_one(server: Server) -> None:
    (gateway,) = server.pids("gateway")
    os.kill(gateway, signal.SIGKILL)
    until(lambda: is_gone(gateway))
    assert httpx2.get(f"{server.url}/v1/models", timeout=START_S).status_code == 200
    server.until_whole()


@pytest.mark.slow
@pytest.mark.drawn(one_in=2, turn=1, alone=True)
def test_every_process_can_be_replaced_under_load(server: Server) -> None:
    """Runs in which it is not this one's turn have the restart of test_gateways.py."""
    check_restart(server, ["gateway"])
    # And once more: those that came are no others than the first were.
    restart(server)
    assert ask_all(server.url)[0] == engine_alone()
    server.until_whole()


# ---- another system beside it, whose batch goes on in the next one ----

NUM_LINES = 100
# Few lines at a time: the job must not be over before it is looked at.
OTHER = (*EXACT, *POOL, "--prefill-instances", "2", "--batch-max-num-lines", "2", "--shutdown-timeout", "600")


def end_in_good_order(other: Server) -> None:
    other.signal(signal.SIGTERM)
    assert other.wait() == 0, other.output


def kill_the_launcher(other: Server) -> None:
    other.signal(signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL


def kill_all(other: Server) -> None:
    """Launcher, store, gateway, router, pool, instances, at one moment."""
    pids = [other.pid, other.redis_pid(), *(each["pid"] for each in other.processes())]
    assert len(pids) == 8
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(each, marks=pytest.mark.drawn(one_in=3))
        for each in (kill_the_launcher, kill_all, end_in_good_order)
    ],
)
def test_nothing_is_left_of_another_system_but_its_batch_which_the_next_one_goes_on_with(
    server: Server, end: Callable[[Server], None]
) -> None:
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as state:
        with starting(*OTHER, state=Path(state)) as other:
            other.until_ready()
            assert {each["instance_id"] for each in other.processes()} >= {"prefill-0", "prefill-1"}
            footprint = Footprint(other.pid)
            assert footprint.paths and len(footprint.processes) > 8
            client = client_of(other)
            job = submit(client, NUM_LINES)
            batch = until_batch(client, job, lambda each: num_completed(each) >= NUM_LINES // 10)
            assert batch.status == "in_progress" and num_completed(batch) < NUM_LINES
            end(other)
            footprint.check_gone()
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
        with serving(*OTHER, state=Path(state)) as other:
            client = client_of(other)
            # What was answered stays answered.
            assert num_completed(client.batches.retrieve(job)) >= num_completed(batch)
            check_answers(client, job, NUM_LINES)
            other.until_whole()
            end_as_a_terminal_does(other)


def end_as_a_terminal_does(other: Server) -> None:
    """One that closes lets it finish, and a signal of another kind ends it at once."""
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{other.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        # to all of the group, and once more by way of its shell
        other.signal(signal.SIGHUP, whole_group=True)
        other.until_said("draining: up to")
        other.signal(signal.SIGHUP, whole_group=True)
        assert all("error" not in next(lines) for _ in range(10))
        other.signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]" and "this server is stopping" in rest[-4], rest[-6:]
    # while everything is put away, to the very end
    other.signal(signal.SIGTERM)
    while other.is_running:
        other.signal(signal.SIGINT)
        time.sleep(0.02)
    assert other.wait() == 0, other.output


def test_at_the_end_what_runs_finishes_and_what_comes_is_refused(server: Server) -> None:
    """The last one that the server is there for."""

    def stop() -> None:
        # however slow this test is, the server does not end before it has looked
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 8}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            # it ends when nobody has these any more
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            server.until_said("draining: up to 600 s")
            until(lambda: server.get("/health").json().get("reason") == "this server is stopping")
            refused = server.post("/v1/completions", {"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

    texts, _ = ask_all(server.url, stop)
    assert texts == engine_alone()
    assert server.wait() == 0, server.output
    assert server.lines[-1] == "stopping"
