"""A grammar constrains the next token: tokens that it does not allow become impossible."""

from __future__ import annotations

import torch

from alignedserve.engine.request import Request

MINUS_INFINITY = float("-inf")


def constrain(logits: torch.Tensor, request: Request) -> None:
    """Changes one row in place, after everything else that changes logits. Raises GrammarError."""
    if request.matcher is None:
        return
    allowed = torch.from_numpy(request.matcher.allowed(request.output)).to(logits.device)
    logits.masked_fill_(~allowed, MINUS_INFINITY)
    if request.params.min_tokens and not bool((logits > MINUS_INFINITY).any()):
        # All that is left of the grammar is the end, and a minimum length does not make an output longer than that.
        logits[allowed] = 0.0
