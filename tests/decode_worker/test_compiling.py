"""While an instance compiles a grammar, all other requests continue; the grammar's request ends as usual."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from llguidance import LLMatcher

from alignedserve import demo
from alignedserve.engine.engine import Engine
from alignedserve.instance.worker import Worker
from alignedserve.sampling_params import SamplingParams
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from tests.engine.helpers import make_engine, run, tokens
from tests.island import Entry, Island
from tests.worker_parts import engine_of

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
PROMPT = TOKENIZER.chat_ids([{"role": "user", "content": "Count from 1 to 9."}])
SLOW = StructuredOutputsParams(regex=r"[a-c]{3}-\d{2,4}")
FAST = StructuredOutputsParams(choice=["red", "green", "dark red"])
BAD = StructuredOutputsParams(regex="(")
FREE = SamplingParams(temperature=0, max_tokens=30)


def params_of(structure: StructuredOutputsParams) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=3, max_tokens=40, structured_outputs=structure)


class Held(Grammars):
    """Compiles what is slow when it may."""

    def __init__(self, engine: Engine) -> None:
        vocabulary = engine.vocabulary
        super().__init__(lambda: TOKENIZER, vocabulary.size, vocabulary.eos_token_ids)
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        # that something was compiled on
        self.threads: set[threading.Thread] = set()
        self.owners: list[str] = []

    def compiled(self, wanted: StructuredOutputsParams, owner: str = "") -> LLMatcher:
        self.threads.add(threading.current_thread())
        self.owners.append(owner)
        if wanted != FAST:
            self.has_begun.set()
            assert self.may_end.wait(60)
        return super().compiled(wanted, owner)


class Rig:
    def __init__(self, where: str) -> None:
        self.island = Island(demo.MODEL_DIR, dtype="float32", kv_cache_memory_bytes=16 << 20)
        self.worker: Worker = getattr(self.island, where)
        engine = engine_of(self.worker)
        self.grammars = engine.grammars = Held(engine)
        # where a request stands while it is compiled there
        self.place = where

    def submit(self, structure: StructuredOutputsParams) -> Entry:
        return self.island.submit(PROMPT, params_of(structure))

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Without a wait for what is being compiled in the last turn."""
        self.island.meddle = lambda island: island._wake.set() if is_done() else None
        while not is_done():
            self.island.turn()

    def turn_until_others_are_over(self, slow: Entry) -> None:
        others = [entry for entry in self.island.entries.values() if entry is not slow]
        self.turn_until(lambda: all(entry.place == "over" for entry in others) and slow.place == self.place)
        assert self.grammars.has_begun.wait(60) and not self.grammars.may_end.is_set()

    def finish(self) -> None:
        self.grammars.may_end.set()
        self.island.finish()
        self.check_idle()

    def check_idle(self) -> None:
        for worker in self.island.workers:
            worker.close()
            # what the threads had to say last
            worker.step()
            assert len(worker._compiling) == 0
        assert not self.island.prefill.prompts._matchers
        self.island.check_idle()


@pytest.fixture(params=["prefill", "decode"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.grammars.may_end.set()
    for worker in rig.island.workers:
        worker.close()


def alone(*params: SamplingParams) -> list[list[int]]:
    return tokens(run(make_engine(demo.MODEL_DIR, dtype="float32"), [PROMPT] * len(params), params))


def test_others_are_computed_to_their_end_meanwhile(rig: Rig) -> None:
    slow = rig.submit(SLOW)
    fast, free = rig.submit(FAST), rig.island.submit(PROMPT, FREE)
    rig.turn_until_others_are_over(slow)
    assert len(slow.output) == (rig.place == "decode")
    rig.finish()
    assert [slow.output, fast.output, free.output] == alone(params_of(SLOW), params_of(FAST), FREE)


def test_what_is_compiled_does_not_get_lost_before_it_is_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.text.grammar.MAX_KEPT", 0)
    entries = [rig.submit(structure) for structure in (SLOW, FAST, SLOW)]
    rig.finish()
    assert [entry.output for entry in entries] == alone(*map(params_of, (SLOW, FAST, SLOW)))
    assert rig.grammars.threads and threading.current_thread() not in rig.grammars.threads


def test_a_grammar_is_compiled_for_each_owner(rig: Rig) -> None:
    """Otherwise the time to a token would tell whether another owner uses it."""
    entries = [rig.island.submit(PROMPT, params_of(FAST), owner) for owner in ("key:a", "key:b")]
    rig.finish()
    assert sorted(rig.grammars.owners) == ["key:a", "key:b"]
    assert [entry.output for entry in entries] == alone(params_of(FAST), params_of(FAST))


def test_one_that_takes_long_does_not_hold_up_another_grammar(rig: Rig) -> None:
    slow = rig.submit(SLOW)
    rig.turn_until(lambda: len(rig.worker._compiling) == 1)
    assert rig.grammars.has_begun.wait(60)
    fast = rig.submit(FAST)
    rig.turn_until_others_are_over(slow)
    assert [fast.output] == alone(params_of(FAST))
    rig.finish()


def test_abort_while_it_is_compiled_leaves_nothing(rig: Rig) -> None:
    slow, other = rig.submit(SLOW), rig.island.submit(PROMPT, FREE)
    rig.turn_until_others_are_over(slow)
    rig.island.abort(slow)
    rig.turn_until(lambda: slow.place == "over")
    assert not rig.grammars.may_end.is_set() and engine_of(rig.worker).num_unfinished == 0
    rig.finish()
    assert [other.output] == alone(FREE)


def test_abort_while_others_are_compiled_before_it(rig: Rig) -> None:
    entries = [rig.submit(StructuredOutputsParams(regex=f"a{{{count}}}")) for count in range(2, 6)]
    rig.turn_until(
        lambda: all(entry.place == rig.place for entry in entries) and len(rig.worker._compiling) == 4
    )
    for entry in entries[1:]:
        rig.island.abort(entry)
    rig.turn_until(lambda: all(entry.place == "over" for entry in entries[1:]))
    rig.finish()
    assert TOKENIZER.decode(entries[0].output, skip_special_tokens=True) == "aa"


def test_one_that_does_not_compile_ends_alone(rig: Rig) -> None:
    engine_of(rig.island.prefill).grammars = rig.grammars
    bad, free = rig.submit(BAD), rig.island.submit(PROMPT, FREE)
    rig.finish()
    (news,) = bad.news
    assert (news.tokens, news.finish_reason) == ([], "error")
    assert "structured_outputs.regex" in (news.error or "")
    assert [free.output] == alone(FREE)


def test_a_dead_routers_requests_are_dropped_while_they_are_compiled(rig: Rig) -> None:
    slow, other = rig.submit(SLOW), rig.island.submit(PROMPT, FREE)
    rig.turn_until_others_are_over(slow)
    for worker in rig.island.workers:
        worker.drop_all()
        engine_of(worker).check_idle()
        assert len(worker._compiling) == 0
    # the next one orders it again, while it is still being compiled for nobody
    slow.place, slow.num_cached = "queued", 0
    rig.finish()
    assert [slow.output, other.output] == alone(params_of(SLOW), FREE)
