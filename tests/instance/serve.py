"""A test's instance: its own process, forked from one that has imported what it runs."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from alignedserve.decode_worker.process import DecodeProcess
from alignedserve.engine import build
from alignedserve.engine.config import EngineConfig
from alignedserve.instance.config import InstanceConfig
from alignedserve.instance.process.base import InstanceProcess
from alignedserve.prefill_worker.process import PrefillProcess
from alignedserve.protocol.address import RouterAddress
from alignedserve.types import InstanceId
from tests.forkserver import forking

ROLES: dict[str, type[InstanceProcess]] = {"prefill": PrefillProcess, "decode": DecodeProcess}
# Modules that instances import when they run.
IMPORTED = (build,)
_FORKED = forking(__name__)


def start(role: str, instance_id: InstanceId, router: RouterAddress, model: Path) -> BaseProcess:
    """`role`: one of ROLES."""
    process = _FORKED.Process(target=_serve, args=(role, instance_id, router, str(model)), daemon=True)
    process.start()
    return process


def _serve(role: str, instance_id: InstanceId, router: RouterAddress, model: str) -> None:
    torch.set_num_threads(1)
    config = InstanceConfig(
        instance_id=instance_id,
        router=router,
        engine=EngineConfig(
            model=model,
            dtype="float32",
            kv_cache_memory_bytes=4 << 20,
            max_num_batched_tokens=40,
            max_num_seqs=16,
            use_tqdm=False,
        ),
    )
    ROLES[role](config).run()
