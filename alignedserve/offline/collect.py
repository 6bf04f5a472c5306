"""Turns the engine's tokens into text and results, one sequence at a time."""

from __future__ import annotations

from functools import partial

from alignedserve.engine.outputs import TokenLogprobs, TokenOutput
from alignedserve.offline.outputs import CompletionOutput, Logprob, PositionLogprobs
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.stop import StopStrings
from alignedserve.text.tokenizer import Tokenizer


class SequenceCollector:
    """Collects one continuation of one prompt."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.output = CompletionOutput(index, "", [], None, None)
        self._token_ids: list[int] = []
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._logprobs: list[PositionLogprobs] = []
        self._decode = partial(decode_token, tokenizer)
        self._stop: StopStrings | None = None
        if self._tokenizer is not None and params.stop_strings:
            self._stop = StopStrings(self._tokenizer, params)
        # Pieces of text up to a stop string.
        self._texts: list[str] = []
        self.prompt_logprobs: list[PositionLogprobs | None] = [None]

    def add(self, event: TokenOutput) -> bool:
        """Adds an output of the engine.

        Returns True if it completes a stop string, so that the engine has to stop the sequence.
        """
        for position in event.prompt_logprobs or ():
            self.prompt_logprobs.append(as_position(position, self._decode))
        if event.token_id is not None:
            self._token_ids.append(event.token_id)
        if event.logprobs is not None:
            self._logprobs.append(as_position(event.logprobs, self._decode))
        self.output.finish_reason, self.output.stop_reason = event.finish_reason, event.stop_reason
        self.output.error = event.error
        is_stopped_here = False
        if self._stop is not None and event.token_id is not None and event.finish_reason != "stop":
            found = self._stop.append(event.token_id, len(self._token_ids))
            self._texts.append(self._stop.take_all() if found is not None else self._stop.take())
            if found is not None:
                is_stopped_here = event.finish_reason is None
                self.output.finish_reason, self.output.stop_reason = "stop", found
        if self.output.finish_reason is not None:
            self._finish()
        return is_stopped_here

    def _finish(self) -> None:
        output = self.output
        output.token_ids = self._token_ids
        output.text = self._text()
        if self._params.logprobs is not None:
            output.logprobs = self._logprobs
            chosen = zip(self._token_ids, self._logprobs, strict=False)
            output.cumulative_logprob = sum(position[token].logprob for token, position in chosen)

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        if self._stop is not None and isinstance(self.output.stop_reason, str):
            return "".join(self._texts)
        ended_by_token = self.output.finish_reason == "stop"
        keep_last = not ended_by_token or self._params.include_stop_str_in_output
        token_ids = self._token_ids if keep_last else self._token_ids[:-1]
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._params.skip_special_tokens)


def decode_token(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)


def as_position(found: TokenLogprobs, decode: partial[str | None]) -> PositionLogprobs:
    """Returns log-probabilities by token id, the chosen token first. Each token appears once."""
    position: PositionLogprobs = {}
    for token, logprob, rank in zip(found.token_ids, found.logprobs, found.ranks, strict=True):
        if token not in position:
            position[token] = Logprob(logprob, rank, decode(token))
    return position
