"""Measures the additional memory of a gateway while files and batch jobs pass through it.

A file of the largest allowed size is uploaded, validated, run partly and cancelled. A job with the most allowed lines
is run to its end, and its output is downloaded. A stub engine answers each line immediately, or at a rate that keeps
the maximum number of lines in flight. The store is a real Redis. It prints the highest resident size in each phase
minus the size before the first phase, in MiB, and likewise the memory that Redis uses after the phase.

    python -m benchmarks.gateway_memory [--lines 50000] [--megabytes 200] [--rate 1e6] [--files-at DIR] [--out FILE]
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from redis.asyncio import Redis
from tqdm import tqdm

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.process import GatewayProcess
from alignedserve.launch.ports import free_port
from alignedserve.protocol.address import RouterAddress
from alignedserve.store.server import PrivateServer, find_server, locked
from alignedserve.types import InstanceId
from benchmarks.gateway import HOST, TOKEN, serve_stub
from benchmarks.harness import append_json, parser_of, progress

ENDPOINT = "/v1/chat/completions"
START_S = 60.0
LOOK_S = 0.2
# Lines of the large file that are answered before it is cancelled.
NUM_ANSWERED = 500
# Bytes of a line without its padding.
LINE_BYTES = 200
OVER = ("completed", "cancelled", "failed", "expired")


def _gateway(port: int, router_port: int, store_url: str, files_at: str | None, max_file_bytes: int) -> None:
    address = RouterAddress(HOST, router_port, TOKEN)
    engine = EngineConfig(str(demo.MODEL_DIR))
    config = GatewayConfig(
        InstanceId("gateway-0"),
        (address,),
        engine,
        "demo",
        HttpConfig(HOST, port),
        limits=CallLimits(max_file_bytes=max_file_bytes),
        store_url=store_url,
        files_at=files_at,
    )
    GatewayProcess(config).run()


def _stub(port: int, tokens_per_s: float) -> None:
    asyncio.run(serve_stub(port, tokens_per_s))


def lines_of(count: int, num_bytes: int) -> Iterator[bytes]:
    """Yields `count` requests with at most `num_bytes` bytes in total."""
    padding = "x" * max(0, num_bytes // count - LINE_BYTES)
    for number in range(count):
        body = {"messages": [{"role": "user", "content": "How far?"}], "max_tokens": 2, "user": padding}
        line = {"custom_id": f"q{number}", "method": "POST", "url": ENDPOINT, "body": body}
        yield json.dumps(line).encode() + b"\n"


@dataclass
class Measured:
    client: httpx2.AsyncClient
    pid: int
    redis: Redis
    # Shows the phase, and the number of answered lines.
    bar: tqdm[Any]
    base_bytes: int = 0
    base_redis_bytes: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        # Resets the peak to the current size.
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self.bar.reset()
        self.bar.set_description(name)
        begun_s = time.perf_counter()
        yield
        peak = (self.resident("VmHWM") - self.base_bytes) / (1 << 20)
        redis = (await self.redis_bytes() - self.base_redis_bytes) / (1 << 20)
        self.found |= {f"{name}_mib": round(peak, 1), f"{name}_s": round(time.perf_counter() - begun_s, 1)}
        self.found[f"{name}_redis_mib"] = round(redis, 1)
        tqdm.write(f"{name}: {peak:.1f} MiB, Redis {redis:.1f} MiB", file=sys.stderr)

    async def redis_bytes(self) -> int:
        """Returns the memory that Redis uses at the end of a phase."""
        return int((await self.redis.info("memory"))["used_memory"])

    def resident(self, key: str) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))

    async def upload(self, lines: Iterator[bytes]) -> str:
        head = '--B\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'

        async def body() -> AsyncIterator[bytes]:
            yield f"{head.format('purpose', '')}batch\r\n".encode()
            yield head.format("file", '; filename="in.jsonl"').encode()
            for line in lines:
                yield line
            yield b"\r\n--B--\r\n"

        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        return str(_body(await self.client.post("/v1/files", content=body(), headers=kind))["id"])

    async def submit(self, file_id: str) -> str:
        asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        return str(_body(await self.client.post("/v1/batches", json=asked))["id"])

    async def until(self, batch_id: str, *statuses: str, num_answered: int = 0) -> dict[str, Any]:
        while True:
            batch = _body(await self.client.get(f"/v1/batches/{batch_id}"))
            self.bar.update(batch["request_counts"]["completed"] - self.bar.n)
            if batch["status"] in statuses and batch["request_counts"]["completed"] >= num_answered:
                return batch
            if batch["status"] in OVER:
                raise RuntimeError(f"the batch is {batch['status']}: {batch}")
            await asyncio.sleep(LOOK_S)

    async def download(self, file_id: str) -> int:
        """Returns the number of lines."""
        async with self.client.stream("GET", f"/v1/files/{file_id}/content") as response:
            return sum([data.count(b"\n") async for data in response.aiter_bytes()])


def _body(response: httpx2.Response) -> dict[str, Any]:
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


async def measure(at: Measured, num_lines: int, num_bytes: int) -> None:
    await _run_whole(at, 200, 200 * LINE_BYTES)
    at.base_bytes, at.base_redis_bytes = at.resident("VmRSS"), await at.redis_bytes()
    async with at.phase("upload"):
        large = await at.upload(lines_of(num_lines, num_bytes))
    async with at.phase("validate"):
        batch_id = await at.submit(large)
        await at.until(batch_id, "in_progress")
    async with at.phase("run_and_cancel"):
        await at.until(batch_id, "in_progress", num_answered=min(NUM_ANSWERED, num_lines // 100))
        _body(await at.client.post(f"/v1/batches/{batch_id}/cancel"))
        await at.until(batch_id, "cancelled")
    async with at.phase("whole_job"):
        output = await _run_whole(at, num_lines, num_lines * LINE_BYTES)
    async with at.phase("download"):
        count = await at.download(output)
    if count != num_lines:
        raise RuntimeError(f"{count} lines came back, of {num_lines}")


async def _run_whole(at: Measured, num_lines: int, num_bytes: int) -> str:
    batch_id = await at.submit(await at.upload(lines_of(num_lines, num_bytes)))
    return str((await at.until(batch_id, "completed"))["output_file_id"])


@asynccontextmanager
async def redis_running() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="redis-") as directory, locked(Path(directory)) as lock:
        server = PrivateServer(find_server(), Path(directory), lock)
        process = await server.start()
        try:
            yield server.url
        finally:
            process.kill()
            await process.wait()


async def run(num_lines: int, num_bytes: int, tokens_per_s: float, files_at: str | None) -> dict[str, Any]:
    port, router_port = free_port(HOST), free_port(HOST)
    context = multiprocessing.get_context("spawn")
    async with redis_running() as store_url:
        stub = context.Process(target=_stub, args=(router_port, tokens_per_s))
        args = (port, router_port, store_url, files_at, 2 * num_bytes)
        gateway = context.Process(target=_gateway, args=args)
        for process in (stub, gateway):
            process.start()
        try:
            assert gateway.pid
            async with (
                httpx2.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=120) as client,
                Redis.from_url(store_url) as redis,
            ):
                await _until_up(client)
                with progress(num_lines, "line") as bar:
                    at = Measured(client, gateway.pid, redis, bar)
                    await measure(at, num_lines, num_bytes)
            return {"lines": num_lines, "bytes": num_bytes} | at.found
        finally:
            for process in (gateway, stub):
                process.terminate()
                process.join(10)


async def _until_up(client: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(LOOK_S)


def main() -> None:
    parser = parser_of(__doc__, out={"help": "append the JSON line to this file too"})
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the uploaded file")
    parser.add_argument("--rate", type=float, default=1e6, help="tokens per second from the stub")
    parser.add_argument("--files-at", help="directory or s3://BUCKET/PREFIX [default: in Redis]")
    args = parser.parse_args()
    found = asyncio.run(run(args.lines, args.megabytes * 1_000_000, args.rate, args.files_at))
    append_json(args.out, found)


if __name__ == "__main__":
    main()
