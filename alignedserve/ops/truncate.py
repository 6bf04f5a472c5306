"""Temperature, top-k, top-p and min-p on one row of logits, in place.

Cuts are by value: all tokens as likely as the last kept one are kept. The order of equals in a sort differs between
machines, and has no effect.
"""

from __future__ import annotations

import torch

from alignedserve.sampling_params import SamplingParams

# Likeliest tokens that are searched for the nucleus first. Sorting the whole vocabulary costs fifty times more.
NUM_CANDIDATES = 1024


def truncate(logits: torch.Tensor, params: SamplingParams) -> None:
    logits /= params.temperature
    if params.min_p > 0:
        _drop_below(logits, logits.max() + torch.log(torch.tensor(params.min_p, dtype=torch.float32)))
    if 0 < params.top_k < len(logits):
        _drop_below(logits, logits.topk(params.top_k).values[-1])
    if params.top_p < 1:
        _drop_below(logits, _nucleus_floor(logits, params.top_p))


def _drop_below(logits: torch.Tensor, floor: torch.Tensor) -> None:
    logits[logits < floor] = float("-inf")


def _nucleus_floor(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest logit of the shortest run of likeliest tokens with probabilities that reach top_p."""
    total = logits.double().logsumexp(0)
    for count in (min(NUM_CANDIDATES, len(logits)), len(logits)):
        best = logits.topk(count).values
        mass = (best.double() - total).exp().cumsum(0)
        if mass[-1] >= top_p:
            return best[int((mass < top_p).sum())]
    return best[-1]
