"""Models all or some of whose layers have a window of 20 to 24 tokens: those hold no blocks before it, and the models
say the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.engine.engine import Engine
from alignedserve.instance.memory import BlockManager
from alignedserve.kv.held import Held
from alignedserve.kv.span import TILE_TOKENS, KvSpan
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.types import RequestId
from tests.engine.helpers import EvictEveryStep, greedy_params, make_engine, make_instance, run, tokens
from tests.tiny_models import MAX_LEN, greedy, prompts

Directory = Callable[[str], Path]
WINDOW, NUM_NEW = 24, 200
rarely = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]
# That of test_ranks.py.
in_turn = pytest.mark.drawn(one_in=8, turn=6)
# 300 tokens.
LONG = prompts()[8]
# Of one layer, by the head_dim of a model.
LAYER_BYTES = {
    "mistral-window": 2 * 2 * 16 * 16 * 4,
    "ministral": 2 * 2 * 16 * 24 * 4,
    "llama-gqa-tied": 2 * 2 * 16 * 16 * 4,
}


def poison_what_is_passed(engine: Engine, memory: BlockManager) -> list[int]:
    """What is freed holds NaN from then on, or a huge number. Returns a list that counts the blocks."""
    free_passed, found = memory.free_passed, []
    poison = math.nan if engine.cache.blocks.is_floating_point() else 127

    def freeing(held: Held, num_passed: int, num_tokens: int = 0) -> None:
        before = memory.in_columns(held)
        free_passed(held, num_passed, num_tokens)
        passed = {*before} - {*memory.in_columns(held)}
        engine.cache.blocks[[*passed]] = poison
        found.append(len(passed))

    memory.free_passed = freeing  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("family", "backend", "num_new", "options"),
    [
        ("mistral-window", "cpu", 64, {"block_size": 8, "max_prefill_chunk": 7}),
        # Some layers slide: of three, two or one.
        ("ministral", "cpu", 64, {"block_size": 128}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("mistral-window", "torch", 200, {}),
                ("gemma3", "cpu", 200, {"max_num_batched_tokens": 50}),
                ("gpt-oss-listed", "torch", 64, {"block_size": 64, "max_num_batched_tokens": 40}),
            )
        ),
        *(
            pytest.param(*each, marks=rarely)
            for each in (
                ("mistral-window", "cpu", 200, {"max_num_batched_tokens": 50}),
                ("mistral-window", "cpu", 64, {"block_size": 128}),
                ("mistral-window", "torch", 64, {"max_num_batched_tokens": 20}),
                ("phi3-partial-window", "cpu", 64, {"max_num_batched_tokens": 50}),
                ("mixtral-window", "cpu", 64, {}),
                ("gemma3", "torch", 64, {}),
                ("ministral", "torch", 64, {"max_num_batched_tokens": 20}),
                ("qwen2-window", "cpu", 64, {"block_size": 8, "max_prefill_chunk": 7}),
                ("gpt-oss", "cpu", 64, {"max_num_batched_tokens": 50}),
                ("gpt-oss-listed", "cpu", 64, {}),
            )
        ),
    ],
    ids=str,
)
def test_long_answers_match_transformers_and_nothing_that_was_passed_is_read(
    tiny_model: Directory, family: str, backend: str, num_new: int, options: dict[str, Any]
) -> None:
    directory = tiny_model(family)
    instance = make_instance(
        directory, attention_backend=backend, enable_prefix_caching=False, max_num_seqs=9, **options
    )
    passed = poison_what_is_passed(instance.engine, instance._worker.memory)
    assert tokens(run(instance, prompts(), greedy_params(num_new))) == greedy(directory, num_new)
    assert sum(passed) > 2


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("mistral-window", "torch"),
        ("gemma3", "cpu"),
        *(
            pytest.param(*each, marks=rarely)
            for each in (("mistral-window", "cpu"), ("ministral", "torch"), ("gpt-oss-listed", "cpu"))
        ),
    ],
)
def test_preemption_moves_what_is_held_and_changes_nothing(
    tiny_model: Directory, family: str, backend: str
) -> None:
    directory = tiny_model(family)
    instance = make_instance(directory, EvictEveryStep, attention_backend=backend, max_prefill_chunk=40)
    assert tokens(run(instance, prompts(), greedy_params())) == greedy(directory)
    assert instance.num_evictions > 9


def test_a_request_holds_its_window_and_a_chunk(tiny_model: Directory) -> None:
    instance = make_instance(tiny_model("mistral-window"), max_num_batched_tokens=32)
    request = instance.add_request(RequestId("one"), LONG, greedy_params(NUM_NEW), 0)
    most, held = 0, 0
    while instance.num_unfinished:
        instance.step()
        if instance.num_unfinished:
            held = instance.engine.limits.num_blocks - instance._worker.memory.num_free
            most = max(most, held)
    assert most <= -(-(WINDOW + TILE_TOKENS + 32) // 16) + 1 < -(-len(LONG) // 16)
    assert held <= -(-(WINDOW + TILE_TOKENS) // 16) + 1
    assert request.output and instance._worker.memory.span.window == WINDOW
    instance.check_idle()


@pytest.mark.parametrize(
    ("family", "num_at_once"), [("mistral-window", 4), ("ministral", 2), ("llama-gqa-tied", 1)]
)
def test_a_cache_holds_as_many_long_requests_as_windows(
    tiny_model: Directory, family: str, num_at_once: int
) -> None:
    """It has blocks for 32 * 16 tokens, and of each request's 500 those of the window, its tile and a chunk take 9.
    Where two layers of three slide, a prompt of 300 tokens takes 19 blocks of a layer and twice 9, of 96."""
    directory = tiny_model(family)
    instance = make_instance(
        directory,
        kv_cache_memory_bytes=MAX_LEN // 16 * 3 * LAYER_BYTES[family],
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
    )
    for number in range(6):
        instance.add_request(RequestId(str(number)), LONG, greedy_params(NUM_NEW), 0)
    schedule, most = instance._worker.schedule, 0
    while instance.num_unfinished:
        instance.step()
        most = max(most, len(schedule.blocks.running))
        schedule.check()
    assert most == num_at_once if family == "llama-gqa-tied" else most >= num_at_once
    instance.check_idle()


@pytest.mark.parametrize(
    ("family", "num_blocks"), [("mistral-window", 9), ("ministral", 32 + 2 * 9)], ids=str
)
def test_the_longest_request_needs_room_for_what_it_has_not_passed(
    tiny_model: Directory, family: str, num_blocks: int
) -> None:
    directory = tiny_model(family)
    num_layers = 3 if family == "mistral-window" else 1
    instance = make_instance(
        directory,
        kv_cache_memory_bytes=num_blocks * num_layers * LAYER_BYTES[family],
        max_num_batched_tokens=32,
        attention_backend="cpu",
    )
    assert instance.engine.limits.num_blocks == num_blocks
    assert tokens(run(instance, prompts(), greedy_params(150))) == greedy(directory, 150)


@pytest.mark.parametrize("family", ["gemma3", "ministral", "gpt-oss-listed"])
def test_where_some_layers_slide_a_request_holds_all_columns_of_the_others(
    tiny_model: Directory, family: str
) -> None:
    instance = make_instance(tiny_model(family), max_num_batched_tokens=32)
    memory, span = instance._worker.memory, instance._worker.memory.span
    assert span.num_full_groups and span.num_sliding_groups and span.window
    request = instance.add_request(RequestId("one"), LONG, greedy_params(NUM_NEW), 0)
    most = -(-(span.window + TILE_TOKENS + 32) // 16) + 1
    while instance.num_unfinished:
        instance.step()
        held, num_tokens = memory.num_blocks - memory.num_free, len(LONG) + len(request.output)
        if instance.num_unfinished:
            columns = -(-num_tokens // 16)
            assert held <= span.num_full_groups * columns + span.num_sliding_groups * most
            assert held >= span.num_full_groups * (columns - 1)
    instance.check_idle()


def test_where_some_layers_slide_a_prompt_shares_what_all_layers_have(tiny_model: Directory) -> None:
    directory = tiny_model("gemma3")
    instance = make_instance(directory)
    ((*answer,),) = tokens(run(instance, [LONG], greedy_params(64)))
    turn, branch = [*LONG, *answer, 1, 2, 3], LONG[:200] + [5] * 30
    alone = make_instance(directory, enable_prefix_caching=False)
    expected = tokens(run(alone, [turn, branch], greedy_params(40)))
    requests = []
    for number, prompt in enumerate((turn, branch)):
        requests.append(instance.add_request(RequestId(str(number)), prompt, greedy_params(40), 0))
        while instance.num_unfinished:
            instance.step()
    assert [request.output for request in requests] == expected
    assert [request.num_found for request in requests] == [363 // 16 * 16, 200 // 16 * 16]
    instance.check_idle()


def test_a_chat_goes_on_from_its_last_answer_though_its_beginning_is_gone(tiny_model: Directory) -> None:
    directory = tiny_model("mistral-window")
    instance = make_instance(directory)
    ((*answer,),) = tokens(run(instance, [LONG], greedy_params(64)))
    memory, owners = instance._worker.memory, list[Held]()
    # What is kept is needed for something else, but for the four blocks that were freed last.
    while count := memory.num_free - 4:
        owners.append(Held())
        assert memory.grow(owners[-1], min(count, memory.span.most))
    for owner in owners:
        memory.free(owner)
    turn = [*LONG, *answer, 1, 2, 3]
    request = instance.add_request(RequestId("turn"), turn, greedy_params(40), 0)
    while instance.num_unfinished:
        instance.step()
    alone = make_instance(directory, enable_prefix_caching=False)
    assert [request.output] == tokens(run(alone, [turn], greedy_params(40)))
    assert request.num_found == 363 // 16 * 16
    branch = LONG[:200] + [5] * 30
    other = instance.add_request(RequestId("branch"), branch, greedy_params(40), 0)
    while instance.num_unfinished:
        instance.step()
    assert [other.output] == tokens(run(alone, [branch], greedy_params(40)))
    assert other.num_found == 0, "nothing that its next token attends to is there"
    instance.check_idle()


def test_choices_of_one_call_share_and_pass_the_prompts_blocks(tiny_model: Directory) -> None:
    directory = tiny_model("mistral-window")
    llm = LLM(str(directory), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, use_tqdm=False)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, n=4, ignore_eos=True)
    shared = llm.generate([LONG], params, use_tqdm=False)[0]
    plain = LLM(
        str(directory),
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        use_tqdm=False,
        enable_prefix_caching=False,
    )
    expected = plain.generate([LONG], params, use_tqdm=False)[0]
    assert [each.token_ids for each in shared.outputs] == [each.token_ids for each in expected.outputs]
    assert len({tuple(each.token_ids) for each in shared.outputs}) > 1


def test_aborted_requests_leave_nothing(tiny_model: Directory) -> None:
    instance = make_instance(tiny_model("mistral-window"), max_num_batched_tokens=64)
    for num_steps in (1, 4, 7, 30):
        for number in range(3):
            instance.add_request(RequestId(str(number)), LONG, greedy_params(NUM_NEW), 0)
        for _ in range(num_steps):
            instance.step()
        for number in range(3):
            instance.abort(RequestId(str(number)))
        instance.check_idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param("mistral-window", "cpu", marks=in_turn),
        pytest.param("mistral-window", "torch", marks=in_turn),
        ("gemma3", "cpu"),
    ],
)
def test_ranks_pass_blocks_with_their_leader(tiny_model: Directory, family: str, backend: str) -> None:
    directory = tiny_model(family)
    instance = make_instance(
        directory, tensor_parallel_size=2, attention_backend=backend, enable_prefix_caching=False
    )
    passed = poison_what_is_passed(instance.engine, instance._worker.memory)
    assert tokens(run(instance, prompts()[7:], greedy_params(16))) == [
        each[:16] for each in greedy(directory)[7:]
    ]
    assert sum(passed) > 2


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama-gqa-tied", {}),
        # No sequence gets longer than the window.
        ("mistral-window", {"max_model_len": WINDOW}),
        ("gemma3", {"max_model_len": WINDOW}),
    ],
    ids=str,
)
def test_where_no_token_is_beyond_a_window_nothing_is_freed(
    tiny_model: Directory, family: str, options: dict[str, Any]
) -> None:
    instance = make_instance(tiny_model(family), **options)
    assert instance.engine.span.window == 0 and instance.engine.span.num_groups == 1


@pytest.mark.parametrize("family", ["mistral-window", "gemma3"])
def test_where_blocks_are_shared_from_both_ends_nothing_is_freed(tiny_model: Directory, family: str) -> None:
    engine = make_engine(tiny_model(family), has_reversed=True)
    instance = LocalInstance(engine, make_policy(SchedulingConfig("bros", share_blocks=True)))
    assert instance._worker.memory.span.window == 0


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("block_size", [8, 16, 48, 128])
@pytest.mark.parametrize("window", [1, 24, 64, 100])
@pytest.mark.parametrize("max_step", [1, 7, 64])
@pytest.mark.parametrize("groups", [(0, 1), (1, 3)])
def test_what_is_held_is_what_is_read(
    block_size: int, window: int, max_step: int, groups: tuple[int, int]
) -> None:
    span = KvSpan(block_size, window, max_step, *groups)
    for num_tokens in (1, 40, 300):
        num_columns = -(-num_tokens // block_size)
        for num_cached in range(num_tokens):
            num_passed = span.num_passed(num_cached)
            first_read = max(num_cached - window + 1, 0) // TILE_TOKENS * TILE_TOKENS
            assert num_passed * block_size <= first_read < (num_passed + 1) * block_size
            last_read = min(num_cached + max_step, num_tokens)
            assert span.end(num_passed, num_columns) * block_size >= last_read
            num_sliding = span.end(num_passed, num_columns) - num_passed
            assert num_sliding <= span.most
            num_held = span.num_held(num_cached, num_tokens)
            assert num_held == groups[0] * num_columns + groups[1] * num_sliding
            # What is passed pays for what comes instead.
            assert span.num_held(num_cached + 1, num_tokens) <= num_held
