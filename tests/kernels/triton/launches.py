"""One launch of every kernel in every way it is used, on tensors without memory: what is compiled ahead of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from alignedserve.kernels.kv_rows import FP8, INT8, SCALE_BYTES, is_coded
from alignedserve.kernels.triton.coded_weight import FP8 as FP8_WEIGHT
from alignedserve.kernels.triton.coded_weight import INT4, MXFP4, PACKED, CodedWeight, dequantise
from alignedserve.kernels.triton.coded_weight import INT8 as INT8_WEIGHT
from alignedserve.kernels.triton.decode_attention import (
    DecodeScratch,
    balanced_attention,
    decode_tuning,
    plain_attention,
)
from alignedserve.kernels.triton.experts import mix_experts
from alignedserve.kernels.triton.gated_mul import gated_mul
from alignedserve.kernels.triton.gather_kv import gather_kv
from alignedserve.kernels.triton.gemv import coded_gemv_tuning, gemv, gemv_tuning
from alignedserve.kernels.triton.layer_norm import layer_norm
from alignedserve.kernels.triton.paged_attention import PagedStep
from alignedserve.kernels.triton.rms_norm import rms_norm
from alignedserve.kernels.triton.rope_write import rope_write
from alignedserve.kernels.triton.sampling import argmax, gumbel_argmax, sample
from alignedserve.kernels.triton.shared_attention import Shared, SharedScratch, shared_tuning
from alignedserve.kernels.triton.shared_plan import SharedForm, SharedPlan
from alignedserve.kernels.triton.skinny_linear import (
    SkinnyScratch,
    coded_skinny_tuning,
    skinny_linear,
    skinny_tuning,
)
from alignedserve.kernels.triton.truncate import truncate

CODINGS = {"fp8": FP8, "int8": INT8}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def meta(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def cache_of(*size: int, dtype: torch.dtype, coding: str = "") -> torch.Tensor:
    """`coding`: a key of CODINGS, or nothing."""
    if coding == "int8":
        return meta(*size[:-1], size[-1] + SCALE_BYTES, dtype=torch.int8)
    return meta(*size, dtype=CODINGS.get(coding, dtype))


def rope_launch(
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    has_norm: bool,
    rotary_dim: int | None = None,
    coding: str = "",
) -> None:
    weight = meta(head_dim, dtype=dtype) if has_norm else None
    rope_write(
        meta(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
        meta(tokens, dtype=torch.int32),
        meta(tokens, dtype=torch.int32),
        cache_of(1000, 32, 2, kv_heads, 16, head_dim, dtype=dtype, coding=coding),
        layer=3,
        num_heads=heads,
        rope=meta(4096, rotary_dim or head_dim, dtype=torch.float32),
        q_norm=weight,
        k_norm=weight,
    )


def norm_launches(dtype: torch.dtype, width: int) -> dict[str, Callable[[], Any]]:
    x, weight = meta(32, width, dtype=dtype), meta(width, dtype=dtype)
    return {
        f"rms_norm {width}": partial(rms_norm, x, weight, 1e-5),
        f"rms_norm wide weight {width}": partial(rms_norm, x, weight.float(), 1e-5, out=x, residual=x),
        f"layer_norm {width}": partial(layer_norm, x, weight, weight, 1e-5),
        f"layer_norm plain {width}": partial(layer_norm, x, None, None, 1e-5),
    }


def rope_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    launches: dict[str, Callable[[], Any]] = {
        f"rope_write decode {head_dim}": partial(rope_launch, dtype, 32, 32, 8, head_dim, has_norm=False)
        for head_dim in (64, 80, 96, 128)
    }
    launches["rope_write decode 96 of 128"] = partial(
        rope_launch, dtype, 32, 24, 8, 128, has_norm=False, rotary_dim=96
    )
    launches["rope_write decode 256 normed"] = partial(rope_launch, dtype, 32, 8, 4, 256, has_norm=True)
    launches["rope_write prefill 256 normed"] = partial(rope_launch, dtype, 2048, 8, 4, 256, has_norm=True)
    launches["rope_write prefill 128 normed"] = partial(rope_launch, dtype, 2048, 40, 8, 128, has_norm=True)
    return launches


def move_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    cache, ids = meta(1000, 32, 2, 8, 16, 128, dtype=dtype), meta(7, dtype=torch.int32)
    context = meta(9000, 8, 128, dtype=dtype)
    odd_cache, odd_context = meta(1000, 32, 2, 8, 16, 80, dtype=dtype), meta(9000, 8, 80, dtype=dtype)
    table, one = meta(6 * 256, dtype=torch.int32), meta(1, dtype=torch.int32)
    return {
        "gather_kv 128": partial(gather_kv, cache, 3, table, one, one, ids, context, context),
        "gather_kv 80": partial(gather_kv, odd_cache, 3, table, one, one, ids, odd_context, odd_context),
        "gather_kv of a group": partial(
            gather_kv, cache, 3, table, one, one, ids, context, context, group=1, num_groups=2
        ),
        "gather_kv reversed": partial(gather_kv, cache, 3, table, one, one, ids, context, context, ids),
    }


def launches_in(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    return {
        **rope_launches(dtype),
        **move_launches(dtype),
        **attention_launches(dtype),
        **few_row_launches(dtype),
        **coded_weight_launches(dtype),
        **expert_launches(dtype),
        **coded_expert_launches(dtype),
        **norm_launches(dtype, 4096),
        **norm_launches(dtype, 5120),
        **coded_launches(dtype),
        "silu_mul": partial(gated_mul, meta(32, 2 * 14336, dtype=dtype)),
        "gelu_mul": partial(gated_mul, meta(32, 2 * 10240, dtype=dtype), gelu=True),
    }


def attention_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    launches: dict[str, Callable[[], Any]] = {}
    for heads, kv_heads, head_dim, window in (
        (32, 8, 128, None),
        (40, 40, 128, None),
        (32, 32, 80, 100),
        (8, 4, 256, 1024),
    ):
        q, cache = meta(32, heads, head_dim, dtype=dtype), meta(999, 2, kv_heads, 16, head_dim, dtype=dtype)
        ints = meta(33, dtype=torch.int32)
        step = PagedStep(ints, ints, meta(9999, dtype=torch.int32), ints, 32)
        tuning = decode_tuning(heads // kv_heads, head_dim, q.element_size())
        scratch = DecodeScratch(heads, kv_heads, head_dim, 32, 132, torch.device("meta"), tuning)
        plan = scratch.new_plan()
        name = f"{heads} {kv_heads} {head_dim}"
        launches[f"make_plan {name}"] = partial(scratch.make_plan, plan, step, kv_heads, window)
        launches[f"balanced {name}"] = partial(
            balanced_attention, q, cache, step, plan, scratch, 0.1, window, q
        )
        launches[f"plain {name}"] = partial(plain_attention, q, cache, step, 0.1, window, q, tuning)
        # 40 heads of 128 without groups take the tunings of 32 heads of 80.
        if heads != 40:
            shared = shared_on_meta(q, cache, window)
            launches[f"make_plan shared {name}"] = partial(
                scratch.make_plan, plan, step, kv_heads, window, shared
            )
            launches[f"shared {name}"] = partial(
                balanced_attention,
                *(q, cache, step, plan, scratch_on_meta(q, cache), 0.1, window, q),
                shared=shared,
            )
        step = replace(step, is_reversed=ints)
        launches[f"balanced reversed {name}"] = partial(
            balanced_attention, q, cache, step, plan, scratch, 0.1, window, q
        )
        launches[f"plain reversed {name}"] = partial(plain_attention, q, cache, step, 0.1, window, q, tuning)
    return launches | sink_launches(dtype)


def scratch_on_meta(q: torch.Tensor, cache: torch.Tensor) -> DecodeScratch:
    num_heads, head_dim, num_kv_heads = *q.shape[1:], cache.shape[2]
    heads = num_heads // num_kv_heads
    tuning = decode_tuning(heads, head_dim, q.element_size(), is_coded(cache), is_shared=True)
    return DecodeScratch(num_heads, num_kv_heads, head_dim, 32, 132, q.device, tuning)


def shared_on_meta(q: torch.Tensor, cache: torch.Tensor, window: int | None) -> Shared:
    num_heads, head_dim, num_kv_heads = *q.shape[1:], cache.shape[2]
    tuning = shared_tuning(head_dim, q.element_size())
    scratch = SharedScratch(num_heads, head_dim, 32, 132, q.device, tuning)
    heads = num_heads // num_kv_heads
    form = SharedForm(num_kv_heads, tuning.rows, heads, cache.shape[3], tuning.tile, window, 4096)
    return Shared(SharedPlan(form, 32, scratch.num_programs, q.device), scratch)


def sink_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The attention of gpt-oss."""
    q, cache = meta(32, 64, 64, dtype=dtype), meta(999, 2, 8, 16, 64, dtype=dtype)
    ints, sinks = meta(33, dtype=torch.int32), meta(64, dtype=dtype)
    step = PagedStep(ints, ints, meta(9999, dtype=torch.int32), ints, 32, group=1, num_groups=2)
    tuning = decode_tuning(8, 64, q.element_size())
    scratch = DecodeScratch(64, 8, 64, 32, 132, torch.device("meta"), tuning)
    return {
        "balanced sinks": partial(
            balanced_attention, q, cache, step, scratch.new_plan(), scratch, 0.1, 128, q, sinks
        ),
        "shared sinks": partial(
            balanced_attention,
            *(q, cache, step, scratch.new_plan(), scratch_on_meta(q, cache), 0.1, 128, q, sinks),
            shared=shared_on_meta(q, cache, 128),
        ),
        "plain sinks": partial(plain_attention, q, cache, step, 0.1, 128, q, tuning, sinks),
    }


def coded_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """All that reads or writes a cache in 8 bits."""
    launches: dict[str, Callable[[], Any]] = {}
    ints, table = meta(33, dtype=torch.int32), meta(9999, dtype=torch.int32)
    one, context = meta(1, dtype=torch.int32), meta(9000, 8, 128, dtype=dtype)
    step = PagedStep(ints, ints, table, ints, 32)
    q = meta(32, 32, 128, dtype=dtype)
    tuning = decode_tuning(4, 128, q.element_size(), is_coded=True)
    scratch = DecodeScratch(32, 8, 128, 32, 132, torch.device("meta"), tuning)
    for coding in CODINGS:
        layer = cache_of(999, 2, 8, 16, 128, dtype=dtype, coding=coding)
        cache = cache_of(1000, 32, 2, 8, 16, 128, dtype=dtype, coding=coding)
        launches |= {
            f"balanced {coding}": partial(
                balanced_attention, q, layer, step, scratch.new_plan(), scratch, 0.1, None, q
            ),
            f"shared {coding}": partial(
                balanced_attention,
                *(q, layer, step, scratch.new_plan(), scratch_on_meta(q, layer), 0.1, None, q),
                shared=shared_on_meta(q, layer, None),
            ),
            f"plain {coding}": partial(plain_attention, q, layer, step, 0.1, None, q, tuning),
            f"gather_kv {coding}": partial(gather_kv, cache, 3, table, one, one, ints, context, context),
            f"rope_write {coding}": partial(
                rope_launch, dtype, 32, 32, 8, 128, has_norm=False, coding=coding
            ),
        }
    return launches


def few_row_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    launches: dict[str, Callable[[], Any]] = {}
    for num_in, num_out, activation in (
        (4096, 6144, 0),
        (4096, 14336, 4),
        (2560, 10240, 5),
        (14336, 4096, 0),
        (20480, 5120, 0),
    ):
        weight = meta(num_out * (1 + (activation >= 4)), num_in, dtype=dtype)
        norm = meta(num_in, dtype=dtype)
        tuning = gemv_tuning(num_in, num_out, activation >= 4)
        launches[f"gemv {num_in} {num_out}"] = partial(
            gemv,
            meta(1, num_in, dtype=dtype),
            weight,
            meta(1, num_out, dtype=dtype),
            tuning,
            norm=norm,
            activation=activation,
        )
    scratch = SkinnyScratch(132, torch.device("meta"))
    for rows, num_in, num_out in ((2, 4096, 4096), (16, 14336, 4096), (32, 20480, 5120)):
        few = skinny_tuning(rows, num_in, num_out)
        if few is not None and dtype != torch.float32:
            out = meta(rows, num_out, dtype=dtype)
            x, weight = meta(rows, num_in, dtype=dtype), meta(num_out, num_in, dtype=dtype)
            launches[f"skinny_linear {rows} {num_in}"] = partial(
                skinny_linear, x, weight, out, few, residual=out, scratch=scratch
            )
    return launches


def coded_weight(format_: int, num_in: int, num_out: int, group: int, has_zeros: bool) -> CodedWeight:
    is_packed = format_ >= PACKED
    dtype, groups = torch.int8 if format_ == INT8_WEIGHT else torch.uint8, num_in // group
    return CodedWeight(
        format_,
        num_in,
        meta(num_out, num_in // 2 if is_packed else num_in, dtype=dtype),
        meta(num_out, groups, dtype=torch.bfloat16 if is_packed else torch.float32),
        meta(num_out, groups, dtype=dtype) if has_zeros else None,
        group,
    )


def coded_weight_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """In the shapes of Llama-3.1-8B: formats that `--quantization` makes, and those that checkpoints have."""
    launches: dict[str, Callable[[], Any]] = {}
    scratch = SkinnyScratch(2 * 132, torch.device("meta"))
    for name, format_, group, has_zeros in (
        ("int8", INT8_WEIGHT, 4096, False),
        ("int8 in groups", INT8_WEIGHT, 128, True),
        ("int4", INT4, 32, False),
        ("int4 with zeros", INT4, 128, True),
        ("fp8", FP8_WEIGHT, 4096, False),
        ("fp8 in blocks", FP8_WEIGHT, 128, False),
    ):
        one = meta(1, 4096, dtype=dtype)
        gated, plain = (coded_weight(format_, 4096, out, group, has_zeros) for out in (28672, 4096))
        launches[f"gemv {name} gated"] = partial(
            gemv,
            one,
            gated,
            meta(1, 14336, dtype=dtype),
            coded_gemv_tuning(gated, is_gated=True),
            norm=one,
            activation=4,
        )
        launches[f"gemv {name}"] = partial(
            gemv, one, plain, one, coded_gemv_tuning(plain, is_gated=False), residual=one, norm=one
        )
        launches[f"dequantise {name}"] = partial(dequantise, plain, meta(4096, 4096, dtype=dtype))
        for rows in (2, 64):
            x = meta(rows, 4096, dtype=dtype)
            few = coded_skinny_tuning(x, plain)
            if few is not None:
                launches[f"skinny_linear {name} {rows}"] = partial(
                    skinny_linear, x, plain, x, few, residual=x, scratch=scratch
                )
    return launches


def expert_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Qwen3-30B-A3B, Mixtral 8x7B and gpt-oss-20b: rows that take each of the tunings."""
    launches: dict[str, Callable[[], Any]] = {}
    for num_experts, top_k, hidden, inner in ((128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880)):
        gate_up = meta(num_experts, 2 * inner, hidden, dtype=dtype)
        down = meta(num_experts, hidden, inner, dtype=dtype)
        options: dict[str, Any] = {}
        if hidden == inner:
            biases = meta(num_experts, 2 * inner, dtype=dtype), meta(num_experts, hidden, dtype=dtype)
            options = {"biases": biases, "swiglu": (1.702, 7.0)}
        for rows in (1, 512, 4096):
            x, logits = meta(rows, hidden, dtype=dtype), meta(rows, num_experts, dtype=dtype)
            launches[f"mix_experts {rows} of {num_experts}"] = partial(
                mix_experts, x, logits, gate_up, down, top_k, True, x, x, **options
            )
    return launches


def coded_expert_launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Qwen3-30B-A3B in what `--quantization` makes and in groups, and gpt-oss-20b as it was published."""
    launches: dict[str, Callable[[], Any]] = {}
    for name, format_, group, has_zeros, (num_experts, top_k, hidden, inner) in (
        ("int8", INT8_WEIGHT, None, False, (128, 8, 2048, 768)),
        ("int8 in groups", INT8_WEIGHT, 128, True, (128, 8, 2048, 768)),
        ("int4", INT4, 32, False, (128, 8, 2048, 768)),
        ("int4 with zeros", INT4, 128, True, (128, 8, 2048, 768)),
        ("fp8 in blocks", FP8_WEIGHT, 128, False, (128, 8, 2048, 768)),
        ("mxfp4", MXFP4, 32, False, (32, 4, 2880, 2880)),
    ):
        gate_up = coded_weight(format_, hidden, num_experts * 2 * inner, group or hidden, has_zeros)
        down = coded_weight(format_, inner, num_experts * hidden, group or inner, has_zeros)
        options: dict[str, Any] = {}
        if format_ == MXFP4:
            biases = meta(num_experts, 2 * inner, dtype=dtype), meta(num_experts, hidden, dtype=dtype)
            options = {"biases": biases, "swiglu": (1.702, 7.0)}
        for rows in (1, 512, 4096):
            x, logits = meta(rows, hidden, dtype=dtype), meta(rows, num_experts, dtype=dtype)
            launches[f"mix_experts {name} {rows}"] = partial(
                mix_experts, x, logits, gate_up, down, top_k, True, x, x, **options
            )
    return launches


def sampling_launches() -> dict[str, Callable[[], Any]]:
    launches: dict[str, Callable[[], Any]] = {}
    for rows in (1, 256):
        logits, ones = meta(rows, 128256, dtype=torch.float32), meta(rows, dtype=torch.float32)
        launches[f"argmax {rows}"] = partial(argmax, logits)
        launches[f"gumbel {rows}"] = partial(gumbel_argmax, logits, meta(rows, dtype=torch.int64))
        launches[f"sample {rows}"] = partial(sample, logits, meta(rows, dtype=torch.int64), ones)
        launches[f"truncate {rows}"] = partial(
            truncate, logits, ones, meta(rows, dtype=torch.int32), ones, ones
        )
    launches["argmax bf16"] = partial(argmax, meta(1, 128256, dtype=torch.bfloat16))
    return launches


LAUNCHES = sampling_launches() | {
    f"{name} {short}": launch
    for short, dtype in DTYPES.items()
    for name, launch in launches_in(dtype).items()
}
