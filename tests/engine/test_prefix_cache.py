"""Requests of the engine's own that begin alike: what they share is computed once, and they say the same as alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.engine.engine import Engine
from alignedserve.engine.outputs import BrokenLogits
from alignedserve.engine.policy import FcfsPolicy, Limits, Plan, Queues
from alignedserve.types import RequestId
from tests.engine.helpers import EvictEveryStep, greedy_params, make_engine, run, tokens
from tests.tiny_models import VOCAB_SIZE, prompts

Directory = Callable[[str], Path]
FAMILY, BLOCK = "llama-gqa-tied", 16
# 300 tokens, and one that has its first 100
LONG = prompts()[8]
BRANCH = LONG[:100] + [(token + 1) % VOCAB_SIZE for token in LONG[100:130]]


class Counting(FcfsPolicy):
    """How many tokens it has computed, in all."""

    num_computed = 0

    def plan(self, queues: Queues, num_free_blocks: int) -> Plan:
        plan = super().plan(queues, num_free_blocks)
        self.num_computed += sum(count for _, count in plan.work)
        return plan


class Evicting(FcfsPolicy):
    """At times somebody leaves, whether there is room or not."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.num_evicted, self._dice = 0, random.Random(0)

    def plan(self, queues: Queues, num_free_blocks: int) -> Plan:
        plan = super().plan(queues, num_free_blocks)
        if plan.evict or not queues.running or self._dice.random() < 0.7:
            self.num_evicted += len(plan.evict)
            return plan
        self.num_evicted += 1
        return Plan(evict=[self._dice.choice(queues.running)])


@pytest.fixture
def directory(tiny_model: Directory) -> Path:
    return tiny_model(FAMILY)


@pytest.fixture
def engine(directory: Path) -> Engine:
    return make_engine(directory, Counting)


def counted(engine: Engine) -> int:
    assert isinstance(engine._policy, Counting)
    count, engine._policy.num_computed = engine._policy.num_computed, 0
    return count


def alone(directory: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    (said,) = tokens(run(make_engine(directory, enable_prefix_caching=False), [prompt], params))
    return said


def test_a_prompt_goes_on_from_what_an_earlier_one_has_computed(engine: Engine, directory: Path) -> None:
    params = greedy_params(4)
    run(engine, [LONG], params)
    assert counted(engine) == 300 + 3
    assert tokens(run(engine, [BRANCH], params)) == [alone(directory, BRANCH, params)]
    assert counted(engine) == 130 - 96 + 3


def test_a_chat_goes_on_from_its_last_answer(engine: Engine, directory: Path) -> None:
    params = greedy_params(40)
    ((*answer,),) = tokens(run(engine, [LONG], params))
    counted(engine)
    turn = [*LONG, *answer, 1, 2, 3]
    assert tokens(run(engine, [turn], params)) == [alone(directory, turn, params)]
    # of the last token of the answer there was no KV
    assert counted(engine) == len(turn) - (300 + 39) // BLOCK * BLOCK + 39


@pytest.mark.parametrize(
    ("chunk", "num_shared"),
    [(None, 288), (40, 240)],
    ids=["in one", "in pieces, and for little nobody waits"],
)
def test_the_choices_of_one_call_compute_the_prompt_once(
    directory: Path, chunk: int | None, num_shared: int
) -> None:
    engine = make_engine(directory, Counting, max_prefill_chunk=chunk)
    said = tokens(run(engine, [LONG] * 5, greedy_params(1)))
    assert counted(engine) == 300 + 4 * (300 - num_shared)
    assert said == [alone(directory, LONG, greedy_params(1))] * 5


def test_who_waits_for_another_keeps_nobody_from_running(engine: Engine) -> None:
    for number, prompt in enumerate([LONG, LONG, prompts()[4]]):
        engine.add_request(RequestId(str(number)), prompt, greedy_params(4), 0)
    assert {event.request_id for event in engine.step()} == {"0", "2"}
    assert {event.request_id for event in engine.step()} == {"0", "1", "2"}
    engine.reset()


def test_it_can_be_left_off(directory: Path) -> None:
    engine = make_engine(directory, Counting, enable_prefix_caching=False)
    run(engine, [LONG, LONG], greedy_params(1))
    run(engine, [LONG], greedy_params(1))
    assert counted(engine) == 3 * 300


def test_where_log_probabilities_of_the_prompt_are_asked_for_all_of_it_is_computed(engine: Engine) -> None:
    params = greedy_params(1, prompt_logprobs=0)
    _, second = run(engine, [LONG, LONG], params)
    assert counted(engine) == 600
    assert sum(len(event.prompt_logprobs or ()) for event in second) == 299
    run(engine, [LONG], greedy_params(1))
    assert counted(engine) == 12, "it serves others"


def test_what_is_moved_to_host_memory_and_back_is_shared_all_the_same(directory: Path) -> None:
    engine = make_engine(directory, EvictEveryStep)
    params = greedy_params(20)
    expected = [alone(directory, prompt, params) for prompt in (LONG, BRANCH)]
    for _ in range(2):
        assert tokens(run(engine, [LONG, BRANCH, LONG], params)) == [*expected, expected[0]]


def test_what_went_wrong_serves_nobody(engine: Engine) -> None:
    run(engine, [LONG[:40]], greedy_params(1))
    engine.cache.blocks.fill_(math.nan)
    ((broken,),) = run(engine, [LONG], greedy_params(1))
    assert isinstance(broken.error, BrokenLogits)
    engine.cache.blocks.zero_()
    counted(engine)
    ((fine,),) = run(engine, [LONG], greedy_params(1))
    assert fine.error is None and counted(engine) == 300


def test_what_went_wrong_before_it_was_moved_serves_nobody_either(directory: Path) -> None:
    engine = make_engine(directory, EvictEveryStep)
    engine.add_request(RequestId("bad"), LONG, greedy_params(10), 0)
    engine.step()
    engine.cache.blocks[engine._blocks.held(RequestId("bad"))[0]] = math.nan
    while engine.num_unfinished:
        (event,) = engine.step()
    assert isinstance(event.error, BrokenLogits)
    ((fine, *_),) = run(engine, [LONG], greedy_params(1))
    assert fine.error is None


def test_what_was_moved_has_its_names_again(directory: Path) -> None:
    """Though the blocks that had them were taken."""
    engine = make_engine(directory, Counting, max_num_seqs=2)
    request = engine.add_request(RequestId("moved"), LONG, greedy_params(40), 0)
    engine.step()
    engine._evict(request)
    engine._blocks.forget(request.names)
    while engine.num_unfinished:
        engine.step()
    assert engine._blocks.num_known(request.names) == len(request.names)


def test_the_parts_of_a_text_that_is_there_go_together(engine: Engine) -> None:
    run(engine, [LONG[:240]], greedy_params(1))
    parts = [LONG[:length] for length in (250, 270, 290)]
    for number, part in enumerate(parts):
        engine.add_request(RequestId(str(number)), part, greedy_params(1), 0)
    assert len(engine.step()) == 3
    engine.check_idle()


def test_aborted_while_others_share_with_it(engine: Engine, directory: Path) -> None:
    expected = alone(directory, LONG, greedy_params(4))
    for num_steps in range(4):
        for number in range(3):
            engine.add_request(RequestId(str(number)), LONG, greedy_params(4), 0)
        said: list[int] = []
        for _ in range(num_steps):
            said += [event.token_id for event in engine.step() if event.request_id == "2"]
        engine.abort(RequestId("0"))
        engine.abort(RequestId("1"))
        while engine.num_unfinished:
            said += [event.token_id for event in engine.step() if event.request_id == "2"]
        assert said == expected
        engine.check_idle()


@pytest.mark.parametrize("seed", range(3))
def test_little_memory_and_many_that_begin_alike(directory: Path, seed: int) -> None:
    """Blocks are taken away, requests are evicted, some are aborted; and who ends has said what it says alone."""
    dice = random.Random(seed)
    beginnings = [LONG[:length] for length in (0, 64, 200)]
    asked = [
        dice.choice(beginnings) + dice.choices(range(VOCAB_SIZE), k=dice.randint(1, 60)) for _ in range(24)
    ]
    asked += asked[:8]
    lengths = [dice.randint(1, 30) for _ in asked]
    plain = make_engine(directory, enable_prefix_caching=False)
    params = [greedy_params(length) for length in lengths]
    expected = tokens(run(plain, asked, params))
    engine = make_engine(
        directory, Evicting, kv_cache_memory_bytes=1 << 19, max_num_seqs=6, max_num_batched_tokens=128
    )
    said: dict[str, list[int]] = {str(number): [] for number in range(len(asked))}
    waiting, gone = list(range(len(asked))), set()
    while waiting or engine.num_unfinished:
        for number in [waiting.pop(0) for _ in range(min(len(waiting), dice.randint(0, 3)))]:
            engine.add_request(RequestId(str(number)), asked[number], params[number], 0)
        for event in engine.step():
            said[event.request_id] += [event.token_id]
        engine._blocks.check()
        if engine.num_unfinished and dice.random() < 0.05:
            gone.add(number := dice.choice([*engine._requests]))
            engine.abort(RequestId(number))
    engine.check_idle()
    assert engine._blocks.num_kept and engine._policy.num_evicted
    for number, wanted in enumerate(expected):
        got = said[str(number)]
        assert got == (wanted[: len(got)] if str(number) in gone else wanted)


def test_an_llm_says_how_much_was_there(directory: Path) -> None:
    llm = LLM(str(directory), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=1, n=2, ignore_eos=True)
    found = [llm.generate([LONG], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert found == [0, 288]
