"""A prompt's log-probabilities in answers: in an echo as OpenAI had them, and in vLLM's `prompt_logprobs`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.protocol.messages import NewTokens, Request, Tokens
from alignedserve.protocol.prompt_logprobs import MAX_PROMPT_LOGPROBS, TokenLogprobs, pack
from alignedserve.types import RequestKey
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import QUESTION, Served, play, served

PROMPT = TOKENIZER.encode("How far is it?")
TEXTS = [MODEL.token_text(token) for token in PROMPT]
SAID = [MODEL.token_text(token) for token in answer_of("one two three")]
# likeliest everywhere, in this order
LIKELIEST = [PROMPT[1], 7, 9]


class Telling(ScriptedRouter):
    """With the first token, as a prefill instance tells it."""

    def _tokens(self, request: Request, news: NewTokens) -> NewTokens:
        count = request.params.prompt_logprobs
        if count is not None and not news.first:
            news.prompt_logprobs = pack([told(place, count) for place in range(1, len(request.prompt))])
        return news


def told(place: int, count: int) -> TokenLogprobs:
    likeliest = {token: -0.5 * rank for rank, token in enumerate(LIKELIEST[:count], 1)}
    return -1.0 - place, 4 if place > 1 else 1, likeliest


def top(place: int, count: int) -> dict[str, float]:
    _, _, likeliest = told(place, count)
    return {MODEL.token_text(token): logprob for token, logprob in likeliest.items()} | {
        TEXTS[place]: -1.0 - place
    }


async def completion(at: Served, **options: Any) -> dict[str, Any]:
    response = await at.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 50} | options)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def check_echoed(logprobs: dict[str, Any], count: int, num_said: int) -> None:
    texts = [*TEXTS, *SAID[:num_said]]
    assert logprobs["tokens"][: len(texts)] == texts
    assert logprobs["text_offset"] == [sum(map(len, texts[:place])) for place in range(len(texts))]
    assert logprobs["token_logprobs"][: len(TEXTS)] == [None, *(-1.0 - i for i in range(1, len(TEXTS)))]
    assert logprobs["top_logprobs"][: len(TEXTS)] == [None, *(top(i, count) for i in range(1, len(TEXTS)))]
    assert all(len(each) == len(texts) for each in logprobs.values())


@pytest.mark.parametrize("count", [0, 2])
def test_an_echo_has_the_prompts_logprobs_before_the_answers(count: int) -> None:
    async def scenario() -> None:
        async with served(Telling()) as at:
            answer = await completion(at, echo=True, logprobs=count, n=2)
            for choice in answer["choices"]:
                assert choice["text"] == "How far is it?one two three"
                check_echoed(choice["logprobs"], count, len(SAID))
                assert "prompt_logprobs" not in choice
            # all of the prompt is computed for these: once, and others share that
            asked = [each.request.params.prompt_logprobs for each in at.router.submitted]
            assert sorted(asked, key=str) == [count, None]

    play(scenario)


def test_a_streamed_echo_begins_with_the_prompts() -> None:
    async def scenario() -> None:
        async with served(Telling()) as at:
            body = {"prompt": PROMPT, "max_tokens": 50, "echo": True, "logprobs": 2, "stream": True}
            response = await at.post("/v1/completions", body)
            chunks = [
                json.loads(event.removeprefix("data: ")) for event in response.text.strip().split("\n\n")[:-1]
            ]
            choices = [chunk["choices"][0] for chunk in chunks]
            assert choices[0]["text"] == "How far is it?"
            check_echoed(choices[0]["logprobs"], 2, 0)
            lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            joined = {name: [each for some in lists for each in some[name]] for name in lists[0]}
            check_echoed(joined, 2, len(SAID))

    play(scenario)


class AtOnce(Telling):
    """All of an answer in two messages, cut in the middle of a character."""

    def _say(self, key: RequestKey) -> None:
        gateway, request, _ = self._open.pop(key)
        for first, end in ((0, 2), (2, len(self.answer))):
            tokens = self.answer[first:end]
            reason = "stop" if end == len(self.answer) else None
            logprobs: list[TokenLogprobs] = [(-0.25, 1, {token: -0.25}) for token in tokens]
            news = self._tokens(request, NewTokens(key, first, tokens, logprobs, reason))
            self.hub.send(gateway, Tokens([news]))


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("router", [Telling, AtOnce])
def test_tokens_that_are_part_of_a_character_share_its_offset(router: type[Telling], is_stream: bool) -> None:
    async def scenario() -> None:
        async with served(router(answer=answer_of("a\u20acb\u20ac"))) as at:
            body = {
                "prompt": "x\u20ac\u20ac",
                "max_tokens": 50,
                "echo": True,
                "logprobs": 1,
                "stream": is_stream,
            }
            response = await at.post("/v1/completions", body)
            events = response.text.strip().split("\n\n")[:-1] if is_stream else [response.text]
            choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
            assert "".join(choice["text"] for choice in choices) == "x\u20ac\u20aca\u20acb\u20ac"
            lists = [choice["logprobs"]["text_offset"] for choice in choices if choice["logprobs"]]
            offsets = [offset for some in lists for offset in some]
            assert offsets == [0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7]

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_of_no_tokens_is_the_prompt_alone(is_stream: bool) -> None:
    async def scenario() -> None:
        async with served(Telling()) as at:
            body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": is_stream}
            response = await at.post("/v1/completions", body)
            if is_stream:
                events = response.text.strip().split("\n\n")[:-1]
                first, last = (json.loads(event.removeprefix("data: "))["choices"][0] for event in events)
                assert (last["text"], last["finish_reason"]) == ("", "length")
                check_echoed(first["logprobs"], 1, 0)
                return
            answer = response.json()
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("How far is it?", "length")
            check_echoed(choice["logprobs"], 1, 0)
            assert answer["usage"]["completion_tokens"] == 0
            assert answer["usage"]["total_tokens"] == len(PROMPT)
            # the engine can't do without one
            assert {each.request.params.max_tokens for each in at.router.submitted} == {1}

    play(scenario)


def vllms(count: int) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = [None]
    for place in range(1, len(PROMPT)):
        logprob, rank, likeliest = told(place, count)
        position = {PROMPT[place]: (logprob, rank)}
        for its_rank, (token, its_logprob) in enumerate(likeliest.items(), 1):
            position.setdefault(token, (its_logprob, its_rank))
        found.append(
            {
                str(token): {"logprob": each, "rank": its, "decoded_token": MODEL.token_text(token)}
                for token, (each, its) in position.items()
            }
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_are_shaped_as_vllms(count: int) -> None:
    async def scenario() -> None:
        async with served(Telling()) as at:
            answer = await completion(at, prompt=[PROMPT, PROMPT], prompt_logprobs=count)
            assert [each["prompt_logprobs"] for each in answer["choices"]] == [vllms(count)] * 2
            assert [each["logprobs"] for each in answer["choices"]] == [None] * 2
            chat = await at.post(
                "/v1/chat/completions", {"messages": QUESTION, "prompt_logprobs": count, "n": 2}
            )
            found = chat.json()["prompt_logprobs"]
            assert len(found) == len(TOKENIZER.chat_ids(QUESTION)) and found[0] is None
            assert "prompt_logprobs" not in chat.json()["choices"][0]

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"n": 2}, {"n": 2, "best_of": 3}])
def test_each_choice_has_its_prompts(options: dict[str, int]) -> None:
    other = PROMPT[:-2]

    async def scenario() -> None:
        async with served(Telling()) as at:
            answer = await completion(at, prompt=[PROMPT, other], prompt_logprobs=2, **options)
            lengths = [len(each["prompt_logprobs"]) for each in answer["choices"]]
            assert lengths == [len(PROMPT)] * 2 + [len(other)] * 2
            assert [each["prompt_logprobs"] for each in answer["choices"]][:2] == [vllms(2)] * 2

    play(scenario)


@pytest.mark.slow
def test_each_streamed_echo_has_them() -> None:
    """Whichever begins first."""

    async def scenario() -> None:
        async with served(Telling()) as at:
            body = {"prompt": PROMPT, "max_tokens": 50, "echo": True, "logprobs": 2, "stream": True, "n": 2}
            events = (await at.post("/v1/completions", body)).text.strip().split("\n\n")[:-1]
            choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
            openings = [choice for choice in choices if choice["text"] == "How far is it?"]
            assert sorted(choice["index"] for choice in openings) == [0, 1]
            for opening in openings:
                check_echoed(opening["logprobs"], 2, 0)

    play(scenario)


@pytest.mark.slow
def test_both_are_given_as_many_as_each_was_asked_for() -> None:
    async def scenario() -> None:
        async with served(Telling()) as at:
            answer = await completion(at, echo=True, logprobs=1, prompt_logprobs=3)
            (choice,) = answer["choices"]
            assert choice["prompt_logprobs"] == vllms(3)
            check_echoed(choice["logprobs"], 1, len(SAID))
            alone = await completion(at, prompt=PROMPT[:1], echo=True, logprobs=1, prompt_logprobs=1)
            assert alone["choices"][0]["prompt_logprobs"] == [None]

    play(scenario)


LONG = [7] * 2000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs", "must be an integer from 0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "must be an integer from 0 to 20"),
        ({"echo": True, "logprobs": 21}, "logprobs", "must be an integer from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream=true"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: must be an integer, at least 1"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens=-1: must be an integer, at least 1"),
    ],
)
def test_what_can_not_be_asked_for_is_named(body: dict[str, Any], param: str, message: str) -> None:
    async def scenario() -> None:
        async with served(Telling()) as at:
            response = await at.post("/v1/completions", {"prompt": LONG} | body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert message in error["message"]

    play(scenario)


@pytest.mark.slow
def test_more_than_an_answer_should_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.limits.limits.MAX_PROMPT_LOGPROBS", 4 * 21 * len(PROMPT))

    async def scenario() -> None:
        async with served(Telling()) as at:
            # of all prompts and choices together, whichever way they are asked for
            for asked in ({"prompt_logprobs": 20}, {"logprobs": 20, "echo": True}):
                body = asked | {"prompt": [PROMPT] * 2, "n": 2, "max_tokens": 1}
                assert (await at.post("/v1/completions", body)).status_code == 200
                for more in ({"prompt": [PROMPT] * 3}, {"n": 3}, {"best_of": 3}):
                    response = await at.post("/v1/completions", body | more)
                    error = response.json()["error"]
                    assert (response.status_code, error["param"]) == (400, "prompt_logprobs")
            chat = {"messages": [{"role": "user", "content": "x" * len(PROMPT)}], "prompt_logprobs": 20}
            for n, status in ((2, 200), (4, 400)):
                response = await at.post("/v1/chat/completions", chat | {"n": n})
                assert response.status_code == status

    play(scenario)
    largest = [(-1.2345, 150_000, dict.fromkeys(range(1 << 20, (1 << 20) + 20), -1.2345))]
    assert len(pack(largest * (MAX_PROMPT_LOGPROBS // 21))) < 4 << 20
