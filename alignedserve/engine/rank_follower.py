"""A rank that follows: it computes what the leading rank orders, and has no requests."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignedserve.engine.build import LoadedModel, load_model, new_step
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.gpu_memory import kv_bytes
from alignedserve.engine.kv_cache import new_blocks
from alignedserve.engine.ranks import memory
from alignedserve.engine.ranks.channel import ChannelClosed, Kind, RankChannel
from alignedserve.engine.ranks.watch import beat
from alignedserve.ops.base import CompiledModel
from alignedserve.ops.ranks import RankGroup
from alignedserve.ops.shard import Shard
from alignedserve.ops.step import StepInputs


def main() -> None:
    # A terminal's interrupt reaches all processes. The leading rank decides how to react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        follow(channel)
    except ChannelClosed:
        # The leading rank has ended, or needs this one no longer.
        return


def follow(channel: RankChannel) -> None:
    start = json.loads(channel.expect(Kind.START))
    try:
        config, ranks = EngineConfig(**start["config"]), _ranks(start)
        beater = threading.Thread(
            target=beat, args=[ranks.shared, ranks.shard.rank, start["leader"]], daemon=True
        )
        beater.start()
        torch.set_num_threads(ranks.num_threads)
        if start["is_on_gpu"]:
            # From here on "cuda" means this rank's GPU. The GPUs visible to this process are numbered by rank.
            torch.cuda.set_device(ranks.shard.rank)
        loaded = load_model(config, start["has_reversed"], ranks)
    except (ValueError, OSError) as error:
        channel.send(Kind.FAILED, str(error).encode())
        return
    channel.send(Kind.LOADED)
    step, max_seqs = new_step(config, loaded)
    blocks = new_blocks(
        loaded.form, _num_blocks(channel, config, loaded, step), loaded.ops.device, memory.empty
    )
    loaded.ops.bind_cache(blocks, groups=loaded.groups)
    compiled = loaded.ops.compile(loaded.model.forward, loaded.model.logits, step, max_rows=max_seqs)
    channel.send_json(Kind.READY, memory.describe(blocks))
    _compute(channel, step, compiled)


def _ranks(start: dict[str, Any]) -> RankGroup:
    shard = Shard(start["rank"], start["config"]["tensor_parallel_size"])
    shared = memory.attach(start["shared"])
    return RankGroup(shard, Path(start["store_file"]), shared, start["slot_values"], start["num_threads"])


def _num_blocks(channel: RankChannel, config: EngineConfig, loaded: LoadedModel, step: StepInputs) -> int:
    """Returns the number of blocks, from the leading rank's CACHE message. Answers MEASURE, which may come before
    it."""
    kind, data = channel.receive()
    if kind is Kind.MEASURE:
        room = kv_bytes(
            loaded.model, loaded.ops, loaded.form, loaded.groups, step, config.gpu_memory_utilization
        )
        channel.send(Kind.MEASURED, str(room).encode())
        data = channel.expect(Kind.CACHE)
    elif kind is not Kind.CACHE:
        raise RuntimeError(f"the leading rank sent {kind.name}, not {Kind.CACHE.name}")
    return int(json.loads(data)["num_blocks"])


def _compute(channel: RankChannel, step: StepInputs, model: CompiledModel) -> None:
    while True:
        kind, data = channel.receive()
        if kind is Kind.FORWARD:
            step.unpack(data)
            model.forward()
        elif kind is Kind.LOGITS:
            model.logits(torch.from_numpy(np.frombuffer(data, dtype=np.int32).copy()))
        else:
            raise RuntimeError(f"the leading rank sent {kind.name}, which is no order")


if __name__ == "__main__":
    main()
