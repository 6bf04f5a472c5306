"""Requests for an island of tiny models, and the engine's results for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from alignedserve.engine.engine import Engine
from alignedserve.engine.outputs import TokenOutput
from alignedserve.instance.requests import logprobs_of, plain
from alignedserve.protocol.messages import Request
from alignedserve.protocol.prompt_logprobs import TokenLogprobs
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey
from tests.cluster.client import Stream
from tests.cluster.processes import MAX_MODEL_LEN
from tests.engine.helpers import greedy_params, make_engine, run
from tests.tiny_models import VOCAB_SIZE, prompts

_keys = count(1)


def make_request(prompt: list[int], params: SamplingParams, adapter: str = "") -> Request:
    key, seed = RequestKey(next(_keys)), params.seed or 0
    return Request(key, prompt, params, seed=seed, arrival_s=0.0, adapter=adapter)


def known_requests() -> list[Request]:
    """Returns the requests for which transformers' results are known."""
    return [make_request(prompt, greedy_params()) for prompt in prompts()]


def mixed_prompts(num: int, seed: int) -> list[list[int]]:
    """Returns short and long prompts that leave room for two hundred tokens. Many have the same beginning."""
    dice = Random(seed)
    lengths = [dice.choice((dice.randint(1, 40), dice.randint(40, 180))) for _ in range(num)]
    beginnings = [[dice.randrange(VOCAB_SIZE) for _ in range(length)] for length in (0, 50, 100)]
    found = []
    for length in lengths:
        beginning = dice.choice(beginnings)[: length - 1]
        found.append(beginning + [dice.randrange(VOCAB_SIZE) for _ in range(length - len(beginning))])
    return found


def greedy_requests(num: int, seed: int, longest: int = 200) -> list[Request]:
    """`longest`: the most tokens of an answer."""
    dice = Random(seed)
    return [
        make_request(prompt, greedy_params(dice.randint(16, longest))) for prompt in mixed_prompts(num, seed)
    ]


def sampled_requests(num: int, seed: int) -> list[Request]:
    """Returns requests with every way of sampling, with logprobs. Some of them end by themselves."""
    dice = Random(seed)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"top_p": 0.9, "top_k": 50},
        {"min_p": 0.05, "repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 1.5},
        {"stop_token_ids": list(range(0, VOCAB_SIZE, 40)), "min_tokens": 20},
        {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
        {"allowed_token_ids": [*range(0, VOCAB_SIZE, 3)], "bad_word_ids": [[0], [3, 6], [9, 9]]},
    ]
    return [
        make_request(
            prompt,
            SamplingParams(
                **ways[index % len(ways)],
                seed=1000 + index,
                max_tokens=dice.randint(24, 200),
                logprobs=index % 3,
                prompt_logprobs=(None, 0, 3, None, 1)[index % 5],
                ignore_eos=True,
            ),
        )
        for index, prompt in enumerate(mixed_prompts(num, seed))
    ]


@dataclass(frozen=True)
class Result:
    tokens: list[int]
    # Of the chosen token, its rank, and the most likely tokens.
    logprobs: list[tuple[float, int, dict[int, float]]]
    finish_reason: str | None
    prompt_logprobs: list[TokenLogprobs] | None = None


# The engine's result for a request, which other requests beside it must not change. Each is computed once.
_known: dict[tuple[str, ...], Result] = {}


def alone(
    directory: Path,
    requests: Sequence[Request],
    kv_cache_dtype: str = "auto",
    lora_modules: tuple[str, ...] = (),
) -> list[Result]:
    """Computes the results with one engine that has room for all."""

    def name_of(request: Request) -> tuple[str, ...]:
        return (
            str(directory),
            kv_cache_dtype,
            request.adapter,
            repr(lora_modules if request.adapter else ()),
            repr((request.prompt, request.params, request.seed)),
        )

    missing = {name_of(each): each for each in requests if name_of(each) not in _known}
    if missing:
        engine = make_engine(
            directory,
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=MAX_MODEL_LEN,
            lora_modules=lora_modules,
        )
        _known.update(zip(missing, _generate(engine, list(missing.values())), strict=True))
    return [_known[name_of(each)] for each in requests]


def _generate(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    prompts, params = [each.prompt for each in requests], [each.params for each in requests]
    outputs = run(engine, prompts, params, [each.adapter for each in requests])
    return [
        Result(
            [event.token_id for event in events if event.token_id is not None],
            [each for event in events for each in logprobs_of(event)],
            events[-1].finish_reason,
            None if request.params.prompt_logprobs is None else prompt_logprobs_of(events),
        )
        for request, events in zip(requests, outputs, strict=True)
    ]


def prompt_logprobs_of(events: Sequence[TokenOutput]) -> list[TokenLogprobs]:
    return [plain(each) for event in events for each in event.prompt_logprobs or ()]


def results(streams: Sequence[Stream]) -> list[Result]:
    return [
        Result(
            stream.tokens,
            [(logprob, rank, likeliest) for logprob, rank, likeliest in stream.logprobs],
            stream.finish_reason,
            stream.prompt_logprobs,
        )
        for stream in streams
    ]
