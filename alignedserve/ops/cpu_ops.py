"""Operations on a CPU, through the C++ kernels. A forward is recorded once, and runs as one native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import torch

from alignedserve.kernels.cpu import sampling
from alignedserve.kernels.cpu.adapters import pack_adapters
from alignedserve.kernels.cpu.arena import Arena, SmallArena
from alignedserve.kernels.cpu.program import Buffers, Program, Rows, Value
from alignedserve.kernels.cpu.ranks import RankMemory
from alignedserve.kernels.cpu.structs import (
    ActivationCode,
    Adapters,
    AttentionOp,
    EmbedOp,
    GatherOp,
    JoinRanksOp,
    KeptInputsOp,
    KvCoding,
    LinearOp,
    NormOp,
    OpKind,
    QuantiseOp,
    ShareOp,
    ShrinkOp,
    SumRanksOp,
    WeightKind,
)
from alignedserve.kernels.cpu.weights import PackedAdapters, PackedWeight, pack, pack_blocks, pack_quantised
from alignedserve.kernels.gguf import ROW_GROUP, SUM_VALUES
from alignedserve.kernels.kv_rows import FP8, INT8, head_dim_of, is_coded
from alignedserve.kernels.quantised import BLOCK, ZEROS
from alignedserve.kv.groups import GroupedLayer, LayerGroups, one_group
from alignedserve.ops.adapters import LayerAdapters
from alignedserve.ops.base import (
    Activation,
    AttentionSpec,
    Ops,
    Projected,
    check_groups,
    check_rotary_dim,
    place_of,
)
from alignedserve.ops.cpu_experts import CpuExperts, ExpertRecorder, pack_experts
from alignedserve.ops.cpu_model import CpuModel, Programs
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.quantise import (
    INT4,
    GgufWeight,
    Part,
    block_runs,
    plain_parts,
    quantised_parts,
    without_blocks,
)
from alignedserve.ops.ranks import RankGroup
from alignedserve.ops.shard import Split
from alignedserve.ops.step import StepInputs

MAX_HEAD_DIM = 256
_CODINGS = {FP8: KvCoding.FP8, INT8: KvCoding.INT8}


class CpuOps(Ops):
    name = "cpu"

    def __init__(
        self,
        dtype: torch.dtype,
        num_threads: int | None = None,
        quantization: str | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """`num_threads`: by default torch's number, read at each step."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype must be float32 or bfloat16 on the CPU, not {dtype}")
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.quantization = quantization
        self.num_threads = num_threads
        self._arena = Arena()
        self._cache: torch.Tensor | None = None
        self._groups = one_group(0)
        # Recorded while `compile` runs.
        self._program = Program()
        self._buffers = Buffers(0)
        self._restored_buffers = Buffers(0)
        self._experts = ExpertRecorder(self._program, dtype, 0, self._quantised)
        self._step: StepInputs | None = None
        self._ranks: RankMemory | None = None
        if ranks:
            self.shard, self.num_threads = ranks.shard, ranks.num_threads
            self._ranks = RankMemory(ranks.shared, ranks.shard.rank, ranks.shard.size, ranks.slot_values)

    def linear_weight(
        self,
        parts: Sequence[Part],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
        is_head: bool = False,
        split: Split = Split.NONE,
        num_outputs: int = 0,
    ) -> PackedWeight:
        packed = self._pack(parts, biases, self._arena, activation, is_head)
        if self._ranks is None or split is Split.NONE:
            return packed
        return replace(packed, is_partial=split is Split.INPUTS, num_joined=num_outputs)

    def _pack(
        self,
        parts: Sequence[Part],
        biases: Sequence[torch.Tensor] | None,
        arena: Arena,
        activation: Activation = Activation.NONE,
        is_head: bool = False,
    ) -> PackedWeight:
        runs = _runs_of(parts, activation, self.dtype)
        if len(runs) > 1:
            ends = [*accumulate((len(run) for run in runs), initial=0)]
            first, *rest = [
                self._pack(run, biases and biases[begin:end], arena, activation, is_head)
                for run, (begin, end) in zip(runs, pairwise(ends), strict=True)
            ]
            return replace(first, rest=tuple(rest))
        parts, code = runs[0], ActivationCode[activation.name]
        if blocks := [part for part in parts if isinstance(part, GgufWeight)]:
            return pack_blocks(blocks, biases, code, self.dtype, arena)
        if quantised := quantised_parts(parts, self.scheme(is_head), self.dtype):
            return pack_quantised(quantised, biases, code, self.dtype, arena)
        return pack(plain_parts(parts), biases, code, self.dtype, arena)

    def with_adapters(self, weight: PackedWeight, adapters: LayerAdapters) -> PackedWeight:
        return replace(weight, adapters=self._packed_adapters(weight, adapters, self._arena))

    def put_adapter(self, weight: PackedWeight, number: int, adapter: LayerAdapters) -> None:
        assert weight.adapters is not None
        weight.adapters.put(number, self._packed_adapters(weight, adapter, SmallArena()))

    def _packed_adapters(self, weight: PackedWeight, adapters: LayerAdapters, arena: Arena) -> PackedAdapters:
        parts = range(len(adapters.out_features))
        return pack_adapters(
            [adapters.stacked_a(part, self.dtype) for part in parts],
            [adapters.stacked_b(part, self.dtype) for part in parts],
            adapters.scales,
            weight.activation,
            self.dtype,
            arena,
        )

    def parameter(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.detach().to(device="cpu", dtype=dtype or self.dtype, copy=True).contiguous()

    def bind_cache(self, cache: torch.Tensor, groups: LayerGroups | None = None) -> None:
        if cache.dim() != 6 or cache.shape[2] != 2 or not cache[0].is_contiguous():
            raise ValueError(
                "cache must have contiguous blocks, [block, layer, 2, kv_head, slot, head_dim], not "
                f"{tuple(cache.shape)} with strides {cache.stride()}"
            )
        _check_tensor("cache", cache[0], cache.dtype if is_coded(cache) else self.dtype)
        self._cache, self._groups = cache, check_groups(cache, groups)

    def embed(
        self,
        table: torch.Tensor | PackedWeight,
        ids: torch.Tensor,
        offset: int = 0,
        add_to: Value | None = None,
        scale: float = 1.0,
    ) -> Value:
        step = self._recorded_step()
        if ids.data_ptr() not in (step.token_ids.data_ptr(), step.positions.data_ptr()):
            raise ValueError("ids must be the token_ids or the positions of the StepInputs given to compile")
        if isinstance(table, PackedWeight):
            if table.kind is not WeightKind.AS_ROWS and not table.gguf:
                raise ValueError(f"a table in {table.kind.name} can't be looked up; give it in the dtype")
            rows, width, tile_bytes = table.tiles, table.in_features, table.tile_bytes
            kind = table.kind
        else:
            self._check_parameter("table", table, (None, None))
            rows, width, tile_bytes, kind = table, table.shape[1], 0, WeightKind.AS_ROWS
        out = self._value(width, Rows.TOKENS)
        args = EmbedOp(
            table=rows.data_ptr(),
            tile_bytes=tile_bytes,
            ids=ids.data_ptr(),
            out=out.pointer,
            width=out.width,
            offset=offset,
            out_stride=out.stride,
            scale=scale,
            weight_kind=kind,
        )
        if add_to is not None:
            _check_same_rows("add_to", add_to, out)
            _check_width("add_to", add_to, out.width)
            args.add_to, args.add_stride = add_to.pointer, add_to.stride
        self._program.append(OpKind.EMBED, self.dtype, args, out, [table, ids, add_to])
        return out

    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float, residual: Value | None = None) -> Value:
        return self._norm(x, weight, None, eps, centred=False, residual=residual)

    def layer_norm(
        self, x: Value, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> Value:
        return self._norm(x, weight, bias, eps, centred=True)

    def _norm(
        self,
        x: Value,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        centred: bool,
        residual: Value | None = None,
    ) -> Value:
        self._recorded_step()
        weight, bias = self._wide("weight", weight, x.width), self._wide("bias", bias, x.width)
        out = self._value(x.width, x.rows)
        args = NormOp(
            x=x.pointer,
            weight=_pointer(weight),
            bias=_pointer(bias),
            out=out.pointer,
            width=x.width,
            x_stride=x.stride,
            out_stride=out.stride,
            eps=eps,
            centred=centred,
        )
        if residual is not None:
            _check_same_rows("residual", residual, out)
            _check_width("residual", residual, out.width)
            args.residual, args.residual_stride = residual.pointer, residual.stride
        self._program.append(OpKind.NORM, self.dtype, args, out, [x, weight, bias, residual])
        return out

    def linear(self, x: Value, weight: PackedWeight, residual: Value | None = None) -> Value:
        self._recorded_step()
        _check_width("x", x, weight.in_features)
        if weight.dtype != self.dtype:
            raise ValueError(f"weight must be {self.dtype}, not {weight.dtype}")
        if residual is not None and weight.activation is not ActivationCode.NONE:
            raise ValueError("a linear layer has an activation or a residual, not both")
        shrunk = self._shrunk(x, weight) if weight.adapters else None
        if weight.is_partial or weight.num_joined:
            return self._across_ranks(x, weight, residual, shrunk)
        return self._project(x, weight, residual, self.dtype, shrunk)

    def _project(
        self,
        x: Value,
        weight: PackedWeight,
        residual: Value | None,
        dtype: torch.dtype,
        shrunk: Value | None = None,
    ) -> Value:
        out = self._value(weight.num_outputs, x.rows, dtype)
        if residual is not None:
            _check_same_rows("residual", residual, out)
            _check_width("residual", residual, out.width)
        first, codes = 0, None
        for run in (weight, *weight.rest):
            if run.kind.takes_codes:
                # All runs take the same codes, because those of a layer with several are of GGUF.
                codes = codes or self._quantised(x, run)
            args = self._linear_op(codes if codes and run.kind.takes_codes else x, run, out, first)
            if residual is not None:
                args.residual = residual.pointer + first * self.dtype.itemsize
                args.residual_stride = residual.stride
            if shrunk and weight.adapters:
                args.adapters = self._adapters_from(weight.adapters, shrunk, first)
            self._program.append(OpKind.LINEAR, self.dtype, args, out, [x, codes, run, residual, shrunk])
            first += run.out_features
        return out

    def _linear_op(self, x: Value, weight: PackedWeight, out: Value, first: int) -> LinearOp:
        """Writes the outputs from `first` on. Ignores `weight.rest`."""
        args = LinearOp(
            x=x.pointer,
            weight=weight.tiles.data_ptr(),
            bias=_pointer(weight.bias),
            out=out.pointer + first * out.tensor.itemsize,
            in_features=weight.in_features,
            out_features=weight.out_features,
            x_stride=x.stride,
            out_stride=out.stride,
            activation=weight.activation,
            weight_kind=weight.kind,
            float32_out=out.tensor.dtype is torch.float32,
        )
        if weight.int8:
            args.scales, args.starts = weight.int8.scales.data_ptr(), weight.int8.starts.data_ptr()
        if weight.groups:
            args.group = weight.groups.values
            args.float_scales, args.has_zeros = weight.groups.has_float_scales, weight.groups.has_zeros
        return args

    def _adapters_from(self, adapters: PackedAdapters, shrunk: Value, first: int) -> Adapters:
        """The adapters of outputs from `first` on, which is a multiple of a tile's columns."""
        return Adapters(
            shrunk=shrunk.pointer,
            expand=adapters.expand[:, :, first:].data_ptr(),
            scales=adapters.scales.data_ptr(),
            parts=adapters.parts[first:].data_ptr(),
            shrunk_stride=shrunk.stride,
            rank=adapters.rank,
            num_columns=adapters.expand.shape[2],
        )

    def _shrunk(self, x: Value, weight: PackedWeight) -> Value:
        """Appends the product with all adapters' a: see ShrinkOp."""
        if weight.adapters is None or self._recorded_step().adapters is None:
            raise ValueError("a layer with adapters needs StepInputs with has_adapters")
        if x.rows is Rows.RESTORED:
            raise ValueError("K and V can't be restored from kept inputs with adapters")
        shrink = weight.adapters.shrink
        out = self._value(shrink.first.out_features, x.rows, torch.float32)
        linear = LinearOp(
            x=x.pointer,
            weight=shrink.tiles.data_ptr(),
            out=out.pointer,
            in_features=shrink.first.in_features,
            out_features=shrink.first.out_features,
            x_stride=x.stride,
            out_stride=out.stride,
            activation=ActivationCode.NONE,
            float32_out=1,
        )
        args = ShrinkOp(linear, shrink.expert_bytes)
        self._program.append(OpKind.SHRINK, self.dtype, args, out, [x, weight])
        return out

    def _across_ranks(
        self, x: Value, weight: PackedWeight, residual: Value | None, shrunk: Value | None
    ) -> Value:
        """Appends the sum of all ranks' results, rounded once, or their outputs side by side."""
        part = self._project(x, weight, None, torch.float32, shrunk)
        if weight.is_partial:
            return self._sum_ranks(part, residual)
        ranks = self._meet(part)
        out = self._value(weight.num_joined, x.rows, torch.float32)
        args = JoinRanksOp(ranks.pointer, out.pointer, out.width, out.stride)
        self._program.append(OpKind.JOIN_RANKS, self.dtype, args, out, [ranks])
        return out

    def _sum_ranks(self, part: Value, residual: Value | None) -> Value:
        ranks = self._meet(part)
        out = self._value(part.width, part.rows)
        args = SumRanksOp(ranks=ranks.pointer, out=out.pointer, width=out.width, out_stride=out.stride)
        if residual is not None:
            _check_same_rows("residual", residual, out)
            _check_width("residual", residual, out.width)
            args.residual, args.residual_stride = residual.pointer, residual.stride
        self._program.append(OpKind.SUM_RANKS, self.dtype, args, out, [ranks, residual])
        return out

    def _meet(self, part: Value) -> RankMemory:
        """Appends the exchange of rows with the other ranks."""
        if self._ranks is None:
            raise RuntimeError("a layer is split over ranks, but there is only one")
        self._ranks.check_fits(part.tensor.shape[0], part.width)
        is_float32 = part.tensor.dtype is torch.float32
        args = ShareOp(self._ranks.pointer, part.pointer, part.width, part.stride, is_float32)
        self._program.append(OpKind.SHARE, self.dtype, args, part, [self._ranks])
        self._program.append(OpKind.MEET, self.dtype, args, part, [self._ranks])
        return self._ranks

    def _quantised(self, x: Value, weight: PackedWeight, rows_each: int = 1) -> Value:
        """Appends the quantisation of rows: see QuantiseOp."""
        num_values = -(-x.width // BLOCK[INT4]) * BLOCK[INT4]
        group, num_after = 0, 1
        if weight.groups:
            group = weight.groups.values
            num_after += -(-num_values // group)
        if weight.gguf:
            num_after = num_values // ROW_GROUP + num_values // SUM_VALUES
        width = num_values + num_after * torch.float32.itemsize
        out = Value(x.buffers, width, torch.uint8, x.rows)
        args = QuantiseOp(
            x=x.pointer,
            out=out.pointer,
            width=x.width,
            x_stride=x.stride,
            out_stride=out.stride,
            group=group,
            rows_each=rows_each,
            weight_kind=weight.kind,
            zero=_zero_of_rows(weight),
        )
        self._program.append(OpKind.QUANTISE, self.dtype, args, out, [x])
        return out

    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> CpuExperts:
        gated = partial(self._pack, activation=Activation.SILU_GATED)
        return pack_experts(spec, take, gated, self._pack, self._arena)

    def mix_experts(self, x: Value, logits: Value, experts: CpuExperts, residual: Value) -> Value:
        self._recorded_step()
        spec = experts.spec
        _check_width("x", x, spec.hidden_size)
        _check_width("logits", logits, spec.num_experts)
        _check_width("residual", residual, spec.hidden_size)
        _check_same_rows("logits", logits, x)
        _check_same_rows("residual", residual, x)
        out = self._value(spec.hidden_size, x.rows)
        if spec.is_split:
            self._experts.record(x, logits, experts, None, out)
            return self._sum_ranks(out, residual)
        self._experts.record(x, logits, experts, residual, out)
        return out

    def outputs(self, x: Value) -> Value:
        self._recorded_step()
        _check_of_tokens("x", x)
        return self._gather(x)

    def attention(self, qkv: Value, spec: AttentionSpec, projected: Projected | None = None) -> Value:
        cache, place = self._checked_cache(spec), place_of(spec.layer, self._groups, self._recorded_step())
        _check_of_tokens("qkv", qkv)
        _check_width("qkv", qkv, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        spec = replace(
            spec,
            q_norm=self._wide("q_norm", spec.q_norm, spec.head_dim),
            k_norm=self._wide("k_norm", spec.k_norm, spec.head_dim),
            sinks=self._wide("sinks", spec.sinks, spec.num_heads),
        )
        rope = spec.rope
        if rope is not None:
            _check_tensor("rope", rope, torch.float32, (None, None))
            check_rotary_dim(rope, spec.head_dim)
        out = self._value(spec.num_heads * spec.head_dim, Rows.OUTPUTS if spec.outputs_only else Rows.TOKENS)
        self._attend(_attention_op(qkv, out, cache, place, spec), out, [qkv, cache, spec])
        if kept := self._recorded_step().kept_inputs:
            self._attend_restored(qkv, out, spec, projected, kept.restored_kv)
        return out

    def _attend(self, args: AttentionOp, out: Value, keep: list[object]) -> None:
        self._program.append(OpKind.WRITE_KV, self.dtype, args, out, keep)
        self._program.append(OpKind.ATTENTION, self.dtype, args, out, keep)

    def _attend_restored(
        self,
        qkv: Value,
        out: Value,
        spec: AttentionSpec,
        projected: Projected | None,
        restored_kv: torch.Tensor,
    ) -> None:
        """Writes kept inputs, restores KV from those of earlier steps, and attends to it."""
        cache = self._checked_cache(spec)
        if projected is None:
            raise ValueError("keeping inputs needs attention with `projected`")
        x: Value = projected.x
        _check_of_tokens("projected.x", x)
        _check_width("projected.x", x, spec.num_kv_heads * spec.head_dim)
        inputs = KeptInputsOp(
            cache=cache[:, spec.layer].data_ptr(),
            block_stride=cache.stride(0),
            rows_per_block=2 * cache.shape[4],
            width=x.width,
        )
        inputs.x, inputs.x_stride = x.pointer, x.stride
        self._program.append(OpKind.WRITE_INPUTS, self.dtype, inputs, x, [cache])
        before = self._value(x.width, Rows.RESTORED)
        inputs.out, inputs.x_stride = before.pointer, before.stride
        self._program.append(OpKind.READ_INPUTS, self.dtype, inputs, before, [cache])
        kv = self.linear(before, projected.weight.outputs_from(spec.num_heads * spec.head_dim))
        # These rows start with the heads of k; they have none of q.
        place = GroupedLayer(0, 0)
        restored = _attention_op(kv, kv, restored_kv, place, replace(spec, num_heads=0))
        self._program.append(OpKind.RESTORE_KV, self.dtype, restored, kv, [restored_kv, spec])
        args = _attention_op(qkv, out, restored_kv, place, spec)
        args.of_kept = 1
        self._attend(args, out, [qkv, restored_kv, spec])

    def _checked_cache(self, spec: AttentionSpec) -> torch.Tensor:
        self._recorded_step()
        if self._cache is None:
            raise ValueError("bind_cache must be called before compile")
        num_kv_heads, head_dim = self._cache.shape[3], head_dim_of(self._cache)
        if (num_kv_heads, head_dim) != (spec.num_kv_heads, spec.head_dim):
            raise ValueError(
                f"the cache has {num_kv_heads} kv heads of {head_dim}, "
                f"attention {spec.num_kv_heads} of {spec.head_dim}"
            )
        if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, not {head_dim}")
        if spec.num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}), not {spec.num_heads}"
            )
        if spec.sliding_window is not None and spec.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {spec.sliding_window}")
        return self._cache

    def break_up(self) -> None:
        if self._ranks:
            self._ranks.break_up()

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sampling.argmax(logits)

    def gumbel_argmax(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return sampling.gumbel_argmax(logits, keys)

    def compile(
        self,
        forward: Callable[[StepInputs], Value],
        logits: Callable[[Value], Value],
        step: StepInputs,
        max_rows: int,
        is_trial: bool = False,
        final_states: Callable[[Value], Value] | None = None,
    ) -> CpuModel:
        self._step = step
        try:
            self._start_recording(step.max_tokens)
            if step.kept_inputs is not None:
                self._restored_buffers = Buffers(step.kept_inputs.max_restored)
            hidden = forward(step)
            forward_program = self._program
            self._start_recording(max_rows)
            result = self._program.make_last_float32(logits(self._gather(hidden)))
            logits_program, final = self._program, None
            if final_states is not None:
                self._start_recording(max_rows)
                states = final_states(self._gather(hidden))
                final = self._program, states
            programs = Programs(forward_program, hidden, logits_program, result, final)
            return CpuModel(step, programs, max_rows, self.num_threads, self._ranks)
        finally:
            self._step = None
            self._start_recording(0)

    def _start_recording(self, num_rows: int) -> None:
        self._program = Program()
        self._buffers = Buffers(num_rows)
        self._restored_buffers = Buffers(0)
        self._experts = ExpertRecorder(self._program, self.dtype, num_rows, self._quantised)

    def _gather(self, x: Value) -> Value:
        out = self._value(x.width, Rows.OUTPUTS)
        args = GatherOp(x=x.pointer, out=out.pointer, width=x.width, x_stride=x.stride, out_stride=out.stride)
        self._program.append(OpKind.GATHER, self.dtype, args, out, [x])
        return out

    def _value(self, width: int, rows: Rows, dtype: torch.dtype | None = None) -> Value:
        buffers = self._restored_buffers if rows is Rows.RESTORED else self._buffers
        return Value(buffers, width, dtype or self.dtype, rows)

    def _recorded_step(self) -> StepInputs:
        if self._step is None:
            raise RuntimeError(
                "the operations of CpuOps can only be called by the functions given to compile"
            )
        return self._step

    def _wide(self, name: str, weight: torch.Tensor | None, width: int) -> torch.Tensor | None:
        """Returns the weight of a norm, or sinks, in float32, as their kernels read it."""
        if weight is None:
            return None
        if weight.dtype not in (self.dtype, torch.float32):
            raise ValueError(f"{name} must be {self.dtype} or torch.float32, not {weight.dtype}")
        _check_tensor(name, weight, weight.dtype, (width,))
        return weight.float()

    def _check_parameter(self, name: str, tensor: torch.Tensor | None, shape: tuple[int | None, ...]) -> None:
        if tensor is not None:
            _check_tensor(name, tensor, self.dtype, shape)


def _runs_of(parts: Sequence[Part], activation: Activation, dtype: torch.dtype) -> list[list[Part]]:
    """Splits a layer into runs of one form each. Parts in types of GGUF that kernels can't take become floats."""
    return block_runs(parts, activation.is_gated, dtype) or [[*without_blocks(parts, dtype)]]


def _zero_of_rows(weight: PackedWeight) -> int:
    if weight.gguf:
        return 0
    if weight.groups is None or weight.groups.has_zeros:
        return 1
    return ZEROS[weight.kind.name.lower().removesuffix("_groups")]


def _attention_op(
    qkv: Value, out: Value, blocks: torch.Tensor, place: GroupedLayer, spec: AttentionSpec
) -> AttentionOp:
    """`blocks`: [block, layer, k|v, kv_head, slot, row]."""
    cache = blocks[:, place.index]
    return AttentionOp(
        qkv=qkv.pointer,
        out=out.pointer,
        cache=cache.data_ptr(),
        rope=_pointer(spec.rope),
        q_norm=_pointer(spec.q_norm),
        k_norm=_pointer(spec.k_norm),
        sinks=_pointer(spec.sinks),
        qkv_stride=qkv.stride,
        out_stride=out.stride,
        block_stride=cache.stride(0) * cache.element_size(),
        value_offset=cache.stride(1) * cache.element_size(),
        row_bytes=cache.stride(3) * cache.element_size(),
        coding=_CODINGS.get(cache.dtype, KvCoding.VALUES),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=0 if spec.rope is None else spec.rope.shape[1],
        block_size=cache.shape[3],
        window=spec.sliding_window or 0,
        group=place.group,
        scale=spec.scale,
        eps=spec.norm_eps,
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_of_tokens(name: str, value: Value) -> None:
    if value.rows is not Rows.TOKENS:
        raise ValueError(f"{name} must have a row for each token of the step, not for outputs only")


def _check_same_rows(name: str, value: Value, out: Value) -> None:
    if value.rows is not out.rows:
        raise ValueError(f"{name} must have the same rows as the result: all tokens, or outputs only")


def _check_width(name: str, value: Value, width: int) -> None:
    if value.width != width:
        raise ValueError(f"{name} must be {width} wide, not {value.width}")


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...] | None = None
) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be {dtype} on the CPU, not {tensor.dtype} on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not have strides {tensor.stride()}")
    if shape is not None and (
        tensor.dim() != len(shape)
        or any(want not in (None, size) for want, size in zip(shape, tensor.shape, strict=True))
    ):
        raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")
