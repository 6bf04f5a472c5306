"""A process of an island, forked from one that has imported all that any of them needs: it is up in a moment."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from alignedserve.engine.engine import Engine
from alignedserve.types import Epoch, InstanceId
from decode_worker.process import DecodeProcess
from decode_worker.schedule import DecodeOptions
from decode_worker.worker import DecodeWorker
from kvpool.process import PoolProcess
from prefill_worker.process import PrefillProcess
from router.process import RouterProcess


class CrowdedDecode(DecodeProcess):
    """Admits whom it has blocks for at the moment, so that it has to evict all the time."""

    def _make_worker(self, engine: Engine, epoch: Epoch, wake: Callable[[], object]) -> DecodeWorker:
        options = DecodeOptions(evict_ahead=4, admit_ahead=5)
        return DecodeWorker(engine, epoch, wake, options, self._config.transfers)


PROCESSES: dict[str, Any] = {
    "router": RouterProcess,
    "kvpool": PoolProcess,
    "prefill": PrefillProcess,
    "decode": CrowdedDecode,
}
# of what is native: several processes share two cores, and threads that wait for each other spin
os.environ.setdefault("OMP_NUM_THREADS", "1")
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload([__name__])


def start(name: InstanceId, config: object) -> BaseProcess:
    process = _FORKED.Process(target=run, args=(name.split("-")[0], config), name=name, daemon=True)
    process.start()
    return process


def run(role: str, config: object) -> None:
    torch.set_num_threads(1)
    PROCESSES[role](config).run()
