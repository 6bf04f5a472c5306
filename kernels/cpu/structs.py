"""The structs of csrc/ops.h and csrc/kv_int8.h, for ctypes. Their sizes are compared when the library is loaded."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, Union, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

DTYPE_CODES = {"float32": 0, "bfloat16": 1}


class WeightKind(IntEnum):
    AS_ROWS = 0
    INT8 = 1
    INT4 = 2
    INT8_GROUPS = 3
    FP8 = 4
    MXFP4 = 5
    # The types of GGUF.
    Q4_0 = 6
    Q4_1 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q8_0 = 10
    Q2_K = 11
    Q3_K = 12
    Q4_K = 13
    Q5_K = 14
    Q6_K = 15
    IQ4_NL = 16
    IQ4_XS = 17

    @property
    def takes_codes(self) -> bool:
        """Whether its rows are quantised to eight bits."""
        return self not in (WeightKind.AS_ROWS, WeightKind.FP8, WeightKind.MXFP4)


class KvCoding(IntEnum):
    VALUES = 0
    FP8 = 1
    INT8 = 2


class OpKind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    WRITE_KV = 3
    ATTENTION = 4
    GATHER = 5
    WRITE_INPUTS = 6
    READ_INPUTS = 7
    RESTORE_KV = 8
    ROUTE = 9
    GROUP = 10
    SPREAD = 11
    EXPERT_LINEAR = 12
    MIX = 13
    QUANTISE = 14
    SHARE = 15
    MEET = 16
    SUM_RANKS = 17
    JOIN_RANKS = 18
    SHRINK = 19


class ActivationCode(IntEnum):
    NONE = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SILU_GATED = 4
    GELU_TANH_GATED = 5
    CLAMPED_SWIGLU = 6

    @property
    def is_gated(self) -> bool:
        # All later codes are gated, too.
        return self >= ActivationCode.SILU_GATED


class EmbedOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("table", "ids", "add_to", "out")),
        *((name, c_int64) for name in ("width", "offset", "add_stride", "out_stride", "tile_bytes")),
        ("scale", c_float),
        ("weight_kind", c_int32),
    ]


class NormOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "residual", "out")),
        *((name, c_int64) for name in ("width", "x_stride", "residual_stride", "out_stride")),
        ("eps", c_float),
        ("centred", c_int32),
    ]


class QuantiseOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("width", "x_stride", "out_stride", "group", "rows_each")),
        *((name, c_int32) for name in ("weight_kind", "zero")),
    ]


class Adapters(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("shrunk", "expand", "scales", "parts")),
        *((name, c_int64) for name in ("shrunk_stride", "rank", "num_columns")),
    ]


class LinearOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "scales", "starts", "residual", "out")),
        *(
            (name, c_int64)
            for name in ("in_features", "out_features", "x_stride", "residual_stride", "out_stride", "group")
        ),
        *(
            (name, c_int32)
            for name in ("float_scales", "has_zeros", "activation", "float32_out", "weight_kind")
        ),
        *((name, c_float) for name in ("swiglu_alpha", "swiglu_limit")),
        ("adapters", Adapters),
        ("adapter_of_row", c_void_p),
    ]


class ShrinkOp(Structure):
    _fields_ = [("linear", LinearOp), ("adapter_bytes", c_int64)]


class AttentionOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "out", "cache", "rope", "q_norm", "k_norm", "sinks")),
        *(
            (name, c_int64)
            for name in ("qkv_stride", "out_stride", "block_stride", "value_offset", "row_bytes")
        ),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "coding")),
        *((name, c_int32) for name in ("window", "of_kept", "rotary_dim", "group")),
        ("scale", c_float),
        ("eps", c_float),
    ]


class GatherOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("width", "x_stride", "out_stride")),
    ]


class KeptInputsOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "cache")),
        *((name, c_int64) for name in ("x_stride", "block_stride", "rows_per_block", "width")),
    ]


class Routing(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_experts", "top_k")),
        *((name, c_void_p) for name in ("chosen", "weights", "places", "hit", "starts")),
    ]


class RouteOp(Structure):
    _fields_ = [
        ("routing", Routing),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("normalises", c_int32),
    ]


class SpreadOp(Structure):
    _fields_ = [
        ("routing", Routing),
        *((name, c_void_p) for name in ("x", "residual", "out")),
        *((name, c_int64) for name in ("width", "x_stride", "residual_stride", "out_stride")),
    ]


class ExpertLinearOp(Structure):
    _fields_ = [
        ("routing", Routing),
        ("linear", LinearOp),
        ("expert_bytes", c_int64),
        ("expert_columns", c_int64),
    ]


class Ranks(Structure):
    _fields_ = [
        ("shared", c_void_p),
        *((name, c_int64) for name in ("rank", "size", "slot_bytes", "num_meetings")),
    ]


class ShareOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ranks", "x")),
        *((name, c_int64) for name in ("width", "x_stride")),
        ("is_float32", c_int32),
    ]


class SumRanksOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ranks", "residual", "out")),
        *((name, c_int64) for name in ("width", "residual_stride", "out_stride")),
    ]


class JoinRanksOp(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ranks", "out")),
        *((name, c_int64) for name in ("width", "out_stride")),
    ]


class _AnyOp(Union):
    _fields_ = [
        ("embed", EmbedOp),
        ("norm", NormOp),
        ("linear", LinearOp),
        ("attention", AttentionOp),
        ("gather", GatherOp),
        ("inputs", KeptInputsOp),
        ("route", RouteOp),
        ("spread", SpreadOp),
        ("expert_linear", ExpertLinearOp),
        ("quantise", QuantiseOp),
        ("share", ShareOp),
        ("sum_ranks", SumRanksOp),
        ("join_ranks", JoinRanksOp),
        ("shrink", ShrinkOp),
    ]


class Op(Structure):
    _fields_ = [("kind", c_int32), ("dtype", c_int32), ("of_rows", c_int32), ("args", _AnyOp)]


class Step(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "num_tokens",
                "num_rows",
                "num_seqs",
                "block_table_stride",
                "group_table_stride",
                "slots_stride",
                "num_restored",
            )
        ),
        *(
            (name, c_void_p)
            for name in (
                "positions",
                "slots",
                "query_start",
                "context_len",
                "is_reversed",
                "block_table",
                "rows",
                "is_kept",
                "input_rows",
                "restored_rows",
                "restored_slots",
                "restored_positions",
                "adapters",
                "row_adapters",
                "ended_ns",
            )
        ),
        ("num_threads", c_int32),
    ]


class SharedLimits(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("block_size", "tile", "window", "max_rows")),
        *((name, c_int64) for name in ("min_saved_per_row", "min_saved")),
    ]


class KvBlocks(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("values", "stored")),
        *(
            (name, c_int64)
            for name in ("num_blocks", "num_groups", "num_slots", "head_dim", "num_last_slots")
        ),
        ("dtype", c_int32),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Declares the types of the library's functions."""
    library.size_of_op.restype = c_int64
    library.size_of_step.restype = c_int64
    library.size_of_kv_blocks.restype = c_int64
    library.size_of_ranks.restype = c_int64
    library.uses_amx.restype = c_int32
    for function in (library.quantise_kv, library.dequantise_kv):
        function.argtypes = [c_void_p]
        function.restype = c_int32
    library.run_program.argtypes = [c_void_p, c_int32, c_void_p]
    library.run_program.restype = c_int32
    library.keys_read.argtypes = [c_void_p, c_int32, c_int32, c_int32, POINTER(c_int64)]
    library.keys_read.restype = c_int64
    library.shared_tasks.argtypes = [c_void_p] * 6
    library.shared_tasks.restype = c_int32
    library.pack_weight.argtypes = [c_void_p, *[c_int64] * 6, c_void_p, c_int32]
    library.pack_weight.restype = None
    library.argmax_rows.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32]
    library.argmax_rows.restype = None
    library.gumbel_argmax_rows.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32]
    library.gumbel_argmax_rows.restype = None
