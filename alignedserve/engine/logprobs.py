"""Log-probabilities of chosen tokens and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.engine.outputs import TokenLogprobs


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
