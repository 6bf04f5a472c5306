from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Hello, InstanceLimits, Request
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.views import DecodeView, PrefillView
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey

LIMITS = InstanceLimits(
    num_blocks=100, block_size=16, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=600
)
WITH_WINDOW = InstanceLimits(
    num_blocks=100, block_size=16, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=600, window=30
)

# Of three layers that attend to all and six that slide, for instance.
WITH_GROUPS = replace(WITH_WINDOW, num_blocks=400, num_full_groups=1, num_sliding_groups=2)


def hello(limits: InstanceLimits) -> Hello:
    return Hello("decode", InstanceId("one"), Epoch(1), 1, {}, limits)


def pooled(num_tokens: int) -> RequestState:
    """Its KV is in the pool, in whose blocks there is room for more."""
    request = Request(RequestKey(1), [0] * num_tokens, SamplingParams(), seed=0, arrival_s=0.0)
    state = RequestState(request, InstanceId("gateway-0"), Phase.POOLED, 0.0)
    state.output, state.num_cached = [1], num_tokens
    state.blocks = [PoolBlockId(block) for block in range(-(-num_tokens // 16) + 2)]
    return state


def test_a_request_takes_the_blocks_of_its_window() -> None:
    state = pooled(500)
    assert DecodeView(hello(LIMITS)).blocks_of(state) == 32 + 2
    # The first token that the next one sees is number 471, in the tile that begins with 448.
    assert DecodeView(hello(WITH_WINDOW)).blocks_of(state) == 32 - 448 // 16
    assert DecodeView(hello(WITH_WINDOW)).blocks_of(pooled(40)) == 3


def test_what_is_staged_takes_no_blocks_for_what_was_passed() -> None:
    assert PrefillView(hello(LIMITS)).blocks_to_stage(pooled(500)) == 32
    assert PrefillView(hello(WITH_WINDOW)).blocks_to_stage(pooled(500)) == 32 - 448 // 16


def test_the_longest_request_of_a_batch() -> None:
    assert LIMITS.max_request_blocks == 38
    assert WITH_WINDOW.max_request_blocks == -(-(29 + 63 + 1) // 16) + 1


def test_a_request_takes_all_blocks_of_full_groups_and_those_of_its_window_of_the_others() -> None:
    view, state = DecodeView(hello(WITH_GROUPS)), pooled(500)
    assert view.blocks_of(state) == 32 + 2 * (32 - 448 // 16)
    assert view.blocks_to_run(state) == view.blocks_of(state) + 3
    assert view.blocks_of(pooled(40)) == 3 * 3
    assert PrefillView(hello(WITH_GROUPS)).blocks_to_stage(state) == 32 + 2 * (32 - 448 // 16)
    nowhere = pooled(500)
    nowhere.blocks = []
    assert view.blocks_of(nowhere) == 0


def test_limits_of_several_groups() -> None:
    assert LIMITS.num_kv_tokens == 100 * 16 and WITH_GROUPS.num_kv_tokens == 400 // 3 * 16
    assert WITH_GROUPS.max_request_blocks == 38 + 2 * (-(-(29 + 63 + 1) // 16) + 1)


@pytest.mark.parametrize("length", [0, 1, 16, 40, 500])
def test_requests_that_have_passed_nothing_have_as_many_tokens_as_there_are_blocks_for(length: int) -> None:
    assert LIMITS.num_tokens_of(length) == LIMITS.num_kv_tokens
    assert replace(WITH_GROUPS, window=0).num_tokens_of(length) == WITH_GROUPS.num_kv_tokens


def test_the_longer_requests_are_the_more_tokens_there_are_blocks_for() -> None:
    assert WITH_GROUPS.num_tokens_of(40) == WITH_GROUPS.num_kv_tokens
    # Of 32 columns a request holds one block of each, and of the last four all three.
    assert WITH_GROUPS.num_tokens_of(500) == 400 * 32 // (32 + 2 * 4) * 16


def test_without_a_window_a_request_takes_a_block_for_each_that_the_pool_has() -> None:
    assert DecodeView(hello(LIMITS)).blocks_to_run(pooled(500)) == 32 + 2 + 1
