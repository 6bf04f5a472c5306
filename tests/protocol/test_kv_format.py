from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch

from alignedserve.kv.format import KV_CACHE_DTYPES, POOL_KV_DTYPES, BlockFormat
from alignedserve.protocol.hub import difference
from alignedserve.protocol.messages import Hello, InstanceLimits
from alignedserve.types import Epoch, InstanceId

FORM = BlockFormat(num_layers=2, block_size=16, num_kv_heads=3, head_dim=8, dtype="bfloat16")
NUM_CHANNELS = 2 * 2 * 3 * 8


def hello(name: str, form: BlockFormat) -> Hello:
    role = name.split("-")[0]
    return Hello(role, InstanceId(name), Epoch(1), os.getpid(), form.describe(), InstanceLimits())


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_a_block_of_bytes_has_a_byte_a_value_and_two_bounds_a_channel(dtype: str, num_bytes: int) -> None:
    form = BlockFormat(num_layers=2, block_size=16, num_kv_heads=3, head_dim=8, dtype=dtype)
    assert form.in_pool("auto") == form
    assert form.block_bytes == NUM_CHANNELS * 16 * num_bytes
    assert form.in_pool("int8").block_bytes == NUM_CHANNELS * (16 + 2 * num_bytes)
    assert form.in_pool("int8").shape == form.shape


def test_a_pool_of_another_format_is_refused_by_name() -> None:
    decode = hello("decode-0", FORM)
    assert difference(decode, [hello("kvpool-0", FORM.in_pool("auto"))]) is None
    said = difference(decode, [hello("kvpool-0", FORM.in_pool("int8"))])
    assert said == "decode-0: encoding is kv, but kv-int8 at kvpool-0"


def test_no_two_choices_say_the_same() -> None:
    assert len({FORM.in_pool(each).encoding for each in POOL_KV_DTYPES}) == len(POOL_KV_DTYPES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_instances_may_have_8_bits_a_value_and_int8_a_scale_for_each_head_of_a_token(dtype: str) -> None:
    whole = replace(FORM, dtype=dtype)
    fp8, int8 = (replace(whole, encoding=KV_CACHE_DTYPES[each]) for each in ("fp8", "int8"))
    assert fp8.block_bytes == NUM_CHANNELS * 16
    assert int8.block_bytes == NUM_CHANNELS * 16 + 4 * (2 * 2 * 3 * 16)
    for form, torch_dtype in ((whole, dtype), (fp8, "float8_e4m3fn"), (int8, "int8")):
        assert form.torch_dtype == torch_dtype
        assert math.prod(form.shape) * getattr(torch, torch_dtype).itemsize == form.block_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_the_pool_gets_8_bits_as_they_are(kv_cache_dtype: str) -> None:
    form = replace(FORM, encoding=KV_CACHE_DTYPES[kv_cache_dtype])
    assert form.in_pool("auto") == form
    with pytest.raises(ValueError, match=f"^pool_kv_dtype='int8' and kv_cache_dtype='{kv_cache_dtype}': one"):
        form.in_pool("int8")


def test_instances_of_other_formats_are_refused_by_name() -> None:
    others = [hello("prefill-0", replace(FORM, encoding="kv-int8-rows"))]
    said = difference(hello("decode-0", replace(FORM, encoding="kv-fp8")), others)
    assert said == "decode-0: encoding is kv-fp8, but kv-int8-rows at prefill-0"
