"""The other end of a connection, in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from alignedserve.transport import shared_memory
from alignedserve.transport.completions import Completions
from alignedserve.transport.kv_receiver import KVReceiver
from alignedserve.transport.kv_sender import KVSender
from alignedserve.transport.runs import TransferSpec
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, InstanceId, RequestKey
from tests.forkserver import forking
from tests.transport.helpers import Outcomes, equal_blocks, filled_blocks, identity

SEED = 5
_FORKED = forking(__name__)


class Peer:
    """Ended by `end` if it is asked to, killed at the end of the `with` if not."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = _FORKED.Pipe()
        self.process = _FORKED.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def receive(self) -> Any:
        assert self.pipe.poll(60), "the other process said nothing for a minute"
        return self.pipe.recv()

    def ask(self, question: object) -> Any:
        self.pipe.send(question)
        return self.receive()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> Any:
        """Returns its last words."""
        answer = self.ask(None)
        self.process.join(30)
        assert self.process.exitcode == 0
        return answer


@dataclass(frozen=True)
class Staged:
    """What a sender has; its blocks are `filled_blocks` of SEED."""

    transport: str
    num_blocks: int
    block_bytes: int
    requests: dict[RequestKey, list[BlockId]] = field(default_factory=dict)


def run_sender(pipe: Connection, name: str, epoch: int, staged: Staged) -> None:
    torch.set_num_threads(1)
    blocks = filled_blocks(staged.num_blocks, staged.block_bytes, SEED, staged.transport)
    completions, outcomes = Completions(), Outcomes()
    me = identity(name, epoch)
    staging_buffer = StagingBuffer(me.epoch, completions)
    for key, ids in staged.requests.items():
        staging_buffer.put(key, ids, outcomes.append)
    sender = KVSender(staged.transport, [blocks], staging_buffer, me)
    pipe.send(sender.address)
    while pipe.recv() is not None:
        pipe.send((len(staging_buffer), staging_buffer.num_being_pulled))
    sender.close()
    staging_buffer.clear()
    completions.run()
    pipe.send([(outcome.keys, outcome.error) for outcome in outcomes])


@dataclass(frozen=True)
class Order:
    address: str
    specs: list[TransferSpec]
    # what should arrive: the sender's blocks
    sources: Sequence[BlockId]
    timeout_s: float = 30.0


def pull(pipe: Connection, name: str, epoch: int, staged: Staged) -> None:
    """Into as many blocks as the sender has, of memory that the test can look into."""
    torch.set_num_threads(1)
    shape = (staged.num_blocks, staged.block_bytes)
    blocks = shared_memory.empty(shape, dtype=torch.uint8, device=torch.device("cpu"))
    theirs = filled_blocks(staged.num_blocks, staged.block_bytes, SEED)
    completions = Completions()
    receiver = KVReceiver(staged.transport, [blocks], identity(name, epoch), completions)
    pipe.send(shared_memory.describe(blocks))
    while (order := pipe.recv()) is not None:
        outcomes = Outcomes()
        receiver.pull(InstanceId("prefill-0"), order.address, order.specs, outcomes.append, order.timeout_s)
        assert completions.run(timeout_s=60) == 1
        targets = [block for _, ids in order.specs for block in ids]
        error = outcomes.only.error
        pipe.send((error, error is None and equal_blocks(blocks, targets, theirs, order.sources)))
    receiver.close()
    pipe.send("closed")
