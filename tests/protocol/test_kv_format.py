from __future__ import annotations

import os

import pytest

from alignedserve.protocol.hub import difference
from alignedserve.protocol.kv_format import POOL_KV_DTYPES, BlockFormat
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
