"""The papers' machines, as far as a profile is published: OPT-13B and OPT-66B on A100, by DistServe's fits.

Memory is that of the paper's machine, since it decides how many requests can run at once. The cost per token is that of
an A100 80 GB, even if the paper used another device. Only AccelGen's machine is slower, as measured there.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import Scenario
from alignedserve.timing.cost import CostModel, LinearCost
from alignedserve.timing.cost_presets import load_cost_model

# Without deadlines: no policy hurries, and nothing is judged.
NEVER = Objectives(inf, inf)
ONE_GPU, TWO_GPUS, LARGE_MODEL = "opt-13b/a100-80gb", "opt-13b/a100-80gb-tp2", "opt-66b/a100-80gb-tp4"
FITS = "DistServe's published fits of OPT-13B on A100"
# Bytes of the weights, and the share of GPU memory that vLLM uses by default.
_WEIGHTS, _USED = {ONE_GPU: 26e9, TWO_GPUS: 26e9, LARGE_MODEL: 132e9}, 0.9


def with_memory(name: str, num_gpus: int, gpu_bytes: float) -> CostModel:
    """Returns a cost model in which KV fills the memory that weights leave on `num_gpus` GPUs."""
    cost = load_cost_model(name)
    kv_bytes = _USED * num_gpus * gpu_bytes - _WEIGHTS[name]
    return replace(cost, num_kv_tokens=int(kv_bytes / cost.kv_bytes_per_token))


def with_kv(name: str, kv_bytes: float) -> CostModel:
    cost = load_cost_model(name)
    return replace(cost, num_kv_tokens=int(kv_bytes / cost.kv_bytes_per_token))


def slower(cost: CostModel, times: float) -> CostModel:
    """Returns the model of a device on which every iteration takes `times` as long."""
    lines = [LinearCost(line.fixed_s * times, line.token_s * times) for line in cost.decode_lines]
    return replace(
        cost,
        prefill_fixed_s=cost.prefill_fixed_s * times,
        prefill_token_s=cost.prefill_token_s * times,
        prefill_attention_s=cost.prefill_attention_s * times,
        decode_attention_s=cost.decode_attention_s * times,
        decode_lines=lines,
    )


def colocated(
    cost: CostModel, slo: Objectives = NEVER, num_instances: int = 1, max_model_len: int = 4096
) -> Scenario:
    """Has vLLM's structure: instances that compute prompts and decode."""
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


def scheduling(policy: str, prefill_window: int = 2, **knobs: float | str) -> SchedulingConfig:
    return SchedulingConfig(policy=policy, prefill_window=prefill_window, **knobs)  # type: ignore[arg-type]
