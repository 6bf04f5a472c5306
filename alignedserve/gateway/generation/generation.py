"""One API call: a request to a router for each prompt and choice, and the tokens that arrive for its answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.islands.output_queue import News
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.lengths.prediction import Prediction
from alignedserve.process.logs import request_id
from alignedserve.protocol.messages import NewTokens, PromptProgress, Rejected, Request
from alignedserve.protocol.prompt_logprobs import TokenLogprobs
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


@dataclass(frozen=True)
class ChoiceDelta:
    """The new tokens and text of a choice. The first token may have no text yet, and the last delta no tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    # The prompt's log-probabilities, packed. If requested, they come with the first token.
    prompt_logprobs: bytes = b""
    # The stop string that ended the choice, with finish_reason "stop".
    stop_string: str | None = None
    # Progress of the prompt. Such a delta has no tokens.
    progress: PromptProgress | None = None
    # The text of each token, if there are several: tokens are joined if they arrive faster than they are sent.
    texts: Sequence[str] = ()

    def steps(self) -> Iterator[tuple[str, int]]:
        """Yields text and its number of tokens, one token at a time where the text of each is known."""
        if self.texts:
            yield from ((text, 1) for text in self.texts)
        else:
            yield self.text, len(self.token_ids)

    @property
    def is_cut(self) -> bool:
        """Whether a length limit or a stop string ended the choice, rather than the model."""
        return self.finish_reason == "length" or self.stop_string is not None


@dataclass
class TokenUsage:
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    # Prompt tokens with KV reused from earlier prompts.
    num_cached_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        prompt, completion = self.num_prompt_tokens, self.num_completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            # OpenAI's API always has this field; vLLM omits it by default.
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(eq=False)
class _OpenChoice:
    key: RequestKey
    text: TextStream


@dataclass(eq=False)
class Generation:
    islands: Islands
    model: ServedModel
    prompts: Sequence[list[int]]
    params: SamplingParams
    service: Service = field(default_factory=Service)
    # The name of the parameter that determines the form of the output.
    structure_name: str = "structured_outputs"
    # False: the client asks for data that comes with the first token, and not for the token itself.
    gives_output: bool = True
    # Whether prompt_logprobs are computed once per prompt, and come with its first choice. They need the whole prompt
    # computed, and further choices can reuse its KV.
    asks_prompt_logprobs_once: bool = False
    # The predicted length of each prompt's answers.
    predictions: Sequence[Prediction | None] = ()
    # Gives each prompt a seed if the call has none.
    seeds: Random = field(default_factory=Random)
    # See messages.Request.
    cache_salt: str = ""
    reports_progress: bool = False
    adapter: str = ""
    owner: str = ""
    awaits: str = ""
    brings_results: bool = False
    _choices: list[_OpenChoice] = field(default_factory=list)
    _news: asyncio.Queue[tuple[int, News]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.usage = TokenUsage(sum(map(len, self.prompts)))

    async def start(self) -> None:
        """Opens the requests. Raises ApiError if there is no router."""
        wanted = list(self._wanted())
        async with self.islands.opening(self.service.tier) as turn:
            num_opened = num_tokens = 0
            # The first choices of a real-time call do not wait for a turn.
            is_next_turn = self.service.tier != "rt"
            for each in wanted:
                if is_next_turn:
                    await turn()
                    num_opened = num_tokens = 0
                self._open(*each)
                num_opened, num_tokens = num_opened + 1, num_tokens + len(each[0])
                is_next_turn = num_opened >= NUM_AT_ONCE or num_tokens > NUM_TOKENS_AT_ONCE

    def _wanted(self) -> Iterator[tuple[list[int], SamplingParams, int, Prediction | None]]:
        first = replace(self.params, n=1)
        further = replace(first, prompt_logprobs=None) if self.asks_prompt_logprobs_once else first
        predictions = self.predictions or [None] * len(self.prompts)
        for prompt, prediction in zip(self.prompts, predictions, strict=True):
            seed = self.seeds.randint(0, MAX_SEED) if self.params.seed is None else self.params.seed
            for n in range(self.params.n):
                yield prompt, further if n else first, child_seed(seed, n), prediction

    def close(self) -> None:
        """Aborts the requests that have not ended. Safe to repeat."""
        self.islands.close_all([choice.key for choice in self._choices])

    async def collect(self, add: Callable[[ChoiceDelta], None]) -> None:
        """Runs all choices to their end. Raises ApiError."""
        await self.start()
        async for delta in self.deltas():
            add(delta)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Yields deltas until all choices have ended. Raises ApiError if one of them fails."""
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
        index = len(self._choices)
        request = Request(
            key=new_key(),
            prompt=prompt,
            params=params,
            seed=seed,
            arrival_s=time.monotonic(),
            ttft_s=self.service.ttft_s,
            tbt_s=self.service.tbt_s,
            tier=self.service.tier,
            deadline_s=self.service.deadline_s,
            request_id=request_id.get() or "",
            slo_defaults=list(self.service.slo_defaults),
            cache_salt=self.cache_salt,
            reports_progress=self.reports_progress,
            hurries="tbt_s" in self.service.slo_defaults,
            is_pressed=self.service.is_pressed,
            adapter=self.adapter,
            # Lines of jobs have a deadline.
            has_next_turn=self.service.deadline_s is None,
            owner=self.owner,
            awaits=self.awaits,
            brings_results=self.brings_results,
        )
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
            return ApiError(400, f"{self.structure_name}: {rest}", param=self.structure_name)
        return ApiError(500, f"generation failed: {reason}")

    def _take(self, index: int, choice: _OpenChoice, news: NewTokens) -> ChoiceDelta:
        texts: list[str] = []
        taken, reason = 0, news.finish_reason
        if index % self.params.n == 0:
            # A prompt counts once, whatever the number of its choices.
            self.usage.num_cached_tokens += news.num_reused
        for taken, token_id in enumerate(news.tokens, 1):
            is_last = taken == len(news.tokens)
            texts.append(choice.text.append(token_id, news.finish_reason if is_last else None))
            if choice.text.stop_string is not None:
                reason = "stop"
                self.islands.close(choice.key, reason)
                break
        if not self.gives_output:
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
    return unavailable(rejected.message)


def new_key() -> RequestKey:
    return RequestKey(1 + secrets.randbelow(2**63 - 1))


# ---- answers ---------------------------------------------------------------------------------------------------------

# Answers can be large: 256 choices, or log-probabilities of half a million tokens. So each delta is added when it
# arrives, at a cost that does not grow with the answer so far. Large parts are made in pieces (http/json_pieces.py).


class ResponseBuilder(ABC):
    """An answer is either made whole, by `add` and `whole`, or streamed, by the other methods."""

    @abstractmethod
    def add(self, delta: ChoiceDelta) -> None: ...

    @abstractmethod
    def whole(self, usage: TokenUsage) -> Iterator[Piece]:
        """Yields the answer, after all deltas were added."""

    def progress(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes:
        """Returns the event that reports a prompt's progress, in APIs that have one."""
        return b""

    @abstractmethod
    def opening(self, delta: ChoiceDelta, usage: TokenUsage) -> Iterable[Piece] | None:
        """Returns the events before those of `delta`, if there are any. They may be large. `usage` includes this
        delta."""

    @abstractmethod
    def events(self, delta: ChoiceDelta, usage: TokenUsage) -> bytes | Iterable[Piece]:
        """Returns the events of new tokens, in pieces if they may be large. Empty for a token without text."""

    @abstractmethod
    def end(self, usage: TokenUsage) -> Iterable[Piece]:
        """Returns the events after the last delta."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes | Iterable[Piece]:
        """Returns the events that end a failed stream."""
