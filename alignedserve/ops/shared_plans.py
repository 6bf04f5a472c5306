"""Which keys the decoding sequences of a step have in common, on a GPU (kernels/triton/shared_plan.py).

Block tables are on the host when a step is committed, so the plans are made there. They are sent with the step's
inputs, also within CUDA graphs. A layer asks for its plan when it is first called, so the first step of all shares
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.kernels.triton.shared_attention import Shared, SharedScratch, shared_tuning
from alignedserve.kernels.triton.shared_plan import SharedForm, SharedPlan
from alignedserve.ops.base import AttentionSpec
from alignedserve.ops.step import StepInputs


@dataclass(frozen=True)
class _Key:
    num_heads: int
    window: int | None
    # The layer group.
    group: int


class SharedPlans:
    def __init__(self, cache: torch.Tensor, max_seqs: int, num_sms: int) -> None:
        self._cache, self._max_seqs, self._num_sms = cache, max_seqs, num_sms
        self._scratch: dict[int, SharedScratch] = {}
        self._plans: dict[_Key, SharedPlan] = {}

    def of_layer(self, spec: AttentionSpec, group: int, element_bytes: int) -> Shared | None:
        """Returns None if the heads of two sequences don't fit into a program. `element_bytes`: see
        `shared_tuning`."""
        tuning = shared_tuning(spec.head_dim, element_bytes)
        _, _, _, num_kv_heads, block_size, row = self._cache.shape
        form = SharedForm(
            num_kv_heads,
            tuning.rows,
            spec.num_heads // num_kv_heads,
            block_size,
            tuning.tile,
            spec.sliding_window,
            token_bytes=2 * num_kv_heads * row * self._cache.element_size(),
        )
        if form.max_rows < 2:
            return None
        device = self._cache.device
        if spec.num_heads not in self._scratch:
            self._scratch[spec.num_heads] = SharedScratch(
                spec.num_heads, spec.head_dim, self._max_seqs, self._num_sms, device, tuning
            )
        scratch, key = self._scratch[spec.num_heads], _Key(spec.num_heads, spec.sliding_window, group)
        if key not in self._plans:
            self._plans[key] = SharedPlan(form, self._max_seqs, scratch.num_programs, device)
        return Shared(self._plans[key], scratch)

    def fill(self, step: StepInputs, num_decodes: int) -> None:
        """Makes the plans of a step. Its first `num_decodes` sequences decode."""
        for key, plan in self._plans.items():
            plan.fill(step.host_struct(key.group, num_decodes))

    def clear(self) -> None:
        for plan in self._plans.values():
            plan.clear()

    def upload(self) -> None:
        """Sends the plans to the device, on the current stream."""
        for plan in self._plans.values():
            plan.upload()
