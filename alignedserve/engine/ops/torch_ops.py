"""Plain torch, on any device, one operation at a time: the reference that every other backend is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from alignedserve.engine.ops.base import Activation, AttentionSpec, CompiledModel, Ops
from alignedserve.engine.step import StepInputs
from kernels.cpu.sampling import gumbel_argmax_torch


@dataclass(frozen=True)
class TorchLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Activation


class TorchOps(Ops):
    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._cache: torch.Tensor
        self._step: StepInputs

    def linear_weight(
        self,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
    ) -> TorchLinear:
        weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        bias = torch.cat(list(biases)) if biases else None
        return TorchLinear(self.parameter(weight), None if bias is None else self.parameter(bias), activation)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype, copy=True)

    def bind_cache(self, cache: torch.Tensor) -> None:
        self._cache = cache

    def embed(
        self, table: torch.Tensor, ids: torch.Tensor, offset: int = 0, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        found = table[ids[: self._step.num_tokens] + offset]
        return found if add_to is None else found + add_to

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms_norm(x, weight, eps)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def linear(self, x: torch.Tensor, weight: TorchLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = _ACTIVATIONS[weight.activation](F.linear(x, weight.weight, weight.bias))
        return out if residual is None else out + residual

    def attention(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        q, k, v = _split_heads(qkv, spec)
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = _rms_norm(q, spec.q_norm, spec.norm_eps), _rms_norm(k, spec.k_norm, spec.norm_eps)
        if spec.rope is not None:
            angles = spec.rope[self._step.positions[: len(qkv)]]
            q, k = _rotate(q, angles), _rotate(k, angles)
        self._write(k, v, spec.layer)
        out = torch.empty_like(q)
        bounds = self._step.query_start[: self._step.num_seqs + 1].tolist()
        for index, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            out[start:end] = self._attend(q[start:end], index, spec)
        return out.flatten(1)

    def _write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        slots = self._step.slots[: len(k)]
        block_size = self._cache.shape[3]
        block, offset = slots // block_size, slots % block_size
        self._cache[block, layer, 0, offset] = k.to(self._cache.dtype)
        self._cache[block, layer, 1, offset] = v.to(self._cache.dtype)

    def _attend(self, q: torch.Tensor, index: int, spec: AttentionSpec) -> torch.Tensor:
        """One sequence: its last len(q) tokens against all of its keys, in float32."""
        context_len = int(self._step.context_len[index])
        num_blocks = -(-context_len // self._cache.shape[3])
        blocks = self._cache[self._step.block_table[index, :num_blocks], spec.layer]
        k, v = blocks.transpose(0, 1).flatten(1, 2)[:, :context_len].float()
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
        scores.masked_fill_(_hidden(len(q), context_len, spec.sliding_window, q.device), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).to(q.dtype)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = logits.max(dim=-1)
        return best.indices, best.values.isnan() | (best.values == float("inf"))

    def gumbel_argmax(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return gumbel_argmax_torch(logits, keys.to(logits.device))

    def compile(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        step: StepInputs,
        max_rows: int,
    ) -> CompiledModel:
        self._step = step
        return EagerModel(forward, logits, step)


class EagerModel(CompiledModel):
    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        step: StepInputs,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._step = step
        self._hidden: torch.Tensor

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        self._hidden = self._forward(self._step)
        return self._hidden

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._logits(self._hidden[rows]).float()


def _silu_gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.SILU_GATED: _silu_gated,
}


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def _split_heads(qkv: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = qkv.view(len(qkv), -1, spec.head_dim)
    sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = torch.split(heads, sizes, dim=1)
    return q, k, v


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Hugging Face's convention: the head's halves are the two coordinates."""
    cos, sin = angles[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _hidden(num_queries: int, context_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys]: keys after the query, or before its window."""
    keys = torch.arange(context_len, device=device)
    queries = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    hidden = keys > queries
    return hidden if window is None else hidden | (keys <= queries - window)
