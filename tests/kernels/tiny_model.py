"""A Llama-shaped function written in Ops, for tests and benchmarks of the operations alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from alignedserve.kernels.kv_rows import to_rows
from alignedserve.kv.groups import LayerGroups
from alignedserve.ops.adapters import Delta, LayerAdapters
from alignedserve.ops.base import Activation, AttentionSpec, CompiledModel, Linear, Ops
from alignedserve.ops.experts import Expert, ExpertsSpec
from alignedserve.ops.step import StepInputs


@dataclass(frozen=True)
class Shape:
    hidden: int = 64
    intermediate: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 101
    max_position: int = 512
    sliding_window: int | None = None
    # Of each layer, if they differ.
    windows: tuple[int | None, ...] = ()
    qk_norm: bool = False
    # Logits of each head that take part in its softmax.
    sinks: bool = False
    rope: bool = True
    # How many of a head's values are rotated; None: all.
    rotary_dim: int | None = None
    # As in Gemma: what attention and MLP yield is normed with weights in float32, gates go through gelu, and embeddings
    # are scaled.
    post_norms: bool = False
    # 0: no mixture. Else each expert has `intermediate` inner columns, and a row goes through `top_k` of them.
    num_experts: int = 0
    top_k: int = 0
    # So many adapters of all linear layers but the head, of ranks 3, 4, ...
    num_adapters: int = 0

    @property
    def rotary(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


SHAPE_125M = Shape(768, 2048, 12, 12, 4, 64, 32000, 4096)


@dataclass
class LlamaLike:
    """Random weights that depend on the shape alone, so that two backends hold the same."""

    ops: Ops
    shape: Shape
    layers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        s, ops = self.shape, self.ops
        generator = torch.Generator().manual_seed(1)

        def random(*size: int, scale: float | None = None) -> torch.Tensor:
            return torch.randn(*size, generator=generator) * (scale or size[-1] ** -0.5)

        def adapted(weight: Linear, widths: tuple[int, ...], num_in: int) -> Linear:
            if not s.num_adapters:
                return weight
            deltas = [
                [Delta(random(rank, num_in), random(width, rank)) for width in widths]
                for rank in range(3, 3 + s.num_adapters)
            ]
            adapters = LayerAdapters(num_in, widths, deltas, [0.7] * s.num_adapters)
            return ops.with_adapters(weight, adapters)

        def norm_weight(width: int) -> torch.Tensor:
            return ops.parameter(1 + random(width, scale=0.1))

        self.table = ops.parameter(random(s.vocab, s.hidden, scale=1.0))
        rope = rope_table(s.max_position, s.rotary) if s.rope else None
        for i in range(s.num_layers):
            q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
            spec = AttentionSpec(
                layer=i,
                num_heads=s.num_heads,
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                scale=s.head_dim**-0.5,
                sliding_window=s.windows[i] if s.windows else s.sliding_window,
                rope=None if rope is None else rope.to(ops.device),
                q_norm=norm_weight(s.head_dim) if s.qk_norm else None,
                k_norm=norm_weight(s.head_dim) if s.qk_norm else None,
                outputs_only=i == s.num_layers - 1,
            )
            parts = [random(width, s.hidden, scale=2 * s.hidden**-0.5) for width in (q, kv, kv)]
            self.layers.append(
                {
                    "spec": spec,
                    "norm": norm_weight(s.hidden),
                    "qkv": adapted(
                        ops.linear_weight(parts, [random(p.shape[0], scale=0.1) for p in parts]),
                        (q, kv, kv),
                        s.hidden,
                    ),
                    "o": adapted(ops.linear_weight([random(s.hidden, q)]), (s.hidden,), q),
                    "norm2": norm_weight(s.hidden),
                    "post": ops.parameter(1 + random(s.hidden, scale=0.1), torch.float32)
                    if s.post_norms
                    else None,
                }
            )
            if s.num_experts:
                mixture = ExpertsSpec(s.num_experts, s.top_k, s.hidden, s.intermediate, normalises=True)
                self.layers[-1] |= {
                    "router": ops.linear_weight([random(s.num_experts, s.hidden)]),
                    "experts": ops.expert_weights(
                        mixture,
                        lambda _: Expert(
                            random(s.intermediate, s.hidden),
                            random(s.intermediate, s.hidden),
                            random(s.hidden, s.intermediate),
                        ),
                    ),
                }
                continue
            self.layers[-1] |= {
                "gate_up": adapted(
                    ops.linear_weight(
                        [random(s.intermediate, s.hidden) for _ in range(2)],
                        None,
                        Activation.GELU_TANH_GATED if s.post_norms else Activation.SILU_GATED,
                    ),
                    (s.intermediate, s.intermediate),
                    s.hidden,
                ),
                "down": adapted(
                    ops.linear_weight([random(s.hidden, s.intermediate)]), (s.hidden,), s.intermediate
                ),
            }
        self.norm = norm_weight(s.hidden)
        self.head = ops.linear_weight([random(s.vocab, s.hidden)])

    def forward(self, step: StepInputs) -> Any:
        ops = self.ops
        x = ops.embed(self.table, step.token_ids, scale=1.5 if self.shape.post_norms else 1.0)
        for layer in self.layers:
            qkv = ops.linear(ops.rms_norm(x, layer["norm"], 1e-5), layer["qkv"])
            if layer["spec"].outputs_only:
                x = ops.outputs(x)
            x = self.add(ops.attention(qkv, layer["spec"]), layer, "o", x)
            normed = ops.rms_norm(x, layer["norm2"], 1e-5)
            if self.shape.num_experts:
                x = ops.mix_experts(normed, ops.linear(normed, layer["router"]), layer["experts"], residual=x)
            else:
                x = self.add(ops.linear(normed, layer["gate_up"]), layer, "down", x)
        return x

    def add(self, x: Any, layer: dict[str, Any], name: str, residual: Any) -> Any:
        if not self.shape.post_norms:
            return self.ops.linear(x, layer[name], residual=residual)
        return self.ops.rms_norm(self.ops.linear(x, layer[name]), layer["post"], 1e-5, residual=residual)

    def logits(self, x: Any) -> Any:
        return self.ops.linear(self.ops.rms_norm(x, self.norm, 1e-5), self.head)

    def compile(
        self, step: StepInputs, cache: torch.Tensor, max_rows: int = 64, groups: LayerGroups | None = None
    ) -> CompiledModel:
        self.ops.bind_cache(cache, groups=groups)
        return self.ops.compile(self.forward, self.logits, step, max_rows)


def rope_table(max_position: int, rotary_dim: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.outer(torch.arange(max_position), frequency)
    return torch.cat([angle.cos(), angle.sin()], dim=1).contiguous()


def new_cache(
    shape: Shape, num_blocks: int, block_size: int, dtype: torch.dtype, fill: float = float("nan")
) -> torch.Tensor:
    """Memory that nobody has written yet may hold anything: NaN by default."""
    size = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
    return to_rows(torch.full(size, fill), dtype)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. start + len(ids)` of a sequence whose blocks are given."""

    ids: list[int]
    start: int
    blocks: list[int]
    # It fills its blocks from the last slot down.
    is_reversed: bool = False
    adapter: int = 0
    # Its blocks of all groups of layers but the first.
    other_groups: tuple[list[int], ...] = ()


def fill_step(
    step: StepInputs, chunks: list[Chunk], block_size: int, outputs: list[int] | None = None
) -> None:
    """`outputs`: of how many of each chunk's tokens, the last ones; of all by default."""
    token = num_outputs = 0
    for seq, chunk in enumerate(chunks):
        positions = torch.arange(chunk.start, chunk.start + len(chunk.ids))
        tokens = slice(token, token + len(chunk.ids))
        step.token_ids[tokens] = torch.tensor(chunk.ids, dtype=torch.int32)
        step.positions[tokens] = positions
        slots = positions % block_size
        slots = block_size - 1 - slots if chunk.is_reversed else slots
        for group, ids in enumerate([chunk.blocks, *chunk.other_groups]):
            blocks = torch.tensor(ids, dtype=torch.int32)
            step.slots[group, tokens] = blocks[positions // block_size] * block_size + slots
            step.block_table_of(group)[seq, : len(blocks)] = blocks
        step.is_reversed[seq] = chunk.is_reversed
        step.query_start[seq] = token
        step.context_len[seq] = chunk.start + len(chunk.ids)
        token = tokens.stop
        wanted = len(chunk.ids) if outputs is None else outputs[seq]
        step.outputs[num_outputs : num_outputs + wanted] = torch.arange(token - wanted, token)
        num_outputs += wanted
    step.query_start[len(chunks)] = token
    if step.adapters is not None and chunks:
        numbers = np.array([chunk.adapter for chunk in chunks])
        counts = np.array([len(chunk.ids) for chunk in chunks])
        step.adapters.fill(numbers, counts, step.host.outputs[:num_outputs])
    step.commit(token, len(chunks), num_outputs)
