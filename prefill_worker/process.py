"""A prefill instance's process."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from alignedserve.engine.engine import Engine
from alignedserve.engine.kv_cache import Allocate
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.process import InstanceProcess
from alignedserve.kvpool.segment import Segment, scratch_blocks
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.kv_format import BlockFormat
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.channel import Identity
from alignedserve.transport.data_path import allocator


class PrefillProcess(InstanceProcess):
    role = "prefill"

    def _make_worker(
        self, engine: Engine, transfers: LiveTransfers, estimate: Estimate | None
    ) -> PrefillWorker:
        return PrefillWorker(
            engine,
            transfers,
            make_policy(self._config.scheduling),
            estimate,
            enable_prefix_caching=self._config.engine.enable_prefix_caching,
        )

    def _open(self, transfers: LiveTransfers, me: Identity) -> str:
        return transfers.listen(me)

    @property
    def _allocate(self) -> Allocate:
        return allocator(self._config.transfers.transport)

    def _attach(self, segment: str, form: BlockFormat) -> Segment:
        return Segment.attach(segment, form)

    def _scratch_blocks(
        self, form: BlockFormat, num_blocks: int
    ) -> AbstractContextManager[NDArray[np.uint8]]:
        return scratch_blocks(form, num_blocks)
