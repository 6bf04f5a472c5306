"""The processes of decode and colocated instances."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from alignedserve.decode_worker.worker import ColocatedWorker, DecodeWorker
from alignedserve.engine.engine import Engine
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.process import InstanceProcess
from alignedserve.kvpool.segment import Segment, scratch_blocks
from alignedserve.protocol.kv_format import BlockFormat
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.channel import Identity


class DecodeProcess(InstanceProcess):
    role = "decode"

    def _make_worker(
        self, engine: Engine, transfers: LiveTransfers, estimate: Estimate | None
    ) -> DecodeWorker:
        return DecodeWorker(engine, transfers, make_policy(self._config.scheduling), estimate)

    def _open(self, transfers: LiveTransfers, me: Identity) -> str:
        transfers.be_known_as(me)
        return ""

    def _attach(self, segment: str, form: BlockFormat) -> Segment:
        return Segment.attach(segment, form)

    def _scratch_blocks(
        self, form: BlockFormat, num_blocks: int
    ) -> AbstractContextManager[NDArray[np.uint8]]:
        return scratch_blocks(form, num_blocks)


class ColocatedProcess(DecodeProcess):
    role = "colocated"

    @property
    def _has_reversed(self) -> bool:
        return self._config.scheduling.share_blocks

    def _make_worker(
        self, engine: Engine, transfers: LiveTransfers, estimate: Estimate | None
    ) -> ColocatedWorker:
        return ColocatedWorker(
            engine,
            transfers,
            make_policy(self._config.scheduling),
            estimate,
            enable_prefix_caching=self._config.engine.enable_prefix_caching,
        )
