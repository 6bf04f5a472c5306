"""An engine on a tiny model, driven to the end of all its requests, and checked to be empty then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.config import EngineConfig
from alignedserve.engine.build import build_engine
from alignedserve.engine.engine import Engine
from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.policy import FcfsPolicy, IterationPolicy, Plan, Queues
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from tests.tiny_models import MAX_LEN


def make_engine(directory: Path, policy: type[IterationPolicy] = FcfsPolicy, **options: Any) -> Engine:
    options = {"max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20, "use_tqdm": False, **options}
    return build_engine(EngineConfig(model=str(directory), **options), policy).engine


def greedy_params(max_tokens: int = 64, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[TokenOutput]]:
    """All of each request's outputs, in the order of `prompts`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs: dict[RequestId, list[TokenOutput]] = {}
    for index, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
        request_id = RequestId(f"r{index}")
        engine.add_request(request_id, prompt, wanted, wanted.seed or 0)
        outputs[request_id] = []
    while engine.num_unfinished:
        for event in engine.step():
            outputs[event.request_id].append(event)
    engine.check_idle()
    return list(outputs.values())


def tokens(outputs: list[list[TokenOutput]]) -> list[list[int]]:
    return [[event.token_id for event in events if event.token_id is not None] for events in outputs]


class EvictEveryStep(FcfsPolicy):
    """Sends every running request's KV to host memory and back before each iteration."""

    name = "evict-every-step"

    def plan(self, queues: Queues, num_free_blocks: int) -> Plan:
        plan = super().plan(queues, num_free_blocks)
        plan.evict = list(queues.running)
        plan.resume = plan.evict + plan.resume
        return plan


__all__ = ["MAX_LEN", "EvictEveryStep", "greedy_params", "make_engine", "run", "tokens"]
