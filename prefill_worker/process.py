"""A prefill instance's process."""

from __future__ import annotations

from alignedserve.engine.kv_cache import Allocate
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.process.base import InstanceProcess
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.transport.channel import Identity
from alignedserve.transport.data_path import allocator


class PrefillProcess(InstanceProcess):
    role = "prefill"
    worker_class = PrefillWorker

    def _open(self, transfers: LiveTransfers, me: Identity) -> str:
        return transfers.listen(me)

    @property
    def _allocate(self) -> Allocate:
        return allocator(self._config.transfers.transport)
