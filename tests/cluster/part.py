"""A process of an island, forked from one that has imported everything that any of them needs, so it starts in a
moment."""

from __future__ import annotations

import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from alignedserve.decode_worker.process import ColocatedProcess, DecodeProcess
from alignedserve.engine.engine import Engine, LaunchedIteration
from alignedserve.engine.outputs import TokenOutput
from alignedserve.gateway.process import GatewayProcess
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.memory import BlockManager
from alignedserve.instance.worker import Worker
from alignedserve.kvpool import return_times
from alignedserve.kvpool.process import PoolProcess
from alignedserve.launch.role_actors import changing_process
from alignedserve.prefill_worker.process import PrefillProcess
from alignedserve.protocol.messages import DECODE, PREFILL
from alignedserve.router import link_health
from alignedserve.router.process import RouterProcess
from alignedserve.scheduling.proportion import Proportion, Seen
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.channel import Pull
from alignedserve.transport.transfer_session import TransferSession
from alignedserve.types import InstanceId
from tests import layer_with_state  # noqa: F401
from tests.forkserver import forking


class SlowPrefill(PrefillProcess):
    def _make_worker(
        self, engine: Engine, memory: BlockManager, transfers: LiveTransfers, estimate: Estimate | None
    ) -> Worker:
        return super()._make_worker(slowed(engine), memory, transfers, estimate)


class SlowDecode(DecodeProcess):
    def _make_worker(
        self, engine: Engine, memory: BlockManager, transfers: LiveTransfers, estimate: Estimate | None
    ) -> Worker:
        return super()._make_worker(slowed(engine), memory, transfers, estimate)


class SlowestDecode(DecodeProcess):
    def _make_worker(
        self, engine: Engine, memory: BlockManager, transfers: LiveTransfers, estimate: Estimate | None
    ) -> Worker:
        return super()._make_worker(slowed(engine, SLOWEST_ITERATION_S), memory, transfers, estimate)


# For an iteration of a large model.
SLOW_ITERATION_S = 0.1
# At 80 tokens an answer takes at least 40 s.
SLOWEST_ITERATION_S = 0.5


def slowed(engine: Engine, iteration_s: float = SLOW_ITERATION_S) -> Engine:
    """Makes it as slow as with a large model, so that each state of a request lasts long enough to be observed."""
    finish = engine.finish

    def slowly(iteration: LaunchedIteration) -> list[TokenOutput]:
        time.sleep(iteration_s)
        return finish(iteration)

    engine.finish = slowly  # type: ignore[method-assign]
    return engine


# A file with this name in the log directory makes links fail.
LINKS_FAIL = "links fail"


class CuttingPrefill(PrefillProcess):
    """Cuts the connection at each pull while links fail."""

    def run(self) -> None:
        assert self._config.log.dir
        links_fail = Path(self._config.log.dir) / LINKS_FAIL
        serve = TransferSession._serve

        def serve_or_cut(self: TransferSession, pull: Pull) -> None:
            if links_fail.exists():
                raise ConnectionError("this test has it so")
            serve(self, pull)

        TransferSession._serve = serve_or_cut  # type: ignore[method-assign]
        super().run()


class PatientPool(PoolProcess):
    """Promises answers to next turns for longer than any test takes."""

    def run(self) -> None:
        return_times.PRIOR_S["user"] = 600.0
        super().run()


class HastyRouter(RouterProcess):
    """Retries failed links very soon."""

    def run(self) -> None:
        link_health.FIRST_PAUSE_S, link_health.MAX_PAUSE_S = 0.5, 1.0
        super().run()


class RestlessRouter(RouterProcess):
    """Constantly moves a decode instance to prefill, and then a prefill instance to decode."""

    def run(self) -> None:
        Proportion.wanted = _restless  # type: ignore[method-assign]
        super().run()


def _restless(self: Proportion, seen: Seen) -> str | None:
    if seen.num_prefill + seen.num_decode < 4:
        return None
    return PREFILL if seen.num_decode > 1 else DECODE


PROCESSES: dict[str, Any] = {
    "router": RouterProcess,
    "kvpool": PoolProcess,
    "prefill": PrefillProcess,
    "decode": DecodeProcess,
    "colocated": ColocatedProcess,
    "gateway": GatewayProcess,
    "changing": changing_process,
    "slow prefill": SlowPrefill,
    "slow decode": SlowDecode,
    "slowest decode": SlowestDecode,
    "patient kvpool": PatientPool,
    "cutting prefill": CuttingPrefill,
    "hasty router": HastyRouter,
    "restless router": RestlessRouter,
}
# For native code: several processes share two cores, and threads that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
_FORKED = forking(__name__)


def start(name: InstanceId, kind: str, config: object) -> BaseProcess:
    """`kind`: one of PROCESSES."""
    process = _FORKED.Process(target=run, args=(kind, config), name=name, daemon=True)
    process.start()
    return process


def run(kind: str, config: object) -> None:
    torch.set_num_threads(1)
    PROCESSES[kind](config).run()
