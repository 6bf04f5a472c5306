"""How a request's tokens are chosen, and the seeds of its continuations. Names and defaults are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest, is_text

# largest seed that a client may give: seeds have 64 bits
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
# limit of every count; messages between processes hold at most 64 bits
MAX_COUNT = 2**31 - 1
MAX_STOP_STRINGS = 64


@dataclass(kw_only=True)
class SamplingParams:
    # number of continuations of the prompt
    n: int = 1
    # 0 = greedy
    temperature: float = 1.0
    # keep the likeliest tokens with probabilities that sum to top_p
    top_p: float = 1.0
    # keep the k likeliest tokens; 0 or -1 = all
    top_k: int = 0
    # drop tokens less likely than min_p times the likeliest
    min_p: float = 0.0
    # divide (multiply if negative) the logits of tokens seen in prompt or output
    repetition_penalty: float = 1.0
    # subtracted once from the logits of tokens in the output
    presence_penalty: float = 0.0
    # subtracted per occurrence in the output
    frequency_penalty: float = 0.0
    # token id -> added to its logit
    logit_bias: dict[int, float] | None = None
    # the only tokens that the output may have; None = all
    allowed_token_ids: Sequence[int] | None = None
    # texts that the output never completes, with or without a space before them
    bad_words: Sequence[str] | None = None
    # their tokens (text/bad_words.py), filled in where there is a tokenizer
    bad_word_ids: Sequence[Sequence[int]] | None = None
    # keep only this number of the prompt's last tokens; -1 = as many as leave room for max_tokens; None = all
    truncate_prompt_tokens: int | None = None
    # same seed, same prompt, same tokens, whatever else runs; None = a new seed for each request
    seed: int | None = None
    # None = up to the model's length
    max_tokens: int | None = 16
    # no end of sequence and no stop token before this many tokens
    min_tokens: int = 0
    # strings that end the output; cut off unless include_stop_str_in_output
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    # continue after the model's end of sequence
    ignore_eos: bool = False
    # number of likeliest tokens with log-probabilities beside each output token, the chosen one not counted
    logprobs: int | None = None
    # the same for each prompt token
    prompt_logprobs: int | None = None
    # False: return ids only
    detokenize: bool = True
    skip_special_tokens: bool = True
    # the output must match a schema, a regex or a grammar, or be one of several texts
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _check_stop_strings(self.stop_strings)
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids=[]: must be at least one token id")
        self.bad_words = _as_list("bad_words", self.bad_words)
        self.bad_word_ids = _as_list("bad_word_ids", self.bad_word_ids)
        if not all(self.bad_word_ids):
            raise InvalidRequest("bad_word_ids: each must be at least one token id")
        for word in self.bad_words:
            if not is_text(word) or not word.strip():
                raise InvalidRequest(f"bad_words={word!r}: must be a non-empty string")
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens=0: must be -1 or at least 1")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}={getattr(self, name)!r}: must be True or False")
        for name, (kind, low, high, allowed) in _LIMITS.items():
            _check_number(name, getattr(self, name), kind, low, high, allowed)
        if self.temperature < 1e-5:
            self.temperature = 0.0
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest(f"stop={self.stop!r}: needs detokenize=True")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest(
                f"structured_outputs={self.structured_outputs!r}: must be a StructuredOutputsParams"
            )
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidRequest(f"logit_bias={self.logit_bias!r}: must be a dict from token ids to numbers")
        for token, bias in (self.logit_bias or {}).items():
            _check_number("logit_bias key", token, int, 0, math.inf, "a token id, at least 0")
            _check_number(f"logit_bias[{token}]", bias, float, -100, 100, "a number from -100 to 100")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _check_number(name, token, int, 0, math.inf, "token ids, at least 0")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else _as_list("stop", self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def edits_logits(self) -> bool:
        """Whether some tokens are made more or less likely, or impossible, before temperature applies."""
        return (
            self.has_penalties
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or self.structured_outputs is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_word_ids)
        )

    @cached_property
    def last_of_bad_words(self) -> dict[tuple[int, ...], list[int]]:
        """The last tokens of bad words, by the tokens before them."""
        found: dict[tuple[int, ...], list[int]] = {}
        for ids in self.bad_word_ids or ():
            found.setdefault(tuple(ids[:-1]), []).append(ids[-1])
        return found

    @cached_property
    def lengths_before_last(self) -> set[int]:
        """The numbers of tokens before the last one of bad words."""
        return {*map(len, self.last_of_bad_words)}

    def truncated(self, prompt: list[int], max_model_len: int) -> list[int]:
        """Returns the tokens of the prompt that `truncate_prompt_tokens` keeps."""
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        return prompt[-(max(1, max_model_len - (self.max_tokens or 1)) if most < 0 else most) :]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token is all that is needed. The only pass over the logits is then the argmax."""
        return self.is_greedy and not self.edits_logits and self.logprobs is None


# field: (type, lowest, highest, text for errors). None is allowed where it is the default.
_LIMITS: dict[str, tuple[type, float, float, str]] = {
    "n": (int, 1, 1024, "an integer from 1 to 1024"),
    "temperature": (float, 0.0, 100.0, "a number from 0 to 100"),
    "top_p": (float, math.ulp(0.0), 1.0, "a number above 0, up to 1"),
    "top_k": (int, -1, MAX_COUNT, "an integer: -1 or 0 (all), or at least 1"),
    "min_p": (float, 0.0, 1.0, "a number from 0 to 1"),
    "repetition_penalty": (float, math.ulp(0.0), 100.0, "a number above 0, up to 100"),
    "presence_penalty": (float, -2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (float, -2.0, 2.0, "a number from -2 to 2"),
    "seed": (int, -MAX_SEED - 1, MAX_SEED, "a 64-bit integer"),
    "max_tokens": (int, 1, MAX_COUNT, "an integer, at least 1 (and below 2**31)"),
    "min_tokens": (int, 0, MAX_COUNT, "an integer, at least 0 (and below 2**31)"),
    "truncate_prompt_tokens": (int, -1, MAX_COUNT, "an integer: -1, or at least 1"),
    "logprobs": (int, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (int, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}"),
}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
_MAY_BE_NONE = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}


def _check_number(name: str, value: Any, kind: type, low: float, high: float, allowed: str) -> None:
    if value is None and name in _MAY_BE_NONE:
        return
    accepted = (int,) if kind is int else (int, float)
    is_number = isinstance(value, accepted) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN fails every comparison
        raise InvalidRequest(f"{name}={value!r}: must be {allowed}")


def _as_list(name: str, values: Sequence[Any] | None) -> list[Any]:
    try:
        return [] if values is None else list(values)
    except TypeError:
        raise InvalidRequest(f"{name}={values!r}: must be a list") from None


def _check_stop_strings(strings: list[str]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop: {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for text in strings:
        if not is_text(text) or not text:
            raise InvalidRequest(f"stop={text!r}: must be a non-empty string")


# ---- seeds of a request's continuations ------------------------------------------------------------------------------

_MASK = 2**64 - 1


def mix64(x: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit numbers that scatters neighbours."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def child_seed(seed: int, index: int) -> int:
    """Returns the seed of the index-th of a request's n continuations. The first one has the request's own seed."""
    return seed if index == 0 else mix64(seed ^ mix64(index))
