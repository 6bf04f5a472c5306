"""Measures the gateway's own cost: a stub engine produces tokens at a steady rate, and clients read the streams.

There are three processes: the router's hub with the stub, a gateway as in `alignedserve serve` on its own core, and
this client. The gateway's CPU time per token shows what a core can carry, whatever else the machine does. The wall time
shows whether the streams kept up. At low load (one request at a time, answered immediately), the time to first token
consists of the gateway, the sockets and the client.

    python -m benchmarks.gateway [--streams 64] [--rate 8000] [--tokens 1000] [--api chat] [--gateways 1] [--out FILE]

The time to first token is measured for every API, in turn. The load uses one API. With several gateways at one port,
the first has its own core, the second shares the other core with the rest, and so on. The estimate for one core each is
what one gateway carries with its CPU time, times their number.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.gateway.process import GatewayProcess
from alignedserve.launch.ports import free_port
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.hub import Hub
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    AskCluster,
    Cluster,
    Echo,
    Hello,
    NewTokens,
    ProcessStatus,
    Submit,
    Tokens,
    Welcome,
)
from alignedserve.types import Epoch, InstanceId, RequestKey, island_gateway
from benchmarks.harness import append_json, parser_of

HOST, TOKEN = "127.0.0.1", "secret"
QUESTION = "How much is 12 plus 30? " * 4
# The end of a chunked body. It is no longer than the beginning of an event.
END = b"0\r\n\r\n"
# Tokens that are words in the demo model.
FIRST_WORD, LAST_WORD = 264, 340
START_S = 60.0
# Requests per API and turn.
TURN = 20


@dataclass(frozen=True)
class Api:
    path: str
    body: dict[str, Any]
    # The field that limits the tokens.
    limit: str
    # Occurs in each event with text, and `num_before` times before the first of them.
    event: bytes
    num_before: int = 0


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": QUESTION}]},
        "max_tokens",
        b"data: {",
        num_before=1,
    ),
    "responses": Api(
        "/v1/responses", {"input": QUESTION}, "max_output_tokens", b'{"type":"response.output_text.delta"'
    ),
    "messages": Api(
        "/v1/messages", {"messages": [{"role": "user", "content": QUESTION}]}, "max_tokens", b'"text_delta"'
    ),
}


@dataclass
class _Stream:
    gateway: InstanceId
    num_tokens: int
    num_said: int = 0


class StubRouter:
    """Produces one token per open request and iteration, in one message, like a decode instance's report."""

    def __init__(self, tokens_per_s: float) -> None:
        self.hub = Hub(TOKEN, self)
        self._tokens_per_s = tokens_per_s
        self._streams: dict[RequestKey, _Stream] = {}

    def connected(self, hello: Hello) -> None:
        self.hub.send(hello.instance_id, Welcome(Epoch(1)))

    def closed(self, instance_id: InstanceId, epoch: Epoch) -> None:
        self._streams.clear()

    def received(self, hello: Hello, message: AnyMessage) -> None:
        match message:
            case Submit(request=request):
                self._streams[request.key] = _Stream(hello.instance_id, request.params.max_tokens or 1)
                self._say([request.key])
            case Abort(keys=keys):
                for key in keys:
                    self._streams.pop(key, None)
            case Echo():
                self.hub.send(hello.instance_id, message)
            case AskCluster(ticket=ticket):
                processes = [
                    ProcessStatus(role, InstanceId(role), Epoch(1), 1, "up", 1, 1, {})
                    for role in ("kvpool", "prefill", "decode")
                ]
                self.hub.send(hello.instance_id, Cluster(ticket, processes, {}))

    async def run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + max(len(self._streams), 1) / self._tokens_per_s, time.monotonic() - 0.1)
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            self._say(list(self._streams))

    def _say(self, keys: list[RequestKey]) -> None:
        news: dict[InstanceId, list[NewTokens]] = {}
        for key in keys:
            stream = self._streams[key]
            token = random.randint(FIRST_WORD, LAST_WORD)
            is_last = stream.num_said + 1 >= stream.num_tokens
            said = NewTokens(key, stream.num_said, [token], [], "length" if is_last else None)
            news.setdefault(stream.gateway, []).append(said)
            stream.num_said += 1
            if is_last:
                del self._streams[key]
        for gateway, some in news.items():
            self.hub.send(gateway, Tokens(some))


async def serve_stub(port: int, tokens_per_s: float) -> None:
    stub = StubRouter(tokens_per_s)
    await stub.hub.listen(HOST, port)
    await stub.run()


def _stub(port: int, tokens_per_s: float, core: int) -> None:
    os.sched_setaffinity(0, {core})
    asyncio.run(serve_stub(port, tokens_per_s))


def _gateway(port: int, router_port: int, core: int, number: int) -> None:
    os.sched_setaffinity(0, {core})
    address = RouterAddress(HOST, router_port, TOKEN)
    engine = EngineConfig(str(demo.MODEL_DIR))
    GatewayProcess(
        # Gateways on islands' hosts share their port.
        GatewayConfig(island_gateway(number), (address,), engine, "demo", HttpConfig(HOST, port))
    ).run()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, api: Api, num_tokens: int
) -> tuple[float, int]:
    """Returns the seconds to the first token, and the number of events with text."""
    body = json.dumps({"model": "demo", "stream": True, api.limit: num_tokens} | api.body).encode()
    head = (
        f"POST {api.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    begun_s = time.perf_counter()
    writer.write(head.encode() + body)
    first_s, num_events, tail = 0.0, -api.num_before, b""
    while not tail.endswith(END) and (data := await reader.read(1 << 16)):
        num_events += (tail + data).count(api.event)
        tail = (tail + data)[1 - len(api.event) :]
        if num_events > 0 and not first_s:
            first_s = time.perf_counter() - begun_s
    return first_s, num_events


async def _ask_once(port: int, api: Api, num_tokens: int) -> int:
    """Returns the number of events with text."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        return (await _ask(reader, writer, api, num_tokens))[1]
    finally:
        writer.close()


async def _firsts(port: int, num_requests: int) -> dict[str, list[float]]:
    """Uses one connection, as clients do. The kernel is more lenient with a new one."""
    reader, writer = await asyncio.open_connection(HOST, port)
    found: dict[str, list[float]] = {name: [] for name in APIS}
    try:
        for _ in range(0, num_requests, TURN):
            for name, api in APIS.items():
                found[name] += [(await _ask(reader, writer, api, 2))[0] for _ in range(TURN)]
        return found
    finally:
        writer.close()


async def _load(port: int, api: Api, num_streams: int, num_tokens: int) -> int:
    return sum(await asyncio.gather(*(_ask_once(port, api, num_tokens) for _ in range(num_streams))))


async def _until_up(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                if await _ask_once(port, APIS["chat"], 2) > 0:
                    return
            except OSError:
                await asyncio.sleep(0.2)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of all its threads, in user and kernel mode."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    port: int, pids: Sequence[int], api: str, streams: int, tokens: int, requests: int
) -> dict[str, Any]:
    asyncio.run(_until_up(port))
    found = asyncio.run(_firsts(port, requests))
    firsts = sorted(found[api])[: requests * 99 // 100]
    asyncio.run(_load(port, APIS[api], streams, 50))
    begun_s, before = time.perf_counter(), [cpu_seconds(pid) for pid in pids]
    num_tokens = asyncio.run(_load(port, APIS[api], streams, tokens))
    wall_s = time.perf_counter() - begun_s
    each_s = [cpu_seconds(pid) - before_s for pid, before_s in zip(pids, before, strict=True)]
    cpu_s = sum(each_s)
    return {
        "api": api,
        "gateways": len(pids),
        "gateways_cpu_s": [round(each, 2) for each in each_s],
        "tokens_per_s_with_a_core_each": round(len(pids) * num_tokens / cpu_s),
        "streams": streams,
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / wall_s),
        "tokens_per_cpu_s": round(num_tokens / cpu_s),
        "cpu_us_per_token": round(cpu_s / num_tokens * 1e6, 1),
        "ttft_p50_ms": round(statistics.median(firsts) * 1e3, 2),
        "ttft_p99_ms": round(firsts[-1] * 1e3, 2),
        "ttft_p50_ms_by_api": {name: round(statistics.median(each) * 1e3, 2) for name, each in found.items()},
    }


def main() -> None:
    parser = parser_of(__doc__, out={"help": "append the JSON line to this file too"})
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8000, help="tokens per second, over all streams")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per stream")
    parser.add_argument(
        "--requests", type=int, default=200, help="for the time to first token, one at a time"
    )
    parser.add_argument("--api", choices=APIS, default="chat")
    parser.add_argument("--gateways", type=int, default=1)
    args = parser.parse_args()
    gateway_core, *others = sorted(os.sched_getaffinity(0))
    other_core = others[0] if others else gateway_core
    os.sched_setaffinity(0, {other_core})
    port, router_port = free_port(HOST), free_port(HOST)
    context = multiprocessing.get_context("spawn")
    stub = context.Process(target=_stub, args=(router_port, args.rate, other_core))
    gateways = [
        context.Process(
            target=_gateway, args=(port, router_port, (gateway_core, other_core)[number % 2], number)
        )
        for number in range(args.gateways)
    ]
    for process in (stub, *gateways):
        process.start()
    try:
        pids = [gateway.pid for gateway in gateways if gateway.pid]
        found = measure(port, pids, args.api, args.streams, args.tokens, args.requests)
    finally:
        for process in (*gateways, stub):
            process.terminate()
            process.join(10)
    append_json(args.out, {"offered_tokens_per_s": args.rate} | found)


if __name__ == "__main__":
    main()
