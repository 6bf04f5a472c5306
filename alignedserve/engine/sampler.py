"""Logits to tokens. Every row is handled by itself: what a request gets does not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from alignedserve.engine.constrain import MINUS_INFINITY, constrain
from alignedserve.engine.logprobs import TokenLogprobs, token_logprobs
from alignedserve.engine.noise import noise_keys
from alignedserve.engine.ops.base import CompiledModel, Ops
from alignedserve.engine.request import Request
from alignedserve.engine.truncate import truncate
from alignedserve.text.grammar import GrammarError


@dataclass
class Sampled:
    # one per request; meaningless where the row is in `broken`
    tokens: list[int]
    # rows whose logits hold NaN or infinity
    broken: set[int] = field(default_factory=set)
    # row -> what was asked for with params.logprobs
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # row -> why its grammar can't go on; its token is meaningless then
    failed: dict[int, GrammarError] = field(default_factory=dict)


class Sampler:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def sample(self, model: CompiledModel, rows: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """rows[i] of the model's latest hidden states is for the next token of requests[i]."""
        tokens = model.likeliest(len(rows))
        logits = None
        if tokens is None:
            logits = model.logits(rows)
            sampled = self._from_argmax(logits)
        else:
            sampled = _from_tokens(tokens)
        chosen = [
            i
            for i, request in enumerate(requests)
            if not request.params.is_plain_greedy and i not in sampled.broken
        ]
        if chosen:
            self._sample_rows(model.logits(rows) if logits is None else logits, requests, chosen, sampled)
        return sampled

    def _from_argmax(self, logits: torch.Tensor) -> Sampled:
        likeliest, is_broken = self._ops.argmax(logits)
        broken = set(is_broken.nonzero().flatten().tolist()) if bool(is_broken.any()) else set()
        return Sampled(likeliest.tolist(), broken)

    def _sample_rows(
        self, logits: torch.Tensor, requests: Sequence[Request], rows: list[int], sampled: Sampled
    ) -> None:
        chosen = logits if len(rows) == len(requests) else logits[rows]
        subset = [requests[row] for row in rows]
        wanted = [i for i, request in enumerate(subset) if request.params.logprobs is not None]
        # Log-probabilities are the model's own, before anything below changes the logits.
        raw = chosen[wanted].log_softmax(dim=-1) if wanted else None
        for i, request in enumerate(subset):
            edit(chosen[i], request)
            try:
                constrain(chosen[i], request)
            except GrammarError as error:
                sampled.failed[rows[i]] = error
        tokens = self._choose(chosen, subset)
        for row, token in zip(rows, tokens, strict=True):
            sampled.tokens[row] = token
        for raw_row, i in enumerate(wanted):
            assert raw is not None
            sampled.logprobs[rows[i]] = token_logprobs(
                raw[raw_row], tokens[i], subset[i].params.logprobs or 0
            )

    def _choose(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        tokens: list[int] = self._ops.argmax(logits)[0].tolist()
        random = [i for i, request in enumerate(requests) if not request.params.is_greedy]
        if random:
            chosen = logits if len(random) == len(requests) else logits[random]
            keys = noise_keys((requests[i].seed, len(requests[i].output)) for i in random)
            for row, i in enumerate(random):
                truncate(chosen[row], requests[i].params)
            for i, token in zip(random, self._ops.gumbel_argmax(chosen, keys).tolist(), strict=True):
                tokens[i] = token
        return tokens


def _from_tokens(tokens: np.ndarray) -> Sampled:
    return Sampled(tokens.tolist(), set(np.flatnonzero(tokens < 0).tolist()))


def edit(logits: torch.Tensor, request: Request) -> None:
    """Bias, minimum length and penalties, in place on one row, in vLLM's order."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        biases = list(params.logit_bias.values())
        logits[ids] += torch.tensor(biases, dtype=torch.float32, device=logits.device)
    if len(request.output) < params.min_tokens and request.stop_token_ids:
        logits[torch.tensor(list(request.stop_token_ids), device=logits.device)] = MINUS_INFINITY
    if params.has_penalties:
        _penalize(logits, request)


def _penalize(logits: torch.Tensor, request: Request) -> None:
    params, counts = request.params, request.output_counts
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*request.prompt.tolist(), *counts}), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * times
