"""The engine and the copies of a worker that runs in a test, as what they are rather than what the worker asks of
them."""

from __future__ import annotations

from alignedserve.engine.engine import Engine
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.instance.worker import Worker
from alignedserve.transport.mover import Mover


def engine_of(worker: Worker) -> Engine:
    assert isinstance(worker.engine, Engine)
    return worker.engine


def transfers_of(worker: Worker) -> LiveTransfers:
    assert isinstance(worker.transfers, LiveTransfers)
    return worker.transfers


def pool_mover_of(worker: Worker) -> Mover:
    mover = transfers_of(worker).pool_mover
    assert mover
    return mover
