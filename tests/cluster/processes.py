"""An island of real processes that a test can kill and restart: router, pool, two prefill and two decode instances."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.instance.config import InstanceConfig, TransferConfig
from alignedserve.kv.format import KV_CACHE_DTYPES, BlockFormat
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.pool import PoolConfig
from alignedserve.kvpool.process import PoolProcessConfig, segments
from alignedserve.kvpool.segment import Segment
from alignedserve.launch.ports import free_port
from alignedserve.process.logs import LogConfig
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.connection import new_epoch
from alignedserve.protocol.frames import frame
from alignedserve.protocol.handshake import ClientHandshake
from alignedserve.protocol.messages import Hello, InstanceLimits, Stop
from alignedserve.router.config import RouterConfig
from alignedserve.router.process import RouterProcessConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import LAUNCHER, InstanceId
from tests.cluster.part import start

TOKEN = "of this test"
ROUTER, POOL = InstanceId("router"), InstanceId("kvpool-0")
PREFILLS = (InstanceId("prefill-0"), InstanceId("prefill-1"))
DECODES = (InstanceId("decode-0"), InstanceId("decode-1"))
COLOCATED = InstanceId("colocated-0")
GATEWAY = InstanceId("gateway-0")
# For the longest of the tests' prompts.
MAX_MODEL_LEN = 384
MAX_BLOCKS = MAX_MODEL_LEN // 16
END_S = 120.0
FAILING = {"prefill": "cutting prefill", "router": "hasty router"}
CHANGING = {"prefill": "changing", "decode": "changing", "router": "restless router"}

_numbers = count(1)


@dataclass(frozen=True)
class Setup:
    directory: Path
    _: KW_ONLY
    num_kv_heads: int = 2
    head_dim: int = 16
    # The number of layer groups: one with all three layers, or sliding layers in groups of their own.
    num_groups: int = 1
    # What a request keeps on a decode instance; None: everything.
    span: KvSpan | None = None
    policy: str = "aligned"
    link: str = "host"
    pool_kv_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    verify_blocks: float = 0.0
    lora_modules: tuple[str, ...] = ()
    # Room for one of the longest requests, or a few others.
    num_decode_blocks: int = MAX_BLOCKS + 8
    num_pool_blocks: int = 3 * MAX_BLOCKS
    silence_s: float = 10.0
    timeout_s: float = 30.0
    # Prefill instances, and decode instances: at most two of each.
    num_each: int = 2
    enable_prefix_caching: bool = True
    # Colocated instances, which replace the prefill and decode instances.
    num_colocated: int = 0
    # Slow instances.
    is_slow: bool = False
    # Decode instances that are slower still.
    is_slowest: bool = False
    # A pool that promises answers to next turns for longer than any test takes.
    is_patient: bool = False
    # Links that a test can make fail: see `part.LINKS_FAIL`.
    has_failing_links: bool = False
    # Instances that constantly change between prefill and decode.
    changes_roles: bool = False
    # Also start a gateway, which reports its requests: see `house.House`.
    has_gateway: bool = False
    otlp_endpoint: str | None = None
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def can_wait(self) -> bool:
        """Returns whether its processes are idle while no test uses them, and are not considered dead however busy the
        machine is."""
        return self.silence_s >= 10.0 and not self.changes_roles

    @property
    def form(self) -> BlockFormat:
        """Returns the block format of the tiny models."""
        return BlockFormat(
            num_layers=3 // self.num_groups,
            block_size=16,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype="float32",
            encoding=KV_CACHE_DTYPES[self.kv_cache_dtype],
            num_groups=self.num_groups,
            has_state=self.span is not None and self.span.has_state,
        )


class Processes:
    def __init__(self, setup: Setup, logs: Path) -> None:
        self.setup = setup
        self.logs = logs
        self._scheduling = SchedulingConfig(
            setup.policy,
            min_batch_requests=3,
            near_share=0.5,
            # Admits what there are blocks for at the moment, so that a decode instance has to evict all the time.
            admit_ahead=32 if setup.is_slow else 5,
        )
        self.router = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
        self.segment_prefix = f"alignedserve-test-{os.getpid()}-{next(_numbers)}"
        self.configs: dict[InstanceId, Any] = {POOL: self._pool()}
        colocated = [InstanceId(f"colocated-{number}") for number in range(setup.num_colocated)]
        if not colocated:
            self.configs |= {
                name: self._instance(name, 2 * MAX_BLOCKS + 16, 64) for name in PREFILLS[: setup.num_each]
            }
        for name in colocated or DECODES[: setup.num_each]:
            self.configs[name] = self._instance(name, setup.num_decode_blocks, 64)
        expected = {name: name.split("-")[0] for name in self.configs}
        decides = RouterConfig(
            link=setup.link,
            orphan_s=1.0,
            silence_s=setup.silence_s,
            change_roles=setup.changes_roles,
        )
        self.configs[ROUTER] = RouterProcessConfig(
            self.router, decides, expected, str(logs), setup.log, self._scheduling
        )
        if setup.has_gateway:
            self.configs[GATEWAY] = self._gateway()
        self._running: dict[InstanceId, BaseProcess] = {}

    @property
    def names(self) -> set[InstanceId]:
        """Returns the processes that were started and not removed."""
        return {*self._running}

    def start(self, *names: InstanceId) -> None:
        for name in names:
            self._running[name] = start(name, self._kind(name), self.configs[name])

    def start_all(self) -> None:
        self.start(*self.configs)

    def kill(self, name: InstanceId) -> None:
        """Returns when it is dead."""
        self._running[name].kill()
        self.join(name)

    @property
    def dead(self) -> dict[InstanceId, int | None]:
        """Returns the exit codes of ended processes."""
        return {name: each.exitcode for name, each in self._running.items() if not each.is_alive()}

    def remove(self, *names: InstanceId) -> None:
        """Stops them by SIGTERM. They have to end as they should."""
        for name in names:
            self.signal(name, signal.SIGTERM)
        for name in names:
            exit_code = self.join(name)
            del self._running[name]
            assert exit_code == 0, f"{name} ended with {exit_code}"

    def signal(self, name: InstanceId, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def pid(self, name: InstanceId) -> int:
        pid = self._running[name].pid
        assert pid is not None
        return pid

    def join(self, name: InstanceId) -> int | None:
        """Returns its exit code."""
        self._running[name].join(END_S)
        assert not self._running[name].is_alive(), f"{name} does not end"
        return self._running[name].exitcode

    def stop(self) -> None:
        """Stops them like the launcher, leaving nothing behind."""
        hello = Hello("launcher", LAUNCHER, new_epoch(), os.getpid(), {}, InstanceLimits())
        with socket.create_connection((self.router.host, self.router.port), timeout=END_S) as sock:
            handshake = ClientHandshake(TOKEN, lambda: frame(hello))
            sock.sendall(handshake.opening)
            proof = sock.recv(handshake.num_bytes, socket.MSG_WAITALL)
            sock.sendall(handshake.take(proof) + frame(Stop()))
            while sock.recv(1 << 16):
                pass
        bad = {name: code for name in self._running if (code := self.join(name))}
        assert not bad, f"exit codes: {bad}"
        left = segments(self.segment_prefix)
        assert not left, f"segments are left: {left}"

    def end(self) -> None:
        """Raises an error unless all of them end by themselves. None is left afterwards."""
        try:
            self.stop()
        finally:
            self.clean_up()

    def clean_up(self) -> None:
        """Cleans up however the test ended."""
        for process in self._running.values():
            process.kill()
            process.join()
        for name in segments(self.segment_prefix):
            Segment.unlink(name)

    def _kind(self, name: InstanceId) -> str:
        role = name.split("-")[0]
        if self.setup.has_failing_links and role in FAILING:
            return FAILING[role]
        if self.setup.changes_roles and role in CHANGING:
            return CHANGING[role]
        if self.setup.is_slowest and role == "decode":
            return "slowest decode"
        if self.setup.is_patient and role == "kvpool":
            return "patient kvpool"
        return f"slow {role}" if self.setup.is_slow and role in ("prefill", "decode") else role

    def _pool(self) -> PoolProcessConfig:
        return PoolProcessConfig(
            POOL,
            self.router,
            self.segment_prefix,
            self.setup.form.in_pool(self.setup.pool_kv_dtype),
            self.setup.num_pool_blocks,
            self.setup.log,
            PoolConfig(span=self.setup.span),
        )

    def _gateway(self) -> GatewayConfig:
        setup, port = self.setup, free_port("127.0.0.1")
        engine = EngineConfig(str(setup.directory), max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True)
        http = HttpConfig("127.0.0.1", port, otlp_endpoint=setup.otlp_endpoint)
        return GatewayConfig(GATEWAY, (self.router,), engine, "tiny", http, log=setup.log)

    def _instance(self, name: InstanceId, num_blocks: int, max_num_batched_tokens: int) -> InstanceConfig:
        engine = EngineConfig(
            model=str(self.setup.directory),
            dtype="float32",
            kv_cache_dtype=self.setup.kv_cache_dtype,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_memory_bytes=num_blocks * self.setup.form.column_bytes,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=16,
            lora_modules=self.setup.lora_modules,
            enable_prefix_caching=self.setup.enable_prefix_caching,
            use_tqdm=False,
        )
        transfers = TransferConfig(
            self.setup.link,
            timeout_s=self.setup.timeout_s,
            pool_kv_dtype=self.setup.pool_kv_dtype,
            verify_blocks=self.setup.verify_blocks,
        )
        return InstanceConfig(
            name,
            self.router,
            engine,
            transfers,
            self.setup.log,
            self._scheduling,
            first_role=name.split("-")[0] if self.setup.changes_roles else None,
        )


@contextmanager
def running(setup: Setup, logs: Path) -> Iterator[Processes]:
    """They end with the block, all by themselves unless it raises an error."""
    processes = Processes(setup, logs)
    try:
        processes.start_all()
        yield processes
        processes.end()
    finally:
        processes.clean_up()
