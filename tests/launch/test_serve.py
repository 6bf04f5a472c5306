"""The whole system, real: Ray, all processes, the demo model. It answers exactly, survives kills, leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from alignedserve import LLM, SamplingParams, demo
from alignedserve.launch.leftovers import descendants
from benchmarks.attack.nobody import IS_POSSIBLE, as_nobody
from benchmarks.attack.surface import reached, surface_of
from benchmarks.footprint import Footprint
from tests.launch.server import START_S, Server, serving
from tests.launch.storm import storm
from tests.launch.streams import ask_all, engine_alone


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "new"


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    with serving("--dtype", "float32", "--log-format", "json", "--log-dir", str(logs)) as found:
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
    assert httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "mine"}).status_code == 200
    found = {path.stem: path for path in logs.iterdir()}
    assert found.keys() == {"launcher", *(each["instance_id"] for each in server.processes())}
    assert lines_of(found["launcher"])[-1]["message"].startswith("ready after")
    # it is written once the answer is out
    deadline = time.monotonic() + 30
    while "mine" not in [line["request_id"] for line in lines_of(found["gateway-0"])]:
        assert time.monotonic() < deadline, found["gateway-0"].read_text()
        time.sleep(0.01)


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


def kill(server: Server, kills: Sequence[Sequence[str]]) -> None:
    """One group together, the next while the system recovers from that."""
    killed: set[int] = set()
    for names in kills:
        pids = [server.until_up(name, killed) for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed.update(pids)


def test_streams_say_what_the_engine_alone_says(server: Server) -> None:
    texts, _ = ask_all(server.url)
    assert texts == engine_alone()
    server.until_whole()


KILLS = {
    "decode": [["decode-0"]],
    "prefill": [["prefill-0"]],
    "pool": [["kvpool-0"]],
    "router": [["router"]],
    "decode and pool": [["decode-0", "kvpool-0"]],
    "router, and prefill while it is away": [["router", "prefill-0"]],
    "decode, then pool": [["decode-0"], ["kvpool-0"]],
    "pool, then router": [["kvpool-0"], ["router"]],
    "decode as soon as it is back": [["decode-0"], ["decode-0"]],
}
# those of `make test`, with every kind of process
QUICK = ("decode and pool", "router, and prefill while it is away")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(kills, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, kills in KILLS.items()
    ],
)
def test_no_stream_notices_that_a_process_is_killed(server: Server, kills: list[list[str]]) -> None:
    epochs = {each["instance_id"]: each["epoch"] for each in server.processes()}
    texts, silence = ask_all(server.url, lambda: kill(server, kills))
    assert texts == engine_alone()
    server.until_whole()
    victims = {name for names in kills for name in names}
    for each in server.processes():
        assert (each["epoch"] > epochs[each["instance_id"]]) == (each["instance_id"] in victims)
    print(f"longest silence {silence:.2f} s")


def test_a_death_is_noticed_within_a_second_and_told(server: Server) -> None:
    pid = server.pid_of("decode-0")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    while server.get("/health").status_code != 503:
        assert time.monotonic() - killed < 1.0
        time.sleep(0.01)
    assert server.get("/health").json()["reason"] == "no decode process is up"
    states = {each["instance_id"]: each["state"] for each in server.processes()}
    assert states["decode-0"] == "down"
    server.until_whole()
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_another_server_beside_it_and_nothing_is_left_of_that_when_it_is_killed(server: Server) -> None:
    other = Server("--pool-memory-bytes", str(64 << 20), "--prefill-instances", "2")
    try:
        other.until_ready()
        assert {each["instance_id"] for each in other.processes()} >= {"prefill-0", "prefill-1"}
        footprint = Footprint(other.pid)
        assert footprint.paths and len(footprint.processes) > 8
        other.signal(signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL
        footprint.check_gone()
    finally:
        if other._process.poll() is None:
            other.signal(signal.SIGKILL)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=30)
    assert answer.status_code == 200


class Plan(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    day: Literal["Monday", "Friday"]
    hours: list[bool] = pydantic.Field(max_length=4)
    is_long: bool


def test_structured_outputs_are_what_they_should_be_also_when_an_instance_dies(server: Server) -> None:
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
        kill(server, [["decode-0"]])
        assert list(asking) == plain
    assert all(isinstance(each, Plan) for each in plain)
    server.until_whole()


@pytest.mark.slow
def test_prompt_logprobs_are_the_engines(server: Server) -> None:
    """Of a long prompt too, which is computed in chunks; also in an echo, where nothing else is asked for."""
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(text) for text in ("Count from 3 to 9.", "Count from 3 to 90, please. " * 60)]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
    alone = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    expected = [
        [
            each and {str(token): found.logprob for token, found in each.items()}
            for each in result.prompt_logprobs
        ]
        for result in alone
        if result.prompt_logprobs
    ]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 4, "prompt_logprobs": 2}
    choices = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert [
        [
            each and {token: found["logprob"] for token, found in each.items()}
            for each in choice["prompt_logprobs"]
        ]
        for choice in choices
    ] == expected
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 0, "logprobs": 0, "echo": True}
    echoed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in echoed] == [
        [None, *(each[str(token)] for token, each in zip(prompt[1:], found[1:], strict=True) if each)]
        for prompt, found in zip(prompts, expected, strict=True)
    ]


@pytest.mark.slow
def test_clients_that_leave_at_any_point_leave_nothing_behind(server: Server) -> None:
    early, in_the_middle = storm(server.url)
    left = time.monotonic()
    server.until_whole()
    print(f"empty {time.monotonic() - left:.2f} s after the last one left")
    assert early > 50 and in_the_middle > 50
    texts, _ = ask_all(server.url)
    assert texts == engine_alone()
    server.until_whole()


def test_at_the_end_what_runs_finishes_and_what_comes_is_refused(server: Server) -> None:
    """The last one that the server is there for."""

    def stop() -> None:
        # however slow this test is, the server does not end before it has looked
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 8}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            # it ends when nobody has these any more
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            server.until_said("stopping when all requests have ended, in 30 s at the latest")
            while server.get("/health").json().get("reason") != "this server is stopping":
                time.sleep(0.01)
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")

    texts, _ = ask_all(server.url, stop)
    assert texts == engine_alone()
    assert server.wait() == 0, server.output
    assert server.lines[-1] == "stopping"


@pytest.mark.slow
def test_a_terminal_that_closes_lets_it_finish_and_a_second_signal_ends_it_at_once() -> None:
    with serving("--pool-memory-bytes", str(64 << 20), "--shutdown-timeout", "600") as server:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            # to all of the group, and once more by way of its shell
            server.signal(signal.SIGHUP, whole_group=True)
            server.until_said("stopping when all requests have ended")
            server.signal(signal.SIGHUP, whole_group=True)
            assert all("error" not in next(lines) for _ in range(10))
            server.signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and "this server is stopping" in rest[-4], rest[-6:]
        # while everything is put away, to the very end
        server.signal(signal.SIGTERM)
        while server._process.poll() is None:
            server.signal(signal.SIGINT)
            time.sleep(0.02)
        assert server.wait() == 0, server.output


@pytest.mark.slow
def test_a_part_that_cannot_come_back_ends_it_with_an_error(tmp_path: Path) -> None:
    model = shutil.copytree(demo.MODEL_DIR, tmp_path / "model")
    server = Server(str(model), "--pool-memory-bytes", str(64 << 20))
    try:
        server.until_ready()
        footprint = Footprint(server.pid)
        pid = server.pid_of("decode-0")
        shutil.rmtree(model)
        os.kill(pid, signal.SIGKILL)
        server.until_said("decode-0 is down")
        assert server.get("/health").status_code == 503
        assert server.wait(120) == 1
        assert re.search(f"Error: decode-0 died .* times in a row: model is '{model}'", server.output)
        footprint.check_gone()
    finally:
        if server._process.poll() is None:
            server.signal(signal.SIGKILL)
            server.wait()


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("^Ray is up", signal.SIGINT),
        pytest.param("^Ray is up", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("^router is up", signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_in_the_middle_of_the_start_leaves_nothing(said: str, number: signal.Signals) -> None:
    server = Server("--pool-memory-bytes", str(64 << 20))
    try:
        server.until_said(said)
        footprint = Footprint(server.pid)
        # ctrl-C in a terminal goes to all of the group
        server.signal(number, whole_group=number == signal.SIGINT)
        assert server.wait() == 0, server.output
        assert "Traceback" not in server.output
        # what had been begun may still be said behind it
        assert not {"stopped", "stopping"}.isdisjoint(server.lines)
        footprint.check_gone()
    finally:
        if server._process.poll() is None:
            server.signal(signal.SIGKILL)
            server.wait()


@pytest.mark.slow
def test_a_signal_while_ray_starts_leaves_nothing() -> None:
    server = Server("--pool-memory-bytes", str(64 << 20))
    try:
        until_one_of_its_processes_is("gcs_server", server)
        footprint = Footprint(server.pid)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.output
        assert server.lines == ["stopped"]
        footprint.check_gone()
    finally:
        if server._process.poll() is None:
            server.signal(signal.SIGKILL)
            server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["deaf_serve", "interrupted_serve"])
def test_a_signal_at_an_unlucky_moment_is_not_lost(program: str) -> None:
    """One that raises in code that swallows it, and one in the middle of making the event loop."""
    server = Server("--pool-memory-bytes", str(64 << 20), program=f"tests.launch.{program}")
    try:
        assert server.wait() == 0, server.output
        assert "stopping" in server.lines and "Traceback" not in server.output
    finally:
        if server._process.poll() is None:
            server.signal(signal.SIGKILL)
            server.wait()


def until_one_of_its_processes_is(program: str, server: Server) -> None:
    deadline = time.monotonic() + START_S
    while not any(program_of(pid) == program for pid, _ in descendants(server.pid)):
        assert time.monotonic() < deadline, server.output
        time.sleep(0.01)


def program_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# ---- what can't work ----


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alignedserve", "serve", *options]
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp") as state:
        environment = os.environ | {"XDG_STATE_HOME": state}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--port", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: port={port}: another program listens on it at 127.0.0.1\n"


WRONG = [
    (["/no/such/model"], "Error: model is '/no/such/model'; must be"),
    (["--pool-memory-bytes", str(1 << 60)], "Error: pool_memory_bytes=1152921504606846976: "),
]
# each takes an interpreter that imports everything
MORE_THAT_IS_WRONG = [
    (["--log-level", "loud"], "Error: log_level='loud': must be one of debug, info, warning, error"),
    (["--log-dir", "/proc/none"], "Error: log_dir='/proc/none': No such file or directory"),
    (["--dtype", "int3"], "Error: dtype='int3': must be one of"),
    (["--policy", "best"], "Error: policy='best': must be one of aligned, priority, fcfs"),
    (["--max-model-len", "100000"], "Error: max_model_len=100000: the model was made for at most 2048"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [*WRONG, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_THAT_IS_WRONG)],
)
def test_what_is_wrong_is_one_line(options: list[str], message: str) -> None:
    done = run(*options)
    assert done.returncode == 1
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_a_cluster_that_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    done = run("--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: address='127.0.0.1:1': ") and done.stderr.count("\n") == 1
