"""Attention of a step on a GPU: our own kernels over the paged cache for decodes, FlashAttention for chunks.

Decodes are the step's first sequences, chunks the rest. A chunk attends to KV gathered from its blocks, its own
included. Everything that differs between steps of one shape (`ops/step_shape.py`) is read on the GPU, so that the whole
step can be captured.
"""

from __future__ import annotations

import numpy as np
import torch

from alignedserve.kernels.kv_rows import is_coded
from alignedserve.kernels.triton.decode_attention import (
    DecodeScratch,
    balanced_attention,
    decode_tuning,
    plain_attention,
)
from alignedserve.kernels.triton.gather_kv import gather_kv
from alignedserve.kernels.triton.paged_attention import PagedStep
from alignedserve.kernels.triton.rope_write import rope_write
from alignedserve.kernels.triton.shared_attention import Shared
from alignedserve.kv.groups import GroupedLayer, LayerGroups, one_group
from alignedserve.ops.base import AttentionSpec, Projected, place_of
from alignedserve.ops.cuda_inputs import (
    Part,
    chunks_plainly,
    decode_part,
    gather_part,
    parts_of,
    write_part,
)
from alignedserve.ops.cuda_linear import plain
from alignedserve.ops.kept_inputs import KeptInputs
from alignedserve.ops.shared_plans import SharedPlans
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_attention import attend_sequence
from alignedserve.ops.torch_inputs import restore


class CudaAttention:
    def __init__(
        self, cache: torch.Tensor, step: StepInputs, decode_kernel: str, groups: LayerGroups | None = None
    ) -> None:
        self._cache = cache
        self._groups = groups or one_group(cache.shape[1])
        self._step = step
        self._is_balanced = decode_kernel != "plain"
        device = cache.device
        self._num_sms = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )
        self._shared_plans: SharedPlans | None = None
        if decode_kernel == "shared":
            step.shared_plans = self._shared_plans = SharedPlans(cache, step.max_seqs, self._num_sms)
        self._scratch: dict[int, DecodeScratch] = {}
        self._plans: dict[tuple[int, int | None, int], torch.Tensor] = {}
        # Plans that were made in this step.
        self._made: set[tuple[int, int | None, int]] = set()

    def begin(self) -> None:
        """Begins a step."""
        self._made.clear()

    def __call__(
        self, qkv: torch.Tensor, spec: AttentionSpec, projected: Projected | None = None
    ) -> torch.Tensor:
        step, shape = self._step, self._step.shape
        if step.kept_inputs is not None and step.keeps_inputs:
            restore(step, self._cache, spec, projected, plain)
            return self._with_inputs(qkv, spec, step.kept_inputs)
        place = place_of(spec.layer, self._groups, step)
        has_decodes = shape.num_decodes > 0
        if has_decodes and self._is_balanced:
            self._make_plan(spec, place.group, qkv.element_size())
        q = rope_write(
            qkv,
            step.positions[: len(qkv)],
            step.slots[place.group, : len(qkv)],
            self._cache,
            place.index,
            spec.num_heads,
            rope=spec.rope,
            q_norm=spec.q_norm,
            k_norm=spec.k_norm,
            eps=spec.norm_eps,
        )
        out = self._chunks(q, spec, place) if shape.num_chunks else torch.empty_like(q)
        if has_decodes:
            self._decode(q, spec, place, out)
        return out.flatten(1)

    def _with_inputs(self, qkv: torch.Tensor, spec: AttentionSpec, kept: KeptInputs) -> torch.Tensor:
        """Attends in a step with kept inputs. The KV of their sequences has been restored."""
        step = self._step
        parts = parts_of(step, kept, self._cache, spec.layer)
        of_cache, of_restored = (write_part(qkv, step, spec, part) for part in parts)
        q = torch.where((parts[1].slots < 0)[:, None, None], of_cache, of_restored)
        out = torch.empty_like(q)
        for part in parts:
            decode_part(q, step, spec, part, out)
            if not part.chunks:
                continue
            if has_flash_attention(q.device, q.dtype):
                self._chunks_of(q, spec, part, out)
            else:
                chunks_plainly(q, step, spec, part, out)
        return out.flatten(1)

    def _chunks_of(self, q: torch.Tensor, spec: AttentionSpec, part: Part, out: torch.Tensor) -> None:
        step = self._step
        k, v, context_start = gather_part(step, spec, part)
        starts = step.host.query_start[part.chunks.start : part.chunks.stop + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        found, sums = flash_attention(
            q[tokens],
            k,
            v,
            step.query_start[part.chunks.start : part.chunks.stop + 1] - int(starts[0]),
            context_start,
            int(np.diff(starts).max()),
            int(step.host.context_len[part.chunks.start : part.chunks.stop].max()),
            spec.scale,
            spec.sliding_window,
        )
        out[tokens] = with_sinks(found, sums, spec.sinks)

    def _paged_step(self, group: int = 0) -> PagedStep:
        step = self._step
        return PagedStep(
            query_start=step.query_start,
            context_len=step.context_len,
            block_table=step.flat_block_table,
            table_stride=step.table_stride,
            num_seqs=step.shape.num_decodes,
            is_reversed=step.is_reversed if step.has_reversed else None,
            group=group,
            num_groups=step.num_groups,
        )

    def _scratch_for(self, spec: AttentionSpec, element_bytes: int) -> DecodeScratch:
        """`element_bytes`: bytes per value of q."""
        if spec.num_heads not in self._scratch:
            heads_per_kv = spec.num_heads // spec.num_kv_heads
            is_shared = self._shared_plans is not None
            tuning = decode_tuning(
                heads_per_kv, spec.head_dim, element_bytes, is_coded(self._cache), is_shared
            )
            self._scratch[spec.num_heads] = DecodeScratch(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                self._step.max_seqs,
                self._num_sms,
                self._cache.device,
                tuning,
            )
        return self._scratch[spec.num_heads]

    def _shared(self, spec: AttentionSpec, group: int, element_bytes: int) -> Shared | None:
        plans = self._shared_plans
        return plans.of_layer(spec, group, element_bytes) if plans else None

    def _key(self, spec: AttentionSpec, group: int) -> tuple[int, int | None, int]:
        """Groups of layers differ only in their blocks, and so in what sequences have in common."""
        return spec.num_heads, spec.sliding_window, group if self._shared_plans else 0

    def _make_plan(self, spec: AttentionSpec, group: int, element_bytes: int) -> None:
        key = self._key(spec, group)
        if key in self._made:
            return
        scratch, shared = self._scratch_for(spec, element_bytes), self._shared(spec, group, element_bytes)
        if key not in self._plans:
            self._plans[key] = scratch.new_plan()
        step, window = self._paged_step(group), spec.sliding_window
        scratch.make_plan(self._plans[key], step, spec.num_kv_heads, window, shared)
        self._made.add(key)

    def _decode(self, q: torch.Tensor, spec: AttentionSpec, place: GroupedLayer, out: torch.Tensor) -> None:
        layer, step = self._cache[:, place.index], self._paged_step(place.group)
        scratch, window = self._scratch_for(spec, q.element_size()), spec.sliding_window
        if self._is_balanced:
            plan = self._plans[self._key(spec, place.group)]
            shared = self._shared(spec, place.group, q.element_size())
            balanced_attention(q, layer, step, plan, scratch, spec.scale, window, out, spec.sinks, shared)
        else:
            plain_attention(q, layer, step, spec.scale, window, out, scratch.tuning, spec.sinks)

    def _chunks(self, q: torch.Tensor, spec: AttentionSpec, place: GroupedLayer) -> torch.Tensor:
        """Returns the chunks' rows. Rows of other tokens in the result are undefined."""
        if not has_flash_attention(q.device, q.dtype):
            return self._chunks_plainly(q, spec, place)
        step, shape = self._step, self._step.shape
        context_start = step.context_start[: shape.num_chunks + 1]
        kv_shape = (shape.num_context_tokens, spec.num_kv_heads, spec.head_dim)
        k, v = q.new_empty(kv_shape), q.new_empty(kv_shape)
        gather_kv(
            self._cache,
            place.index,
            step.flat_block_table,
            step.table_stride,
            step.first_chunk,
            context_start,
            k,
            v,
            step.is_reversed if step.has_reversed else None,
            place.group,
            step.num_groups,
        )
        out, sums = flash_attention(
            q,
            k,
            v,
            step.chunk_start[: shape.num_chunks + 1],
            context_start,
            shape.max_chunk_len,
            shape.max_context_len,
            spec.scale,
            spec.sliding_window,
        )
        return with_sinks(out, sums, spec.sinks)

    def _chunks_plainly(self, q: torch.Tensor, spec: AttentionSpec, place: GroupedLayer) -> torch.Tensor:
        out = torch.empty_like(q)
        for seq in range(int(self._step.host.first_chunk[0]), self._step.num_seqs):
            attend_sequence(q, self._cache, place, self._step, seq, spec, out)
        return out


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention is available. It supports neither float32 nor Triton's interpreter."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    context_start: torch.Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention for queries that are the last tokens of their sequence's context.

    It never waits, so it can be captured. Also returns the logarithms of the sums of exponentials, float32 [heads,
    tokens]. `torch.nn.attention.varlen` calls the same operation, but its arguments change with every version of torch.
    """
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        query_start,
        context_start,
        max_query,
        max_context,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    return out, sums


def with_sinks(out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns the result of attention with sinks, from the result of `flash_attention`."""
    if sinks is None:
        return out
    share = torch.sigmoid(sums.T - sinks.float())
    return (out * share.unsqueeze(2)).to(out.dtype)
