"""Turns logits into tokens. Rows are independent: a request's tokens don't depend on its batch.

It has two halves. `begin` starts all device work, and `finish` waits for the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from alignedserve.engine.batch import Due
from alignedserve.engine.constrain import MINUS_INFINITY, constrain
from alignedserve.engine.logprobs import token_logprobs
from alignedserve.engine.noise import noise_keys
from alignedserve.engine.outputs import TokenLogprobs
from alignedserve.engine.request import Request
from alignedserve.ops.base import BROKEN, CompiledModel, Ops
from alignedserve.text.grammar import GrammarError


@dataclass
class Sampled:
    # One token per request; BROKEN if its logits contain NaN or infinity.
    tokens: np.ndarray
    # Log-probabilities requested with params.logprobs, by row.
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # Why a row's grammar can't continue, by row. The row's token is then meaningless.
    failed: dict[int, GrammarError] = field(default_factory=dict)

    @property
    def broken(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self.tokens == BROKEN).tolist()
        return rows


@dataclass
class Draft:
    """Tokens that a device may still be computing."""

    tokens: torch.Tensor
    # The model's own log-probabilities, of the rows that asked for them.
    logprobs: torch.Tensor | None
    failed: dict[int, GrammarError]


class Sampler:
    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def begin(self, model: CompiledModel, rows: torch.Tensor, due: Due) -> Draft | None:
        """Starts sampling. rows[i] of the model's latest hidden states yields the next token of due.requests[i].

        Returns None if `finish` needs no draft.
        """
        if due.is_plain_greedy:
            return None
        logits = model.logits(rows)
        # Before the logits are edited below.
        logprobs = logits[due.logged].log_softmax(dim=-1) if due.logged else None
        was_broken = self._ops.argmax(logits)[1] if due.edited else None
        failed = _edit_all(logits, due)
        params = [request.params for request in due.requests]
        tokens, is_broken = self._ops.draw(logits, params, _keys(due))
        tokens.masked_fill_(is_broken if was_broken is None else was_broken, BROKEN)
        return Draft(tokens, logprobs, failed)

    def finish(self, model: CompiledModel, rows: torch.Tensor, due: Due, draft: Draft | None) -> Sampled:
        if draft is None:
            return Sampled(self._likeliest(model, rows))
        tokens = draft.tokens.cpu().numpy()
        sampled = Sampled(tokens, failed=draft.failed)
        for index, row in enumerate(due.logged):
            if tokens[row] != BROKEN:
                assert draft.logprobs is not None
                wanted = due.requests[row].params.logprobs or 0
                rows = draft.logprobs[index : index + 1]
                [sampled.logprobs[row]] = token_logprobs(rows, [int(tokens[row])], wanted)
        return sampled

    def _likeliest(self, model: CompiledModel, rows: torch.Tensor) -> np.ndarray:
        if not len(rows):
            return np.empty(0, dtype=np.int64)
        tokens = model.likeliest(len(rows))
        if tokens is None:
            likeliest, is_broken = self._ops.argmax(model.logits(rows))
            tokens = likeliest.masked_fill_(is_broken, BROKEN).cpu().numpy()
        return tokens


def _keys(due: Due) -> torch.Tensor:
    requests = due.requests
    return noise_keys([request.seed for request in requests], [len(request.output) for request in requests])


def _edit_all(logits: torch.Tensor, due: Due) -> dict[int, GrammarError]:
    failed = {}
    for row in due.edited:
        request = due.requests[row]
        edit(logits[row], request)
        try:
            constrain(logits[row], request)
        except GrammarError as error:
            failed[row] = error
    return failed


def edit(logits: torch.Tensor, request: Request) -> None:
    """Applies bias, minimum length and penalties in place to one row, in vLLM's order."""
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
