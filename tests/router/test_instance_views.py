from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.protocol.messages import Hello, InstanceLimits, Request
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.views import DecodeView, PrefillView
from alignedserve.sampling_params import SamplingParams
from alignedserve.timing.deadlines import Deadlines
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


# ---- common prefixes -------------------------------------------------------------------------------------------------

SHARING = replace(LIMITS, enable_prefix_caching=True, block_size=4)
PROMPTS = ("a", "aaab", "aabb", "bbbb", "aaaaaaa")


def behind(key: int, prompt: str, is_rt: bool) -> RequestState:
    """A request in the pool with a block for each letter, and one for its last token."""
    tokens = [ord(letter) for letter in prompt for _ in range(4)]
    request = Request(RequestKey(key), tokens, SamplingParams(), seed=0, arrival_s=0.0)
    state = RequestState(request, InstanceId("gateway-0"), Phase.POOLED, 0.0)
    state.deadlines = Deadlines(is_rt)
    state.output, state.num_cached = [1], len(tokens)
    state.blocks = [PoolBlockId(block) for block in range(len(prompt) + 1)]
    return state


def prefixes(states: Iterable[RequestState]) -> set[tuple[int, ...]]:
    prompts = [state.request.prompt for state in states]
    return {tuple(prompt[:end]) for prompt in prompts for end in range(4, len(prompt) + 1, 4)}


STEPS = st.tuples(
    st.sampled_from(["offer", "run", "leave"]), st.integers(1, 6), st.sampled_from(PROMPTS), st.booleans()
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=150, deadline=None)
def test_what_offered_requests_have_in_common_is_promised_once(
    steps: list[tuple[str, int, str, bool]],
) -> None:
    """Each of them needs the block of its last token and one more for itself."""
    view = DecodeView(hello(SHARING))
    view.num_free_blocks = 100
    offered, running = dict[int, RequestState](), dict[int, RequestState]()
    for what, key, prompt, is_rt in steps:
        state = offered.pop(key, None) or running.pop(key, None) or behind(key, prompt, is_rt)
        view.discard(state.key)
        if what == "offer":
            offered[key] = state
            view.add_offered(state, is_batch=key % 2 == 0, now=0.0)
        elif what == "run":
            running[key] = state
            view.add_running(state)
        there, rt = prefixes(running.values()), [each for each in offered.values() if each.is_rt]
        everything = prefixes([*offered.values(), *running.values()])
        assert view.num_available_blocks == 100 - 2 * len(offered) - len(everything - there)
        assert view.num_blocks_for_rt == 100 - 2 * len(rt) - len(prefixes(rt) - there)
        asked = behind(9, prompt, is_rt)
        assert view.blocks_to_run(asked) == 2 + len(prefixes([asked]) - everything)


def test_where_instances_share_nothing_each_is_promised_all_of_its_blocks() -> None:
    view = DecodeView(hello(replace(SHARING, enable_prefix_caching=False)))
    for key in (1, 2):
        view.add_offered(behind(key, "aaab", is_rt=False), is_batch=True, now=0.0)
    assert view.num_available_blocks == -2 * (4 + 1 + 1)
    assert view.blocks_to_run(behind(3, "aaab", is_rt=False)) == 4 + 1 + 1
