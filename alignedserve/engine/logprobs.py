"""Log-probabilities of chosen and of likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.engine.outputs import TokenLogprobs


def token_logprobs(rows: torch.Tensor, tokens: Sequence[int], num_likeliest: int) -> list[TokenLogprobs]:
    """`rows[i]` holds the log-probabilities of the whole vocabulary; `tokens[i]` was chosen there.

    It takes all rows together, because an operation for each row takes longer than what it computes.
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
