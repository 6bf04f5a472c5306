"""One API call: a request to a router for each prompt and choice, and the tokens that arrive for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from alignedserve.gateway.generation.call import Call, ChoiceDelta, TokenUsage
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.islands.output_queue import News
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.lengths.prediction import Prediction
from alignedserve.protocol.messages import NewTokens, PromptProgress, Rejected
from alignedserve.sampling_params import MAX_SEED, SamplingParams, child_seed
from alignedserve.text.stop import StopStrings
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import RequestKey


class TextStream:
    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        # The stop string that ended the choice.
        self.stop_string: str | None = None
        self._text = StopStrings(tokenizer, params) if tokenizer else None
        self._keeps_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0

    def append(self, token_id: int, finish_reason: str | None) -> str:
        """Returns the text that can be sent now. `finish_reason` is set if the engine ended the choice with this
        token."""
        if self._text is None:
            return ""
        self._num_tokens += 1
        if finish_reason != "stop":
            self.stop_string = self._text.append(token_id, self._num_tokens)
        elif self._keeps_stop_token:
            # With `num_tokens=0` no stop string applies.
            self._text.append(token_id, num_tokens=0)
        if finish_reason is not None and self.stop_string is None:
            self._text.flush()
        is_over = finish_reason is not None or self.stop_string is not None
        return self._text.take_all() if is_over else self._text.take()


# Choices that are opened in one turn of the event loop, and prompt tokens before the last of them, at most. 2^17 tokens
# take 2 ms to encode for the router, and 4 ms to hash, which is done if there are several islands.
NUM_AT_ONCE, NUM_TOKENS_AT_ONCE = 16, 1 << 17


@dataclass(eq=False)
class _OpenChoice:
    key: RequestKey
    text: TextStream


@dataclass(eq=False)
class Generation:
    # With its service (service.py).
    call: Call[Any]
    islands: Islands
    model: ServedModel
    # The call's prompts, unpacked.
    prompts: Sequence[list[int]]
    # The predicted length of each prompt's answers.
    predictions: Sequence[Prediction | None]
    # Gives each prompt a seed if the call has none.
    seeds: Random
    _choices: list[_OpenChoice] = field(default_factory=list)
    _news: asyncio.Queue[tuple[int, News]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.usage = TokenUsage(sum(map(len, self.prompts)))

    async def _start(self) -> None:
        wanted = list(self._wanted())
        async with self.islands.opening(self.call.request.tier) as turn:
            num_opened = num_tokens = 0
            # The first choices of a real-time call do not wait for a turn.
            is_next_turn = self.call.request.tier != "rt"
            for each in wanted:
                if is_next_turn:
                    await turn()
                    num_opened = num_tokens = 0
                self._open(*each)
                num_opened, num_tokens = num_opened + 1, num_tokens + len(each[0])
                is_next_turn = num_opened >= NUM_AT_ONCE or num_tokens > NUM_TOKENS_AT_ONCE

    def _wanted(self) -> Iterator[tuple[list[int], SamplingParams, int, Prediction | None]]:
        params = self.call.request.params
        first = replace(params, n=1)
        # The prompt's log-probabilities are computed once and come with its first choice. They need the whole prompt
        # computed, and further choices can reuse its KV. In a stream, another choice may begin before the first one.
        further = first if self.call.is_stream else replace(first, prompt_logprobs=None)
        for prompt, prediction in zip(self.prompts, self.predictions, strict=True):
            seed = self.seeds.randint(0, MAX_SEED) if params.seed is None else params.seed
            for n in range(params.n):
                yield prompt, further if n else first, child_seed(seed, n), prediction

    def close(self) -> None:
        """Aborts the requests that have not ended. Safe to repeat."""
        self.islands.close_all([choice.key for choice in self._choices])

    async def collect(self, add: Callable[[ChoiceDelta], None]) -> None:
        """Runs all choices to their end. Raises ApiError."""
        async for delta in self.deltas():
            add(delta)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Opens the requests, and yields deltas until all choices have ended. Raises ApiError if there is no router, or
        if one of them fails."""
        await self._start()
        num_unfinished = len(self._choices)
        while num_unfinished:
            index, news = await self._news.get()
            delta = self._delta(index, news)
            if delta is not None:
                num_unfinished -= delta.finish_reason is not None
                yield delta

    def _open(
        self, prompt: list[int], params: SamplingParams, seed: int, prediction: Prediction | None
    ) -> None:
        index, request = len(self._choices), self.call.new_request(prompt, params, seed)
        self._choices.append(_OpenChoice(request.key, TextStream(self.model.tokenizer, params)))
        self.islands.open(request, lambda news: self._news.put_nowait((index, news)), prediction)

    def _delta(self, index: int, news: News) -> ChoiceDelta | None:
        """Returns None for output after a stop string."""
        if isinstance(news, Rejected):
            raise rejection(news)
        if isinstance(news, PromptProgress):
            return ChoiceDelta(index, "", [], [], None, progress=news)
        if news.finish_reason in ("error", "abort"):
            raise self._failure(news.error or news.finish_reason)
        choice = self._choices[index]
        if choice.text.stop_string is not None:
            return None
        return self._take(index, choice, news)

    def _failure(self, reason: str) -> ApiError:
        kind, _, rest = reason.partition(": ")
        if kind.startswith("structured_outputs"):
            # The grammar compiled, but proved too complex during decoding.
            name = self.call.structure_name
            return ApiError(400, f"{name}: {rest}", param=name)
        if kind in ("allowed_token_ids", "bad_words"):
            return ApiError(400, reason, param=kind)
        return ApiError(500, f"generation failed: {reason}")

    def _take(self, index: int, choice: _OpenChoice, news: NewTokens) -> ChoiceDelta:
        texts: list[str] = []
        taken, reason = 0, news.finish_reason
        if index % self.call.request.params.n == 0:
            # A prompt counts once, whatever the number of its choices.
            self.usage.num_cached_tokens += news.num_reused
        for taken, token_id in enumerate(news.tokens, 1):
            is_last = taken == len(news.tokens)
            texts.append(choice.text.append(token_id, news.finish_reason if is_last else None))
            if choice.text.stop_string is not None:
                reason = "stop"
                self.islands.close(choice.key, reason)
                break
        if not self.call.gives_output:
            return ChoiceDelta(index, "", [], [], "length", news.prompt_logprobs)
        self.usage.num_completion_tokens += taken
        return ChoiceDelta(
            index,
            "".join(texts),
            news.tokens[:taken],
            news.logprobs[:taken],
            reason,
            news.prompt_logprobs,
            choice.text.stop_string,
            texts=texts if taken > 1 else (),
        )


def rejection(rejected: Rejected, param: str = "prompt") -> ApiError:
    """Returns the error for a rejected request. `param` is the parameter that holds the prompt."""
    if rejected.reason == "too_long":
        return ApiError(400, rejected.message, param=param, code="context_length_exceeded")
    if rejected.reason == "slo":
        return ApiError(400, rejected.message, param="slo", code="slo_unattainable")
    if rejected.reason == "owner_full":
        return ApiError(429, rejected.message, code="rate_limit_exceeded", retry=True)
    if rejected.reason == "adapter":
        return ApiError(404, rejected.message, param="model", code="model_not_found")
    return unavailable(rejected.message)
