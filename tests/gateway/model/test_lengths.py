"""Lengths are predicted on the way in, learned at the end, counted, and outlive the gateway."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve import LLM, SamplingParams, demo
from alignedserve.demo.tasks import TASKS
from alignedserve.gateway.http.keys import owners_of
from alignedserve.gateway.model import lengths as module
from alignedserve.gateway.model.lengths import MAX_LEARNING, AnswerLengths
from alignedserve.lengths.config import LengthConfig
from alignedserve.lengths.owners import Predictors
from alignedserve.lengths.prediction import Prediction
from alignedserve.lengths.state import dump
from alignedserve.protocol.messages import NewTokens, Submit, Tokens
from alignedserve.store.redis_store import RedisStore
from alignedserve.types import InstanceId
from tests.gateway.observed import Observed, observed
from tests.gateway.scripted import MODEL, ScriptedRouter, answer_of
from tests.gateway.served import play
from tests.store.redis_process import redis_running

NUM_TOKENS = len(answer_of("one two three"))
NAME = "lengths:demo"
OFTEN = LengthConfig(save_s=0.05)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a prediction may wait for the processor; what is tested here is not how long."""
    monkeypatch.setitem(module.PATIENCE_S, "rt", 10.0)


class ModelRouter(ScriptedRouter):
    """Answers with the demo model's own words, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self._llm = LLM(str(demo.MODEL_DIR), use_tqdm=False, max_model_len=512)

    def _submit(self, gateway: InstanceId, submit: Submit) -> None:
        self.submitted.append(submit)
        params = SamplingParams(temperature=0, max_tokens=300)
        [result] = self._llm.generate([{"prompt_token_ids": submit.request.prompt}], params, use_tqdm=False)
        tokens = list(result.outputs[0].token_ids)
        reason = result.outputs[0].finish_reason
        self.hub.send(gateway, Tokens([NewTokens(submit.request.key, 0, tokens, finish_reason=reason)]))


async def ask(at: Observed, text: str, **options: object) -> None:
    messages = [{"role": "user", "content": text}]
    response = await at.http.post("/v1/chat/completions", json={"messages": messages} | options)
    assert response.status_code == 200, response.text


def prompts_of(task: str, count: int, at_least: int, seed: int) -> list[str]:
    """Whose answers have so many characters."""
    rng = random.Random(seed)
    examples = (TASKS[task].generate(rng) for _ in iter(int, 1))
    found = (each.prompt for each in examples if len(each.answer) >= at_least)
    return [next(found) for _ in range(count)]


@pytest.mark.slow
def test_counting_is_learned_to_be_long_and_adding_to_be_short() -> None:
    async def scenario() -> None:
        async with observed(ModelRouter()) as at:
            known = [*prompts_of("count", 36, 60, seed=0), *prompts_of("add", 36, 0, seed=0)]
            random.Random(1).shuffle(known)
            for text in known:
                await ask(at, text)
            assert at.router.submitted[0].predicted_len == 0
            counts, adds = prompts_of("count", 6, 60, seed=2), prompts_of("add", 6, 0, seed=2)
            for text in (*counts, *adds):
                await ask(at, text)
            predicted = [submit.predicted_len for submit in at.router.submitted[len(known) :]]
            assert min(predicted[:6]) > 2 * max(predicted[6:])
            assert fmean(predicted[6:]) == pytest.approx(11, abs=3), predicted
            found = await at.metrics()
            assert found['length_predictions_total{source="unknown",tier="rt"}'] == 1
            assert found['length_predictions_total{source="neighbours",tier="rt"}'] >= 12
            assert found['length_prediction_relative_error_count{tier="rt"}'] == len(known) + 12 - 1

    play(scenario)


def test_all_choices_of_a_prompt_are_learned_and_limits_are_kept() -> None:
    async def scenario() -> None:
        async with observed() as at:
            for _ in range(2):
                await ask(at, "How far?", n=3)
            await ask(at, "How far?", max_tokens=2)
            await ask(at, "How far?", service_tier="flex")
            lengths = [submit.predicted_len for submit in at.router.submitted]
            assert lengths == [0, 0, 0, *([NUM_TOKENS] * 3), 2, NUM_TOKENS]

    play(scenario)


def test_no_key_learns_from_anothers_answers_or_sees_that_there_were_any() -> None:
    async def scenario() -> None:
        owners = owners_of(["one", "other"], None, ["operator"])
        async with observed(key_owners=owners) as at:
            at.http.headers["authorization"] = "Bearer operator"

            async def asked(key: str) -> int:
                """Returns the predicted length."""
                body = {"messages": [{"role": "user", "content": "How far?"}]}
                headers = {"authorization": f"Bearer {key}"}
                answer = await at.http.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200
                return at.router.submitted[-1].predicted_len

            assert [await asked(key) for key in ("one", "one", "other")] == [0, NUM_TOKENS, 0]
            found = await at.metrics()
            assert found['length_predictions_total{source="unknown",tier="rt"}'] == 2

    play(scenario)


def test_a_stop_string_ends_it_where_the_client_sees_it_end() -> None:
    async def scenario() -> None:
        async with observed() as at:
            at.router.allowed = NUM_TOKENS - 2
            for _ in range(2):
                await ask(at, "How far?", stop=" two")
            assert 0 < at.router.submitted[1].predicted_len < NUM_TOKENS

    play(scenario)


def test_without_a_predictor_nothing_is_foreseen() -> None:
    async def scenario() -> None:
        async with observed(lengths=LengthConfig("none")) as at:
            for _ in range(2):
                await ask(at, "How far?")
            assert [submit.predicted_len for submit in at.router.submitted] == [0, 0]
            assert (await at.metrics())['length_predictions_total{source="none",tier="rt"}'] == 2

    play(scenario)


class Slow(Predictors):
    """Takes until the test goes on."""

    may_go_on = threading.Event()

    def predict(
        self, prompt: Sequence[int], params: SamplingParams, tier: str, owner: str = ""
    ) -> Prediction:
        assert self.may_go_on.wait(60)
        return super().predict(prompt, params, tier, owner)


def test_nobody_waits_long_for_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Predictors", Slow)
    monkeypatch.setitem(module.PATIENCE_S, "rt", 0.02)
    monkeypatch.setitem(module.PATIENCE_S, "be", 60.0)
    Slow.may_go_on.set()

    async def scenario() -> None:
        async with observed() as at:
            await ask(at, "How far?", service_tier="flex")
            Slow.may_go_on.clear()
            await ask(at, "How far?")
            Slow.may_go_on.set()
            await ask(at, "How far?", service_tier="flex")
            assert [submit.predicted_len for submit in at.router.submitted] == [0, 0, NUM_TOKENS]
            found = await at.metrics()
            assert found['length_predictions_total{source="none",tier="rt"}'] == 1
            assert found['length_predictions_total{source="none",tier="be"}'] == 0

    play(scenario)


class Broken(Predictors):
    def predict(
        self, prompt: Sequence[int], params: SamplingParams, tier: str, owner: str = ""
    ) -> Prediction:
        raise ArithmeticError("of this test")


def test_a_predictor_that_fails_costs_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "Predictors", Broken)

    async def scenario() -> None:
        async with observed() as at:
            await ask(at, "How far?")
        assert "a length was not predicted" in caplog.text

    play(scenario)


@asynccontextmanager
async def redis_store_at(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url)
    try:
        yield store
    finally:
        await store.close()


def with_store(scenario: Callable[[str], Awaitable[None]]) -> None:
    async def started() -> None:
        async with redis_running() as redis:
            await scenario(redis.url)

    play(started)


def test_what_was_learned_outlives_the_gateway() -> None:
    async def scenario(url: str) -> None:
        async with redis_store_at(url) as store, observed(store_url=url, lengths=OFTEN) as at:
            await ask(at, "How far?")
            while await store.state(NAME) is None:
                await asyncio.sleep(0.02)
        async with observed(store_url=url) as at:
            while not lengths_of(at):
                await asyncio.sleep(0.01)
            await ask(at, "How far?")
            assert at.router.submitted[0].predicted_len == NUM_TOKENS
            assert lengths_of(at) == 1

    with_store(scenario)


def lengths_of(at: Observed) -> int:
    """Prompts that it knows."""
    predictors = at.process._lengths._predictors
    return predictors.num_prompts if predictors else 0


def test_what_is_learned_last_is_saved_at_the_end() -> None:
    async def scenario(url: str) -> None:
        async with redis_store_at(url) as store:
            async with observed(store_url=url, lengths=OFTEN) as at:
                await ask(at, "How far?")
                while (saved := await store.state(NAME)) is None:
                    await asyncio.sleep(0.02)
                at.process._lengths._config = LengthConfig(save_s=3600)
                await asyncio.sleep(2 * OFTEN.save_s)
                await ask(at, "How near?")
            assert await store.state(NAME) != saved

    with_store(scenario)


def test_a_corrupt_state_is_set_aside_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(url: str) -> None:
        async with redis_store_at(url) as store:
            await store.put_state(NAME, b"rubbish")
            async with observed(store_url=url) as at:
                while await store.state(f"{NAME}:set-aside") is None:
                    await asyncio.sleep(0.01)
                await ask(at, "How far?")
            assert "set aside: its checksum is wrong" in caplog.text
            assert await store.state(f"{NAME}:set-aside") == b"rubbish"
            assert await store.state(NAME) != b"rubbish"

    with_store(scenario)


def test_of_many_answers_at_once_few_are_with_the_thread_and_a_prediction_goes_before() -> None:
    async def scenario() -> None:
        lengths = AnswerLengths(LengthConfig("hash"))
        lengths.prepare(MODEL)
        params = SamplingParams(max_tokens=100)
        async with lengths.running("demo", None):
            (prediction,) = await lengths.predict([[5, 6, 7]], params, "be")
            for reason in ["stop"] * 50 + ["abort"] * 50:
                lengths.ended(ended(prediction, reason))
            assert (len(lengths._learning), len(lengths._unlearned)) == (MAX_LEARNING, 50 - MAX_LEARNING)
            # however slow the machine is: best effort waits for its prediction
            assert await lengths.predict([[5, 6, 7]], params, "be") != [None]
            assert lengths._unlearned
            while lengths._unlearned or lengths._learning:
                assert len(lengths._learning) <= MAX_LEARNING
                await asyncio.sleep(0)
            assert lengths._num_unsaved == 50

    play(scenario)


def test_a_corpus_teaches_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its lines as many count as there are entries."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["one", "one two three four five six seven", "four"]
    lines = [json.dumps({"prompt": f"say {each}", "answer": each}) for each in words]
    # Neither has room, and both count as lines.
    long = [
        {"prompt": "say " * MODEL.max_model_len, "answer": ""},
        {"prompt": "", "answer": "a " * MODEL.max_model_len},
    ]
    (tmp_path / "said.jsonl").write_text("\n".join([*lines[:2], *map(json.dumps, long), "no JSON"]))
    lengths = AnswerLengths(LengthConfig("hash", predictor_entries=4, corpus="~/said.jsonl"))
    lengths.prepare(MODEL)
    tokenizer = MODEL.tokenizer
    assert tokenizer
    caplog.set_level("INFO")

    async def scenario() -> None:
        async with lengths.running("demo", None):
            assert "lengths of 2 answers were learned" in caplog.text and "2 were skipped" in caplog.text
            for each in words[:2]:
                prompt = tokenizer.chat_ids([{"role": "user", "content": f"say {each}"}])
                (found,) = await lengths.predict([prompt], SamplingParams(max_tokens=100), "rt")
                assert found and found.similarity == pytest.approx(1, abs=0.01)
                num_tokens = len(tokenizer.encode(each, add_special_tokens=False)) + 1
                assert found.guesses["neighbours"] == pytest.approx(num_tokens, abs=2)

    play(scenario)


@pytest.mark.parametrize(("text", "why"), [("{", "line 1: Expecting"), (None, "No such file")])
def test_a_corpus_that_can_not_be_read_is_named(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "corpus.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"length_corpus='{path}': .*{why}"):
        AnswerLengths(LengthConfig("hash", corpus=str(path))).prepare(MODEL)
    with pytest.raises(ValueError, match="length_corpus: needs a length_predictor"):
        LengthConfig("none", corpus=str(path))


def test_a_corpus_that_goes_wrong_after_its_first_line_is_named_before_anything_is_served(
    tmp_path: Path,
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"prompt": "one", "answer": "two"}\n{')
    lengths = AnswerLengths(LengthConfig("hash", corpus=str(path)))
    lengths.prepare(MODEL)

    async def scenario() -> None:
        with pytest.raises(ValueError, match=f"length_corpus='{path}': .*line 2: Expecting"):
            async with lengths.running("demo", None):
                raise AssertionError("it must not run")
        assert not [each for each in threading.enumerate() if each.name.startswith("lengths")]

    play(scenario)


class OneState:
    """A store of a single state."""

    def __init__(self, saved: bytes | None) -> None:
        self.saved = saved

    async def state(self, name: str) -> bytes | None:
        return self.saved

    async def put_state(self, name: str, saved: bytes) -> None:
        self.saved = saved


def test_a_corpus_is_read_only_where_nothing_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"say {each}", "answer": each}) for each in ("one", "two"))
    )
    caplog.set_level("INFO")

    async def num_known(store: Any) -> int:
        lengths = AnswerLengths(LengthConfig("hash", corpus=str(path)))
        lengths.prepare(MODEL)
        async with lengths.running("demo", store):
            assert lengths._predictors
            return lengths._predictors.num_prompts

    async def scenario() -> None:
        assert await num_known(OneState(None)) == 2 and "learned from" in caplog.text
        caplog.clear()
        empty = AnswerLengths(LengthConfig("hash"))
        empty.prepare(MODEL)
        async with empty.running("demo", None):
            assert empty._predictors
            store = OneState(dump(empty._predictors))
        assert await num_known(store) == 0 and "learned from" not in caplog.text

    play(scenario)


def ended(prediction: Prediction | None, reason: str) -> Any:
    request = SimpleNamespace(owner="")
    return SimpleNamespace(prediction=prediction, num_tokens=10, end_reason=reason, request=request)
