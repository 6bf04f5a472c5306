"""Applies a grammar to the next token: tokens that it does not allow become impossible."""

from __future__ import annotations

import torch

from alignedserve.engine.request import Request

MINUS_INFINITY = float("-inf")


def constrain(logits: torch.Tensor, request: Request) -> None:
    """Masks one row of logits in place, after all other edits of logits. Raises GrammarError."""
    if request.matcher is None:
        return
    allowed = torch.from_numpy(request.matcher.allowed(request.output)).to(logits.device)
    logits.masked_fill_(~allowed, MINUS_INFINITY)
    if request.params.min_tokens and not bool((logits > MINUS_INFINITY).any()):
        # The grammar allows only the end of the output here. A minimum length can't make the output longer than that.
        logits[allowed] = 0.0
