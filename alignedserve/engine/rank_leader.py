"""The leading rank. It starts the other ranks, and tells them what to compute beside it.

Only the leader has requests, blocks and a sampler. The others have their part of the weights, the same programs, and
the KV of their own heads. The leader maps that KV, so it alone copies blocks, for all ranks. In each iteration it
sends the step's inputs, and the ranks exchange values in every layer.

  starting -> loaded -> ready -> lost, when another rank has ended or hangs; the leader can't continue then
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from alignedserve.engine.config import EngineConfig
from alignedserve.engine.ranks import memory
from alignedserve.engine.ranks.channel import Kind, RankChannel
from alignedserve.engine.ranks.watch import Watch
from alignedserve.kernels.cpu.ranks import num_shared_bytes
from alignedserve.ops.base import CompiledModel
from alignedserve.ops.ranks import RankGroup
from alignedserve.ops.shard import Shard
from alignedserve.ops.step import StepInputs


class RankLost(RuntimeError):
    """A rank of this instance has ended or hangs, so nothing can be computed any more."""


class RankLeader:
    def __init__(self, config: EngineConfig, slot_values: int, has_reversed: bool, is_on_gpu: bool) -> None:
        """Starts the other ranks, which load their weights in the meantime. `slot_values`: see kernels/cpu/ranks.py."""
        size = config.tensor_parallel_size
        self._store_file = Path(f"/dev/shm/alignedserve-link-{secrets.token_hex(16)}")
        os.close(os.open(self._store_file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        shared = memory.allocate(num_shared_bytes(size, slot_values))
        num_threads = max(torch.get_num_threads() // size, 1)
        self.ranks = RankGroup(Shard(0, size), self._store_file, shared, slot_values, num_threads)
        self._followers = [_start(rank) for rank in range(1, size)]
        self._watch = Watch([process for process, _ in self._followers], shared)
        self._channels = [channel for _, channel in self._followers]
        # The other ranks end with this object, even if `close` is never called.
        self._close = weakref.finalize(self, _close, self._followers, self._watch, self._store_file)
        for rank, channel in enumerate(self._channels, 1):
            channel.send_json(
                Kind.START,
                {
                    "config": asdict(config) | {"use_tqdm": False},
                    "rank": rank,
                    "leader": os.getpid(),
                    "shared": memory.describe(shared),
                    "slot_values": slot_values,
                    "store_file": str(self._store_file),
                    "num_threads": num_threads,
                    "has_reversed": has_reversed,
                    "is_on_gpu": is_on_gpu,
                },
            )

    def until_loaded(self) -> None:
        """Waits until all ranks have their weights. Raises ValueError if one fails."""
        for channel in self._channels:
            channel.expect(Kind.LOADED)
        self._store_file.unlink(missing_ok=True)

    def least(self, measure: Callable[[], int]) -> int:
        """Returns the least number of bytes that any rank has for KV. `measure` returns it for this rank. All ranks
        measure at the same time, because they exchange values in the measured step."""
        self.tell(Kind.MEASURE)
        own = measure()
        return min(own, *(int(channel.expect(Kind.MEASURED)) for channel in self._channels))

    def prepare(self, num_blocks: int) -> None:
        """Makes the others allocate their parts of `num_blocks` blocks, and compile. All ranks compile at the same
        time."""
        for channel in self._channels:
            channel.send_json(Kind.CACHE, {"num_blocks": num_blocks})

    def until_ready(self) -> list[torch.Tensor]:
        """Waits until all ranks are ready. Returns the bytes of the others' KV, mapped."""
        return [memory.attach(json.loads(channel.expect(Kind.READY))) for channel in self._channels]

    def lead(self, model: CompiledModel, step: StepInputs, break_up: Callable[[], None]) -> CompiledModel:
        """Returns the model of all ranks. `break_up` ends this rank's wait for another one."""
        self._watch.start(break_up)
        return LedModel(self, model, step)

    def tell(self, kind: Kind, order: bytes = b"") -> None:
        for channel in self._channels:
            channel.send(kind, order)

    @property
    def lost_so_far(self) -> str:
        """Like `lost`, without waiting."""
        return self._watch.lost

    def lost(self) -> str:
        """Returns which rank is lost, or an empty string. Waits some seconds, because an error may precede the notice
        of its cause."""
        return self._watch.what_was_lost()

    def close(self) -> None:
        """Ends the other ranks. Safe to repeat."""
        self._close()


class LedModel(CompiledModel):
    """This rank's part of the model, together with all others'. This rank alone chooses tokens."""

    def __init__(self, leader: RankLeader, model: CompiledModel, step: StepInputs) -> None:
        self._leader = leader
        self._model = model
        self._step = step

    def forward(self) -> torch.Tensor:
        return self._together(Kind.FORWARD, self._step.packed(), self._model.forward)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._together(Kind.LOGITS, rows.numpy().tobytes(), lambda: self._model.logits(rows))

    def final_states(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks have the same states after the last layer, so this rank's are enough."""
        return self._model.final_states(rows)

    def likeliest(self, num_rows: int) -> np.ndarray | None:
        return self._model.likeliest(num_rows)

    def confirm(self) -> None:
        if lost := self._leader.lost_so_far:
            raise RankLost(lost)

    def _together(self, kind: Kind, order: bytes, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            self._leader.tell(kind, order)
            return compute()
        except (RuntimeError, ConnectionError) as error:
            if lost := self._leader.lost():
                raise RankLost(lost) from error
            raise


def _start(rank: int) -> tuple[subprocess.Popen[bytes], RankChannel]:
    ours, theirs = socket.socketpair()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "alignedserve.engine.rank_follower", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return process, RankChannel(ours)


def _close(
    followers: list[tuple[subprocess.Popen[bytes], RankChannel]], watch: Watch, store_file: Path
) -> None:
    watch.stop()
    store_file.unlink(missing_ok=True)
    for _, channel in followers:
        channel.close()
    for process, _ in followers:
        # A rank that waits for this one in the middle of a layer does not read its channel.
        process.kill()
        process.wait()
