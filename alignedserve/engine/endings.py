"""Decides whether a request's newest token is its last."""

from __future__ import annotations

import numpy as np

from alignedserve.engine.request import Request
from alignedserve.engine.validate import Vocabulary


class Endings:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._eos_token_ids = vocabulary.eos_token_ids
        # Tokens that end the output of some request, past ones included. A row with one of them is examined more
        # closely.
        self._is_stop = np.zeros(vocabulary.size, dtype=bool)
        self._mark(vocabulary.eos_token_ids)

    def watch(self, request: Request) -> None:
        """Adds the request's stop tokens to those that `suspects` finds."""
        self._mark(request.stop_token_ids)

    def suspects(self, tokens: np.ndarray, num_left: np.ndarray) -> list[int]:
        """Rows that may end with these tokens; all rows that do end are among them. `num_left`: tokens that each may
        still get."""
        rows: list[int] = np.flatnonzero(self._is_stop[tokens] | (num_left <= 0)).tolist()
        return rows

    def reasons(self, request: Request) -> tuple[str | None, int | None]:
        """(finish_reason, stop_reason) after the request's newest token; (None, None) if it continues."""
        token, num_output = request.output[-1], len(request.output)
        is_eos = token in self._eos_token_ids
        # A grammar allows the end of sequence only at its own end, never where something must follow.
        ends_grammar = request.matcher is not None and is_eos
        is_long_enough = num_output >= request.params.min_tokens
        if ends_grammar or (token in request.stop_token_ids and is_long_enough):
            is_plain_end = ends_grammar or (is_eos and not request.params.ignore_eos)
            return "stop", None if is_plain_end else token
        return ("length" if num_output >= request.max_output_len else None), None

    def _mark(self, token_ids: frozenset[int]) -> None:
        self._is_stop[[token for token in token_ids if token < len(self._is_stop)]] = True
