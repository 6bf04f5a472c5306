"""The papers' machines, as far as there is a published profile: OPT-13B on A100, by DistServe's fits.

Memory is that of the paper's machine, since it decides how many requests run at once. What a token costs stays that of
an A100 80 GB where the paper has another device.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.report import Slo
from alignedserve.sim.scenario import Scenario
from alignedserve.timing.cost import CostModel
from alignedserve.timing.cost_presets import load_cost_model

# Nothing is due: no policy hurries, and nothing is judged.
NEVER = Slo(inf, inf)
ONE_GPU, TWO_GPUS = "opt-13b/a100-80gb", "opt-13b/a100-80gb-tp2"
FITS = "DistServe's published fits of OPT-13B on A100"
# Bytes: weights of OPT-13B, and the share of a GPU's memory that vLLM uses by default.
_WEIGHTS, _USED = 26e9, 0.9


def with_memory(name: str, num_gpus: int, gpu_bytes: float) -> CostModel:
    """A cost model whose KV fills what weights leave of so many GPUs."""
    cost = load_cost_model(name)
    kv_bytes = _USED * num_gpus * gpu_bytes - _WEIGHTS
    return replace(cost, num_kv_tokens=int(kv_bytes / cost.kv_bytes_per_token))


def with_kv(name: str, kv_bytes: float) -> CostModel:
    cost = load_cost_model(name)
    return replace(cost, num_kv_tokens=int(kv_bytes / cost.kv_bytes_per_token))


def colocated(
    cost: CostModel, slo: Slo = NEVER, num_instances: int = 1, max_model_len: int = 4096
) -> Scenario:
    """vLLM's shape: instances that compute prompts and decode."""
    return Scenario(
        cost,
        num_colocated=num_instances,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=min(max_model_len, cost.num_kv_tokens // 16 * 16),
        pool_bytes=1e12,
        slo=slo,
        is_checked=False,
    )


def scheduling(policy: str, prefill_window: int = 2, **knobs: float) -> SchedulingConfig:
    return SchedulingConfig(policy=policy, prefill_window=prefill_window, **knobs)  # type: ignore[arg-type]
