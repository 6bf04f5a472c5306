"""Log-probabilities of chosen and of likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """One position: the chosen token first, then the likeliest ones (which may name it again)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def token_logprobs(row: torch.Tensor, token: int, num_likeliest: int) -> TokenLogprobs:
    """`row` holds the log-probabilities of the whole vocabulary."""
    chosen = row[token]
    best = row.topk(num_likeliest)
    return TokenLogprobs(
        token_ids=[token, *best.indices.tolist()],
        logprobs=[chosen.item(), *best.values.tolist()],
        ranks=[int((row > chosen).sum()) + 1, *range(1, num_likeliest + 1)],
    )
