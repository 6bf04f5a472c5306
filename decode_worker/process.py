"""The processes of decode and colocated instances."""

from __future__ import annotations

from alignedserve.decode_worker.worker import ColocatedWorker, DecodeWorker
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.process.base import InstanceProcess
from alignedserve.transport.channel import Identity


class DecodeProcess(InstanceProcess):
    role = "decode"
    worker_class = DecodeWorker

    def _open(self, transfers: LiveTransfers, me: Identity) -> str:
        transfers.be_known_as(me)
        return ""


class ColocatedProcess(DecodeProcess):
    role = "colocated"
    worker_class = ColocatedWorker
