"""Prompts that begin alike: the KV is shared, the answers are the same, and nothing is shared that should not be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from msgspec.structs import replace

from alignedserve import demo
from alignedserve.engine.engine import Engine
from alignedserve.protocol.messages import Abort, ForgetAll, Prefill, Work
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import PoolBlockId, RequestKey
from tests.engine.helpers import greedy_params
from tests.prefill_worker.rig import BLOCK, KEY, Interrupting, Rig, work
from tests.tiny_models import VOCAB_SIZE, oracle, prompts
from tests.worker_parts import engine_of

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"
# 300 tokens, and one that has its first 100
LONG = prompts()[8]
BRANCH = LONG[:100] + [(token + 1) % VOCAB_SIZE for token in LONG[100:130]]
# Two that share nothing with it
SHORT, TURNED = LONG[200:265], LONG[150:] + LONG[:150]
OTHER = RequestKey(8)
# of the pool, so that no two requests have blocks in common
OTHERS_BLOCKS = 32


@pytest.fixture
def rig(tiny_model: Directory) -> Iterator[Rig]:
    with closing(Rig(tiny_model(FAMILY), enable_prefix_caching=True)) as rig:
        yield rig


def other(
    prompt: list[int], params: SamplingParams | None = None, salt: str = "", num_cached: int = 0
) -> Work:
    made = work(prompt, params, num_cached, OTHER)
    blocks = [PoolBlockId(block + OTHERS_BLOCKS) for block in made.blocks]
    return replace(made, blocks=blocks, request=replace(made.request, cache_salt=salt))


def run(rig: Rig, ordered: Work) -> int:
    """To its end. Returns of how many tokens the KV was there."""
    num_news = len(rig.news)
    rig.worker.on(Prefill([ordered]))
    rig.step_until(lambda: rig.news[num_news:] and engine_of(rig.worker).num_unfinished == 0)
    (news,) = rig.news[num_news:]
    return news.num_reused


def first_token(directory: Path, prompt: list[int]) -> int:
    with torch.inference_mode():
        return int(oracle(directory)(torch.tensor([prompt])).logits[0, -1].argmax())


def test_a_prompt_that_begins_like_an_earlier_one_goes_on_from_there(rig: Rig, tiny_model: Directory) -> None:
    assert run(rig, work(LONG)) == 0
    assert run(rig, other(BRANCH)) == 96
    assert rig.news[-1].tokens == [first_token(tiny_model(FAMILY), BRANCH)]
    progress = [each for report in rig.reports for each in report.progress]
    assert [each for each in progress if each[0] == OTHER] == [(OTHER, 96, 96)]
    assert sum(report.num_computed for report in rig.reports) == len(LONG) + len(BRANCH) - 96
    assert sum(report.num_asked for report in rig.reports) == len(LONG) + len(BRANCH)
    assert sum(report.num_found for report in rig.reports) == 96
    # in the pool each has its own
    assert np.array_equal(rig.pool[OTHERS_BLOCKS : OTHERS_BLOCKS + 6], rig.pool[:6])
    assert not np.array_equal(rig.pool[OTHERS_BLOCKS + 6], rig.pool[6])
    rig.check_idle()


def test_its_kv_is_that_of_one_computed_alone(rig: Rig, tiny_model: Directory) -> None:
    run(rig, work(LONG))
    run(rig, other(BRANCH))
    with closing(Rig(tiny_model(FAMILY))) as alone:
        run(alone, other(BRANCH))
    num_blocks = len(BRANCH) // BLOCK
    shared, own = (each.pool[OTHERS_BLOCKS : OTHERS_BLOCKS + num_blocks] for each in (rig, alone))
    assert own.any() and np.array_equal(shared, own)


@pytest.mark.parametrize("num_cached", [0, 64, 96])
@pytest.mark.parametrize("family", ["mistral-window", "ministral"])
def test_with_a_window_it_saves_all_that_the_pool_lacks(
    tiny_model: Directory, family: str, num_cached: int
) -> None:
    """Sliding layers attend to the latest 24 tokens: after 96, the first four columns are passed."""
    with closing(Rig(tiny_model(family), enable_prefix_caching=True)) as rig:
        run(rig, work(LONG))
        size = rig.worker.engine.span.num_groups
        there, mine = (rig.pool[at * size :] for at in (0, OTHERS_BLOCKS))
        num_there = num_cached // BLOCK * size
        mine[:num_there] = there[:num_there]
        ordered = replace(other(BRANCH, num_cached=num_cached), num_found=num_cached)
        assert run(rig, ordered) == 96
        assert rig.news[-1].tokens == [first_token(tiny_model(family), BRANCH)]
        rig.step_until(lambda: OTHER in {key for report in rig.reports for key, _ in report.saved})
        assert there[: 6 * size].any(axis=1).all() and np.array_equal(mine[: 6 * size], there[: 6 * size])
        assert moved(rig, "load") == 0
        rig.check_idle()


def test_of_the_same_prompt_the_last_token_is_computed_all_the_same(rig: Rig) -> None:
    run(rig, work(LONG[:64]))
    assert run(rig, other(LONG[:64])) == 48
    assert rig.news[0].tokens == rig.news[1].tokens
    rig.check_idle()


def test_all_full_blocks_serve_a_longer_one(rig: Rig) -> None:
    run(rig, work(LONG[:64]))
    assert run(rig, other(LONG[:65])) == 64


def test_one_that_still_runs_is_shared_with(rig: Rig, tiny_model: Directory) -> None:
    rig.worker.on(Prefill([work(LONG)]))
    rig.step()
    rig.step()
    rig.worker.on(Prefill([other(BRANCH)]))
    rig.step_until(lambda: {KEY, OTHER} <= {key for report in rig.reports for key, _ in report.saved})
    news = {each.key: each for each in rig.news}
    assert news[OTHER].num_reused == 80
    for key, prompt in ((KEY, LONG), (OTHER, BRANCH)):
        assert news[key].tokens == [first_token(tiny_model(FAMILY), prompt)]
    rig.check_idle()


@pytest.mark.parametrize("num_steps", range(10))
def test_either_may_end_while_they_share(rig: Rig, num_steps: int, tiny_model: Directory) -> None:
    for aborted, left, prompt in ((KEY, OTHER, BRANCH), (OTHER, KEY, LONG)):
        rig.said.clear()
        rig.worker.on(Prefill([work(LONG)]))
        rig.step()
        rig.worker.on(Prefill([other(BRANCH)]))
        for _ in range(num_steps):
            rig.step()
        rig.worker.on(Abort([aborted]))

        def is_over(key: RequestKey = left) -> bool:
            return key in {each.key for each in rig.news} and not engine_of(rig.worker).num_unfinished

        rig.step_until(is_over)
        (news,) = [each for each in rig.news if each.key == left]
        assert news.tokens == [first_token(tiny_model(FAMILY), prompt)]
        engine_of(rig.worker).check_idle()
    rig.check_idle()


def test_salts_keep_prompts_apart(rig: Rig) -> None:
    run(rig, work(LONG))
    assert run(rig, other(LONG, salt="a")) == 0
    assert run(rig, other(LONG, salt="b")) == 0
    assert run(rig, other(LONG, salt="a")) == 288


def test_tokens_are_not_taken_for_a_salt(rig: Rig) -> None:
    plain = [token % 128 for token in LONG]
    salt = np.asarray(plain[:16], dtype=np.int32).tobytes().decode()
    run(rig, work(plain))
    assert run(rig, other(plain[16:], salt=salt)) == 0


def test_where_log_probabilities_of_the_prompt_are_asked_for_all_of_it_is_computed(rig: Rig) -> None:
    run(rig, work(LONG))
    assert run(rig, other(LONG, greedy_params(prompt_logprobs=0))) == 0
    assert rig.news[-1].prompt_logprobs
    # and it serves others
    assert run(rig, work(LONG)) == 288


def test_a_prompt_that_ended_with_its_first_token_serves_others(rig: Rig) -> None:
    run(rig, work(LONG, greedy_params(max_tokens=1)))
    assert run(rig, other(BRANCH)) == 96


def test_what_came_out_of_the_pool_serves_others(rig: Rig) -> None:
    run(rig, work(LONG))
    rig.worker.memory.forget_all()
    assert run(rig, other(LONG)) == 0
    half = replace(work(LONG, num_cached=160), blocks=other(LONG).blocks)
    rig.worker.memory.forget_all()
    run(rig, half)
    assert run(rig, other(LONG)) == 288
    assert len({tuple(news.tokens) for news in rig.news}) == 1


def test_what_went_wrong_serves_nobody(rig: Rig) -> None:
    run(rig, work(LONG[:40]))
    kv = engine_of(rig.worker).cache.blocks
    kv[:, :, :, :, :, 0] = float("nan")
    assert run(rig, other(LONG)) == 32
    assert rig.news[-1].finish_reason == "error" and rig.news[-1].is_spoilt
    kv.zero_()
    # neither what it computed nor what it shared
    assert run(rig, work(LONG)) == 0
    assert rig.news[-1].finish_reason is None and not rig.news[-1].is_spoilt
    rig.check_idle()


def test_what_went_wrong_gets_no_name_from_another_one_that_has_it(rig: Rig) -> None:
    run(rig, work(LONG[:40]))
    engine_of(rig.worker).cache.blocks[:, :, :, :, :, 0] = float("nan")
    # in one iteration it ends, and the long one, which shares the same blocks, computes a chunk
    rig.worker.on(Prefill([work(LONG[:40]), other(LONG)]))
    rig.step()
    (news,) = rig.news[1:]
    assert news.error and engine_of(rig.worker).num_unfinished == 1
    rig.worker.on(Prefill([work(LONG[:40], key=RequestKey(9))]))
    rig.step_until(lambda: engine_of(rig.worker).num_unfinished == 0)
    assert {each.key: each.num_reused for each in rig.news[1:]} == {KEY: 32, OTHER: 32, RequestKey(9): 0}


def test_nor_does_what_continues_it(rig: Rig) -> None:
    run(rig, work(LONG[:100]))
    run(rig, other(BRANCH))
    kv = engine_of(rig.worker).cache.blocks
    kv[:, :, :, :, :, 0] = float("nan")
    run(rig, work(LONG[:100]))
    assert rig.news[-1].is_spoilt
    kv.zero_()
    # It makes the common beginning known again, and not what once continued it.
    assert run(rig, work(LONG[:100])) == 0
    assert run(rig, other(BRANCH)) == 96


def test_an_instance_that_forgets_everything_shares_neither_old_kv_nor_that_of_its_prompts(rig: Rig) -> None:
    run(rig, work(LONG[:100]))
    run(rig, work(SHORT, key=RequestKey(9)))
    # One prompt has begun, and another one waits.
    rig.worker.on(Prefill([work(LONG)]))
    rig.step()
    rig.worker.on(Prefill([work(TURNED, key=RequestKey(10))]))
    rig.worker.on(ForgetAll(era=1))
    rig.step_until(lambda: engine_of(rig.worker).num_unfinished == 0)
    # Another one was sent before the router had begun the new era.
    assert run(rig, work(LONG, key=RequestKey(13))) == 0
    since = [(LONG, 2), (SHORT, 11), (TURNED, 12)]
    assert [run(rig, replace(work(each, key=RequestKey(key)), era=1)) for each, key in since] == [0, 0, 0]
    # What was computed since is shared again.
    assert run(rig, replace(work(LONG), era=1)) == 288


def ends_after_all_is_forgotten(rig: Rig, num_news: int = 1) -> None:
    """A prompt that the instance has already ends, and another one finds nothing of it."""
    rig.worker.on(ForgetAll(era=1))
    rig.step_until(lambda: len(rig.news) == num_news and engine_of(rig.worker).num_unfinished == 0)
    assert run(rig, replace(other(LONG), era=1)) == 0


class HeldGrammars(Grammars):
    def __init__(self, engine: Engine) -> None:
        tokenizer = Tokenizer.from_directory(demo.MODEL_DIR)
        super().__init__(lambda: tokenizer, engine.vocabulary.size, engine.vocabulary.eos_token_ids)
        self.may_compile = Event()

    def compiled(self, wanted: StructuredOutputsParams, owner: str = "") -> LLMatcher:
        self.may_compile.wait()
        return super().compiled(wanted, owner)


def test_a_prompt_that_waits_for_its_grammar_while_all_is_forgotten_serves_no_other() -> None:
    with closing(Rig(demo.MODEL_DIR, kv_bytes=16 << 20, enable_prefix_caching=True)) as rig:
        run(rig, work(LONG))
        engine = engine_of(rig.worker)
        rig.worker.memory.forget_all()
        engine.grammars = grammars = HeldGrammars(engine)
        params = greedy_params(structured_outputs=StructuredOutputsParams(choice=["red", "green"]))
        rig.worker.on(Prefill([work(LONG, params, num_cached=160)]))
        rig.worker.on(ForgetAll(era=1))
        grammars.may_compile.set()
        ends_after_all_is_forgotten(rig, num_news=2)


def test_a_prompt_that_is_preempted_after_all_is_forgotten_serves_no_other(tiny_model: Directory) -> None:
    with closing(
        Rig(tiny_model(FAMILY), enable_prefix_caching=True, policy=Interrupting(SchedulingConfig()))
    ) as rig:
        rig.worker.on(Prefill([work(LONG)]))
        rig.step()
        ends_after_all_is_forgotten(rig)
        assert moved(rig, "load")


def test_a_windowed_prompt_that_waits_with_kv_elsewhere_serves_no_other(tiny_model: Directory) -> None:
    with closing(Rig(tiny_model("mistral-window"), enable_prefix_caching=True)) as rig:
        run(rig, work(LONG))
        rig.worker.memory.forget_all()
        rig.worker.on(Prefill([work(LONG, num_cached=160)]))
        ends_after_all_is_forgotten(rig, num_news=2)


def test_a_prompt_that_is_alone_neither_finds_kv_nor_leaves_any(rig: Rig) -> None:
    run(rig, replace(work(LONG), is_alone=True))
    assert run(rig, other(LONG)) == 0
    assert run(rig, replace(work(LONG), is_alone=True)) == 0


def test_what_a_resumed_prompt_finds_is_not_said_again(rig: Rig) -> None:
    run(rig, work(LONG))
    assert run(rig, other(LONG)) == 288
    resumed = replace(other(LONG), output=rig.news[-1].tokens)
    assert run(rig, resumed) == 0
    assert sum(report.num_found for report in rig.reports) == 2 * 288


def test_room_that_is_needed_is_taken_from_what_was_left_first(tiny_model: Directory) -> None:
    small = Rig(tiny_model(FAMILY), kv_bytes=1 << 20, enable_prefix_caching=True)
    num_prompts = small.worker.engine.limits.num_blocks // (-(-len(LONG) // BLOCK))
    turned = [LONG[at:] + LONG[:at] for at in range(num_prompts + 1)]
    assert [run(small, work(prompt)) for prompt in turned[:num_prompts]] == [0] * num_prompts
    assert run(small, other(turned[0])) == 288
    assert run(small, work(turned[num_prompts])) == 0
    # used since, the first one is there; the second one's end is gone
    assert run(small, other(turned[0])) == 288
    assert run(small, other(turned[1])) < 288
    small.check_idle()


def test_it_can_be_left_off(tiny_model: Directory) -> None:
    with closing(Rig(tiny_model(FAMILY))) as plain:
        run(plain, work(LONG))
        assert run(plain, other(LONG)) == 0
        assert not any(report.num_asked for report in plain.reports)


# ---- with KV of other requests in the pool ---------------------------------------------------------------------------


def found(prompt: list[int], num_found: int, key: RequestKey = OTHER, first_own: int = OTHERS_BLOCKS) -> Work:
    """A prompt for which the pool has found the first tokens in the blocks of `work`."""
    made = work(prompt, None, num_found, key)
    own = [PoolBlockId(block + first_own) for block in made.blocks[num_found // BLOCK :]]
    return replace(made, blocks=[*made.blocks[: num_found // BLOCK], *own], num_found=num_found)


def moved(rig: Rig, what: str) -> int:
    """The number of blocks that were copied."""
    num_bytes = sum(each.num_bytes for report in rig.reports for each in report.moved if each.what == what)
    return num_bytes // rig.worker.engine.format.block_bytes


def test_what_another_instance_has_left_in_the_pool_is_loaded_and_the_rest_computed(
    rig: Rig, tiny_model: Directory
) -> None:
    run(rig, work(LONG))
    with closing(Rig(tiny_model(FAMILY), enable_prefix_caching=True)) as second:
        second.pool[:] = rig.pool
        before = second.pool[:OTHERS_BLOCKS].copy()
        assert run(second, found(BRANCH, 96)) == 96
        assert second.news[-1].tokens == [first_token(tiny_model(FAMILY), BRANCH)]
        assert (moved(second, "load"), moved(second, "save")) == (6, 3)
        assert sum(report.num_computed for report in second.reports) == len(BRANCH) - 96
        # of what others list, nothing is written
        assert np.array_equal(second.pool[:OTHERS_BLOCKS], before)
        # what was loaded serves the next prompt here
        assert run(second, found(LONG[:120], 0, KEY, 48)) == 96
        assert moved(second, "load") == 6
        second.check_idle()


@pytest.mark.parametrize(("num_found", "num_loaded"), [(48, 0), (96, 0), (112, 1), (160, 4)])
def test_only_what_is_not_here_is_loaded_and_only_what_is_not_in_the_pool_is_saved(
    rig: Rig, tiny_model: Directory, num_found: int, num_loaded: int
) -> None:
    """The instance has 96 tokens, and the pool more or fewer."""
    with closing(Rig(tiny_model(FAMILY))) as alone:
        run(alone, work(LONG[:200]))
    run(rig, work(LONG[:100]))
    rig.pool[:] = alone.pool
    rig.pool[16:] = 0
    rig.said.clear()
    assert run(rig, found(LONG[:200], num_found)) == max(num_found, 96)
    assert rig.news[-1].tokens == [first_token(tiny_model(FAMILY), LONG[:200])]
    assert moved(rig, "load") == num_loaded
    num_columns = -(-200 // BLOCK)
    assert moved(rig, "save") == num_columns - num_found // BLOCK
    assert sum(report.num_computed for report in rig.reports) == 200 - max(num_found, 96)
    first = num_found // BLOCK
    saved = rig.pool[OTHERS_BLOCKS + first : OTHERS_BLOCKS + num_columns]
    assert np.array_equal(saved[:-1], alone.pool[first : num_columns - 1])
    rig.check_idle()


def test_a_prompt_that_was_preempted_shares_again_what_is_here(rig: Rig, tiny_model: Directory) -> None:
    """What it had computed before, in the pool and here, is not reported as another prompt's."""
    run(rig, work(LONG[:100]))
    rig.said.clear()
    resumed = replace(found(LONG[:200], 0), num_cached=120)
    with closing(Rig(tiny_model(FAMILY))) as alone:
        run(alone, work(LONG[:200]))
    for column, block in enumerate(resumed.blocks):
        rig.pool[block] = alone.pool[column]
    assert run(rig, resumed) == 0
    assert rig.news[-1].tokens == [first_token(tiny_model(FAMILY), LONG[:200])]
    assert moved(rig, "load") == 2 and sum(report.num_asked for report in rig.reports) == 0
    rig.check_idle()
