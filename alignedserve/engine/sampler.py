"""Turns logits into tokens. Rows are independent: a request's tokens don't depend on its batch.

The sampler has two halves. `begin` starts all device work, and `finish` waits for the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from alignedserve.engine.batch import Due
from alignedserve.engine.outputs import TokenLogprobs
from alignedserve.engine.request import Request
from alignedserve.ops.base import BROKEN, CompiledModel, Ops
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.grammar import GrammarError

# ---- noise -----------------------------------------------------------------------------------------------------------

# The noise for a request's token k is a function of (seed, k) alone. Its tokens
# therefore don't depend on its batch, on preemption, or on the machine that continues it.


def noise_keys(seeds: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """The 64-bit key for each request's next token, the one after `counts` others.

    Keys are int64, because torch has no arithmetic on unsigned numbers.
    """
    # A continuation's seed has 64 bits, and a client's seed may be negative.
    of_request = _mix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    number = np.array(counts, dtype=np.uint64) + np.uint64(1)
    return torch.from_numpy(_mix64(of_request + number * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """alignedserve.sampling_params.mix64 of each number. numpy's products keep the low 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- tokens that may not come next -----------------------------------------------------------------------------------

# Which ones depends on the output so far alone: after preemption, or in another process, they are the same.


MINUS_INFINITY = float("-inf")


def constrain(logits: torch.Tensor, request: Request) -> None:
    """Masks one row of logits in place, after all other edits of logits. Raises GrammarError."""
    if request.matcher is not None:
        _follow_grammar(logits, request)
    params = request.params
    if params.allowed_token_ids is not None:
        ids = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[ids]
        logits.fill_(MINUS_INFINITY)
        logits[ids] = kept
    if banned := _ends_of_bad_words(request):
        logits[torch.tensor(banned, device=logits.device)] = MINUS_INFINITY


def _no_token_left(params: SamplingParams) -> GrammarError:
    name = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
    return GrammarError(f"{name}: the parameters of this request together leave no token that may come next")


def _ends_of_bad_words(request: Request) -> list[int]:
    """Returns the tokens that would complete a bad word."""
    output, last_of = request.output, request.params.last_of_bad_words
    lengths = (length for length in request.params.lengths_before_last if length <= len(output))
    ends = (last_of.get(tuple(output[len(output) - length :]), ()) for length in lengths)
    return [token for tokens in ends for token in tokens]


def _follow_grammar(logits: torch.Tensor, request: Request) -> None:
    assert request.matcher
    allowed = torch.from_numpy(request.matcher.allowed(request.output)).to(logits.device)
    logits.masked_fill_(~allowed, MINUS_INFINITY)
    if request.params.min_tokens and not bool((logits > MINUS_INFINITY).any()):
        # The grammar allows only the end of the output here. A minimum length can't make the output longer than that.
        logits[allowed] = 0.0


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def token_logprobs(rows: torch.Tensor, tokens: Sequence[int], num_likeliest: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of `tokens[i]` and of the likeliest tokens in `rows[i]`, which covers the whole
    vocabulary.

    It handles all rows at once, because an operation per row would take longer than the computation itself.
    """
    chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])
    ranks = (rows > chosen).sum(dim=1) + 1
    best = rows.topk(num_likeliest)
    likeliest_ranks = range(1, num_likeliest + 1)
    return [
        TokenLogprobs([token, *likeliest], [logprob, *likeliest_logprobs], [rank, *likeliest_ranks])
        for token, logprob, rank, likeliest, likeliest_logprobs in zip(
            tokens,
            chosen[:, 0].tolist(),
            ranks.tolist(),
            best.indices.tolist(),
            best.values.tolist(),
            strict=True,
        )
    ]


# ---- sampler ---------------------------------------------------------------------------------------------------------


@dataclass
class Sampled:
    # One token per request; BROKEN if its logits contain NaN or infinity.
    tokens: np.ndarray
    # Log-probabilities requested with params.logprobs, by row.
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    # Why a row can't have a next token, by row. The row's token is then meaningless.
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
    failed: dict[int, GrammarError] = {}
    has_some: dict[int, torch.Tensor] = {}
    for row in due.edited:
        request = due.requests[row]
        edit(logits[row], request)
        try:
            constrain(logits[row], request)
        except GrammarError as error:
            failed[row] = error
            continue
        if request.params.allowed_token_ids is not None or request.params.bad_word_ids:
            has_some[row] = (logits[row] > MINUS_INFINITY).any()
    # Waits for the device once, for all rows.
    found = torch.stack([*has_some.values()]).tolist() if has_some else []
    empty = [row for row, is_left in zip(has_some, found, strict=True) if not is_left]
    return failed | {row: _no_token_left(due.requests[row].params) for row in empty}


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
