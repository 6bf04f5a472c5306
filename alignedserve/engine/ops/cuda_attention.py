"""Attention of a step on a GPU: decodes by our own kernels over the paged cache, chunks by FlashAttention.

Decodes are the step's first sequences (`StepInputs.num_decodes`), chunks the rest. A chunk whose prompt began before
this step attends to KV gathered from its blocks.
"""

from __future__ import annotations

import torch

from alignedserve.engine.ops.base import AttentionSpec
from alignedserve.engine.ops.torch_attention import attend_sequence
from alignedserve.engine.step import StepInputs
from kernels.triton.decode_attention import (
    DecodeScratch,
    PagedStep,
    balanced_attention,
    decode_tuning,
    plain_attention,
)
from kernels.triton.gather_kv import gather_kv
from kernels.triton.rope_write import rope_write


class CudaAttention:
    def __init__(self, cache: torch.Tensor, step: StepInputs, decode_kernel: str) -> None:
        self._cache = cache
        self._step = step
        self._decode_kernel = decode_kernel
        self._scratch: dict[int, DecodeScratch] = {}
        self._plans: dict[tuple[int, int | None], torch.Tensor] = {}
        # plans that this step has made
        self._made: set[tuple[int, int | None]] = set()

    def begin(self) -> None:
        """A step begins."""
        self._made.clear()

    def __call__(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        step, num_tokens = self._step, len(qkv)
        has_decodes = step.num_decodes > 0
        if has_decodes and self._decode_kernel == "balanced":
            self._make_plan(spec)
        shape = (num_tokens, spec.num_kv_heads, spec.head_dim)
        k, v = (qkv.new_empty(shape), qkv.new_empty(shape)) if step.has_chunks else (None, None)
        q = rope_write(
            qkv,
            step.positions[:num_tokens],
            step.slots[:num_tokens],
            self._cache,
            spec.layer,
            spec.num_heads,
            rope=spec.rope,
            q_norm=spec.q_norm,
            k_norm=spec.k_norm,
            eps=spec.norm_eps,
            k_out=k,
            v_out=v,
        )
        out = torch.empty_like(q)
        if has_decodes:
            self._decode(q, spec, out)
        if k is not None and v is not None:
            self._chunks(q, k, v, spec, out)
        return out.flatten(1)

    def _paged_step(self) -> PagedStep:
        step = self._step
        return PagedStep(
            query_start=step.query_start,
            context_len=step.context_len,
            block_table=step.flat_block_table,
            table_stride=step.table_stride,
            num_seqs=step.num_decodes if step.has_chunks else step.num_rows,
        )

    def _scratch_for(self, spec: AttentionSpec) -> DecodeScratch:
        if spec.num_heads not in self._scratch:
            device = self._cache.device
            num_sms = (
                torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
            )
            tuning = decode_tuning(
                spec.num_heads // spec.num_kv_heads, spec.head_dim, self._cache.element_size()
            )
            self._scratch[spec.num_heads] = DecodeScratch(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, self._step.max_seqs, num_sms, device, tuning
            )
        return self._scratch[spec.num_heads]

    def _make_plan(self, spec: AttentionSpec) -> None:
        key = (spec.num_heads, spec.sliding_window)
        if key in self._made:
            return
        scratch = self._scratch_for(spec)
        if key not in self._plans:
            self._plans[key] = scratch.new_plan()
        scratch.make_plan(self._plans[key], self._paged_step(), spec.num_kv_heads, spec.sliding_window)
        self._made.add(key)

    def _decode(self, q: torch.Tensor, spec: AttentionSpec, out: torch.Tensor) -> None:
        layer, step = self._cache[:, spec.layer], self._paged_step()
        scratch, window = self._scratch_for(spec), spec.sliding_window
        if self._decode_kernel == "balanced":
            plan = self._plans[spec.num_heads, window]
            balanced_attention(q, layer, step, plan, scratch, spec.scale, window, out)
        else:
            plain_attention(q, layer, step, spec.scale, window, out, scratch.tuning)

    def _chunks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, out: torch.Tensor
    ) -> None:
        step = self._step
        if not q.is_cuda or q.dtype == torch.float32:
            self._chunks_plainly(q, spec, out)
            return
        from torch.nn.attention.varlen import varlen_attn

        first, num_chunks = step.num_decodes, step.num_seqs - step.num_decodes
        lengths = step.host.query_start[first : step.num_seqs + 1]
        contexts = step.host.context_len[first : step.num_seqs]
        query_start = step.query_start[first : step.num_seqs + 1] - first
        is_fresh = bool((contexts == lengths[1:] - lengths[:-1]).all())
        if is_fresh:
            k, v, context_start = k[first:], v[first:], query_start
        else:
            context_start = step.context_start[: num_chunks + 1]
            k, v = self._gather(spec, context_start, int(contexts.max()))
        window = (-1 if spec.sliding_window is None else spec.sliding_window - 1, 0)
        attended = varlen_attn(
            q[first:],
            k,
            v,
            query_start,
            context_start,
            int((lengths[1:] - lengths[:-1]).max()),
            int(contexts.max()),
            scale=spec.scale,
            window_size=window,
        )
        assert isinstance(attended, torch.Tensor)
        out[first:] = attended

    def _gather(
        self, spec: AttentionSpec, context_start: torch.Tensor, max_context: int
    ) -> list[torch.Tensor]:
        step, first = self._step, self._step.num_decodes
        shape = (step.num_chunk_context, spec.num_kv_heads, spec.head_dim)
        kv = [self._cache.new_empty(shape) for _ in range(2)]
        table = step.block_table[first : step.num_seqs]
        gather_kv(self._cache, spec.layer, table, context_start, max_context, *kv)
        return kv

    def _chunks_plainly(self, q: torch.Tensor, spec: AttentionSpec, out: torch.Tensor) -> None:
        """Where FlashAttention can't: in float32, and in the interpreter."""
        for seq in range(self._step.num_decodes, self._step.num_seqs):
            attend_sequence(q, self._cache, self._step, seq, spec, out)
