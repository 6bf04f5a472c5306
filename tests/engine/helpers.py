"""Runs an instance with a tiny model until all its requests have ended, and checks that it is empty then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.engine.build import build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.engine.outputs import TokenOutput
from alignedserve.instance.direct import DirectEngine
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import ColocatedPart, DecodePart
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestId
from tests.tiny_models import MAX_LEN


def make_engine(directory: Path, **options: Any) -> Engine:
    building = {name: options.pop(name) for name in ("has_reversed", "allocate") if name in options}
    options = {"max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20, "use_tqdm": False, **options}
    return build_engine(EngineConfig(model=str(directory), **options), **building).engine


def make_direct(directory: Path, **options: Any) -> DirectEngine:
    return DirectEngine(make_engine(directory, **options))


def make_instance(directory: Path, policy: type[Policy] | None = None, **options: Any) -> LocalInstance:
    enable_prefix_caching = options.get("enable_prefix_caching", True)
    made = policy(SchedulingConfig()) if policy else None
    return LocalInstance(make_engine(directory, **options), made, enable_prefix_caching)


def greedy_params(max_tokens: int = 64, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)


def run(
    instance: LocalInstance | Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    adapters: Sequence[str] | None = None,
    pooling: str | None = None,
) -> list[list[TokenOutput]]:
    """Returns all outputs of each request, in the order of `prompts`. `adapters`: each request's adapter name, empty
    for none."""
    if isinstance(instance, Engine):
        instance = LocalInstance(instance)
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs: dict[RequestId, list[TokenOutput]] = {}
    names = adapters or [""] * len(prompts)
    for index, (prompt, wanted, adapter) in enumerate(zip(prompts, each, names, strict=True)):
        request_id = RequestId(f"r{index}")
        instance.add_request(request_id, prompt, wanted, wanted.seed or 0, pooling=pooling, adapter=adapter)
        outputs[request_id] = []
    while instance.num_unfinished:
        for event in instance.step():
            outputs[event.request_id].append(event)
    instance.check_idle()
    return list(outputs.values())


def tokens(outputs: list[list[TokenOutput]]) -> list[list[int]]:
    return [[event.token_id for event in events if event.token_id is not None] for events in outputs]


class EvictEveryStep(Fcfs):
    """Sends every running request's KV to host memory and back after each iteration."""

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return EvictAll(limits, self.config)


class EvictAll(ColocatedPart):
    def plan(self, at: DecodeBoundary) -> None:
        super().plan(at)
        at.evict(at.running)


__all__ = [
    "MAX_LEN",
    "EvictEveryStep",
    "greedy_params",
    "make_direct",
    "make_engine",
    "make_instance",
    "run",
    "tokens",
]
