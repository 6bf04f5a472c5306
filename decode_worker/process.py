"""A decode instance's process."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.decode_worker.options import DecodeOptions
from alignedserve.decode_worker.worker import DecodeWorker
from alignedserve.engine.engine import Engine
from alignedserve.estimate import Estimate
from alignedserve.instance.process import InstanceProcess
from alignedserve.kv_format import BlockFormat
from alignedserve.kvpool.segment import Segment
from alignedserve.types import Epoch


class DecodeProcess(InstanceProcess):
    role = "decode"

    def _make_worker(
        self, engine: Engine, epoch: Epoch, wake: Callable[[], object], estimate: Estimate | None
    ) -> DecodeWorker:
        options = DecodeOptions(discipline=self._config.discipline, mix=self._config.mix)
        return DecodeWorker(engine, epoch, wake, options, self._config.transfers, estimate)

    def _attach(self, segment: str, form: BlockFormat) -> Segment:
        return Segment.attach(segment, form)
