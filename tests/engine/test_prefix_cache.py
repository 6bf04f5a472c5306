"""The engine's own requests with common prefixes: these are computed once, and outputs are the same as alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.engine.engine import LaunchedIteration
from alignedserve.engine.outputs import BrokenLogits
from alignedserve.engine.request import Work
from alignedserve.offline.local_instance import LocalInstance, LocalRequest
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import ColocatedPart, DecodePart
from alignedserve.scheduling.prefixes import block_hashes_of
from alignedserve.timing.estimate import Estimate
from alignedserve.types import BlockId, RequestId
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.tiny_models import VOCAB_SIZE, prompts

Directory = Callable[[str], Path]
FAMILY, BLOCK = "llama-gqa-tied", 16
# 300 tokens, and one that has its first 100
LONG = prompts()[8]
BRANCH = LONG[:100] + [(token + 1) % VOCAB_SIZE for token in LONG[100:130]]


class Evicting(Fcfs):
    """At times somebody leaves, whether there is room or not."""

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return EvictingNowAndThen(limits, self.config)


class EvictingNowAndThen(ColocatedPart):
    dice = random.Random(0)

    def plan(self, at: DecodeBoundary) -> None:
        super().plan(at)
        if at.running and self.dice.random() < 0.3:
            at.evict([self.dice.choice(at.running)])


@pytest.fixture
def directory(tiny_model: Directory) -> Path:
    return tiny_model(FAMILY)


@pytest.fixture
def engine(directory: Path) -> LocalInstance:
    return make_counting(directory)


def make_counting(directory: Path, **options: Any) -> LocalInstance:
    """It counts the tokens that it has computed."""
    instance = make_instance(directory, **options)
    launch, counts = instance.engine.launch, Counter[str]()

    def counting(work: Work) -> LaunchedIteration:
        counts["tokens"] += sum(count for _, count in work)
        return launch(work)

    instance.engine.launch = counting  # type: ignore[method-assign]
    instance.counts = counts  # type: ignore[attr-defined]
    return instance


def counted(instance: LocalInstance) -> int:
    """Since the last call."""
    return instance.counts.pop("tokens", 0)  # type: ignore[attr-defined, no-any-return]


def blocks_of(instance: LocalInstance, request: LocalRequest) -> list[BlockId]:
    blocks = instance._worker.schedule.blocks
    return blocks[request.key].blocks if request.key in blocks else []


def alone(directory: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    (said,) = tokens(run(make_instance(directory, enable_prefix_caching=False), [prompt], params))
    return said


def test_a_prompt_goes_on_from_what_an_earlier_one_has_computed(
    engine: LocalInstance, directory: Path
) -> None:
    params = greedy_params(4)
    run(engine, [LONG], params)
    assert counted(engine) == 300 + 3
    assert tokens(run(engine, [BRANCH], params)) == [alone(directory, BRANCH, params)]
    assert counted(engine) == 130 - 96 + 3


def test_a_chat_goes_on_from_its_last_answer(engine: LocalInstance, directory: Path) -> None:
    params = greedy_params(40)
    ((*answer,),) = tokens(run(engine, [LONG], params))
    counted(engine)
    turn = [*LONG, *answer, 1, 2, 3]
    assert tokens(run(engine, [turn], params)) == [alone(directory, turn, params)]
    # of the last token of the answer there was no KV
    assert counted(engine) == len(turn) - (300 + 39) // BLOCK * BLOCK + 39


@pytest.mark.parametrize(
    ("chunk", "num_shared"),
    [(None, 288), (40, 288)],
    ids=["in one", "in pieces"],
)
def test_the_choices_of_one_call_compute_the_prompt_once(
    directory: Path, chunk: int | None, num_shared: int
) -> None:
    engine = make_counting(directory, max_prefill_chunk=chunk)
    said = tokens(run(engine, [LONG] * 5, greedy_params(1)))
    assert counted(engine) == 300 + 4 * (300 - num_shared)
    assert said == [alone(directory, LONG, greedy_params(1))] * 5


def test_who_waits_for_another_keeps_nobody_from_running(engine: LocalInstance) -> None:
    for number, prompt in enumerate([LONG, LONG, prompts()[4]]):
        engine.add_request(RequestId(str(number)), prompt, greedy_params(4), 0)
    assert {event.request_id for event in engine.step()} == {"0", "2"}
    assert {event.request_id for event in engine.step()} == {"0", "1", "2"}
    engine.reset()


def test_it_can_be_left_off(directory: Path) -> None:
    engine = make_counting(directory, enable_prefix_caching=False)
    run(engine, [LONG, LONG], greedy_params(1))
    run(engine, [LONG], greedy_params(1))
    assert counted(engine) == 3 * 300


def test_where_log_probabilities_of_the_prompt_are_asked_for_all_of_it_is_computed(
    engine: LocalInstance,
) -> None:
    params = greedy_params(1, prompt_logprobs=0)
    _, second = run(engine, [LONG, LONG], params)
    assert counted(engine) == 600
    assert sum(len(event.prompt_logprobs or ()) for event in second) == 299
    run(engine, [LONG], greedy_params(1))
    assert counted(engine) == 12, "it serves others"


def test_what_is_moved_to_host_memory_and_back_is_shared_all_the_same(directory: Path) -> None:
    engine = make_instance(directory, EvictEveryStep)
    params = greedy_params(20)
    expected = [alone(directory, prompt, params) for prompt in (LONG, BRANCH)]
    for _ in range(2):
        assert tokens(run(engine, [LONG, BRANCH, LONG], params)) == [*expected, expected[0]]


def test_what_went_wrong_serves_nobody(engine: LocalInstance) -> None:
    run(engine, [LONG[:40]], greedy_params(1))
    engine.engine.cache.blocks.fill_(math.nan)
    ((broken,),) = run(engine, [LONG], greedy_params(1))
    assert isinstance(broken.error, BrokenLogits)
    engine.engine.cache.blocks.zero_()
    counted(engine)
    ((fine,),) = run(engine, [LONG], greedy_params(1))
    assert fine.error is None and counted(engine) == 300


def test_what_went_wrong_before_it_was_moved_serves_nobody_either(directory: Path) -> None:
    engine = make_instance(directory, EvictEveryStep)
    bad, events = engine.add_request(RequestId("bad"), LONG, greedy_params(10), 0), []
    events += engine.step()
    # it is on its way to host memory, or there
    assert engine._memory
    engine._memory.blocks[bad.blocks[0]].view("float32")[:] = math.nan
    while engine.num_unfinished:
        if not blocks_of(engine, bad):
            # Or it would find its own blocks again, which are sound.
            engine._worker.memory.forget_all()
        events += engine.step()
    event = events[-1]
    assert isinstance(event.error, BrokenLogits)
    ((fine, *_),) = run(engine, [LONG], greedy_params(1))
    assert fine.error is None


def test_what_shared_with_it_and_was_moved_serves_nobody_either(directory: Path) -> None:
    engine, params = make_counting(directory, policy=EvictEveryStep), greedy_params(10)
    run(engine, [LONG[:100]], greedy_params(1))
    moved, bad = (engine.add_request(RequestId(name), BRANCH, params, 0) for name in ("moved", "bad"))
    outputs = engine.step()
    assert engine._memory and bad.num_found == moved.num_found == 96
    engine._memory.blocks[bad.blocks[-1]].view("float32")[:] = math.nan
    while engine.num_unfinished:
        outputs += engine.step()
    ends = {each.request_id: each.error for each in outputs if each.finish_reason}
    assert isinstance(ends[RequestId("bad")], BrokenLogits) and ends[RequestId("moved")] is None
    counted(engine)
    run(engine, [BRANCH], greedy_params(1))
    assert counted(engine) == len(BRANCH)
    run(engine, [BRANCH], greedy_params(1))
    assert counted(engine) < BLOCK


def test_what_was_moved_has_its_names_again(directory: Path) -> None:
    """Though the blocks that had them were taken."""
    engine = make_instance(directory, EvictEveryStep)
    request = engine.add_request(RequestId("moved"), LONG, greedy_params(40), 0)
    names = block_hashes_of(LONG, BLOCK)
    while engine.num_unfinished:
        engine.step()
        if engine.num_unfinished and not blocks_of(engine, request):
            engine._worker.memory.forget_all()
    assert engine.num_evictions > 10
    assert engine._worker.memory.num_known(names) == len(names)


def test_the_parts_of_a_text_that_is_there_go_together(engine: LocalInstance) -> None:
    run(engine, [LONG[:240]], greedy_params(1))
    parts = [LONG[:length] for length in (250, 270, 290)]
    for number, part in enumerate(parts):
        engine.add_request(RequestId(str(number)), part, greedy_params(1), 0)
    assert len(engine.step()) == 3
    engine.check_idle()


def test_aborted_while_others_share_with_it(engine: LocalInstance, directory: Path) -> None:
    expected = alone(directory, LONG, greedy_params(4))
    for num_steps in range(4):
        for number in range(3):
            engine.add_request(RequestId(str(number)), LONG, greedy_params(4), 0)
        said: list[int | None] = []
        for _ in range(num_steps):
            said += [event.token_id for event in engine.step() if event.request_id == "2"]
        engine.abort(RequestId("0"))
        engine.abort(RequestId("1"))
        while engine.num_unfinished:
            said += [event.token_id for event in engine.step() if event.request_id == "2"]
        assert said == expected
        engine.check_idle()


@pytest.mark.parametrize(
    ("family", "seed"), [(FAMILY, 0), (FAMILY, 1), (FAMILY, 2), ("mistral-window", 0), ("mistral-window", 1)]
)
def test_little_memory_and_many_that_begin_alike(tiny_model: Directory, family: str, seed: int) -> None:
    """Blocks are taken away, requests are evicted, some are aborted; and who ends has said what it says alone."""
    directory = tiny_model(family)
    dice = random.Random(seed)
    beginnings = [LONG[:length] for length in (0, 64, 200)]
    asked = [
        dice.choice(beginnings) + dice.choices(range(VOCAB_SIZE), k=dice.randint(1, 60)) for _ in range(24)
    ]
    asked += asked[:8]
    lengths = [dice.randint(1, 30) for _ in asked]
    plain = make_instance(directory, enable_prefix_caching=False)
    params = [greedy_params(length) for length in lengths]
    expected = tokens(run(plain, asked, params))
    engine = make_instance(
        directory, Evicting, kv_cache_memory_bytes=1 << 19, max_num_seqs=6, max_num_batched_tokens=128
    )
    said: dict[str, list[int | None]] = {str(number): [] for number in range(len(asked))}
    waiting, gone = list(range(len(asked))), set[str]()
    while waiting or engine.num_unfinished:
        for number in [waiting.pop(0) for _ in range(min(len(waiting), dice.randint(0, 3)))]:
            engine.add_request(RequestId(str(number)), asked[number], params[number], 0)
        for event in engine.step():
            said[event.request_id] += [event.token_id]
        engine._worker.memory.check()
        if engine.num_unfinished and dice.random() < 0.05:
            gone.add(lost := dice.choice([*engine._by_id]))
            engine.abort(lost)
    engine.check_idle()
    assert engine._worker.memory.num_kept and engine.num_evictions
    for number, wanted in enumerate(expected):
        got = said[str(number)]
        assert got == (wanted[: len(got)] if str(number) in gone else wanted)


def test_an_llm_says_how_much_was_there(directory: Path) -> None:
    llm = LLM(str(directory), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=1, n=2, ignore_eos=True)
    found = [llm.generate([LONG], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert found == [0, 288]


class Replacing(Fcfs):
    """Whoever has decoded for a while makes way, in the same plan, for one that begins alike."""

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return ReplacingOne(limits, self.config)


class ReplacingOne(ColocatedPart):
    num_replaced = 0

    def plan(self, at: DecodeBoundary) -> None:
        candidates = [request for request in at.requests if not request.num_output]
        if candidates and at.running and at.running[0].num_output == 5:
            at.drop(at.running)
            at.admit(candidates[0])
            type(self).num_replaced += 1
        super().plan(at)


def test_what_is_dropped_for_one_that_begins_alike_becomes_that_ones(directory: Path) -> None:
    expected = [alone(directory, prompt, greedy_params(20)) for prompt in (LONG, BRANCH)]
    engine = make_instance(directory, Replacing, max_num_seqs=1)
    assert tokens(run(engine, [LONG, BRANCH], greedy_params(20))) == expected
    assert ReplacingOne.num_replaced == 1
    engine.check_idle()
