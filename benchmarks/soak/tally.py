"""Counts of streams and lines so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx2


@dataclass
class Tally:
    # Correctly answered to their end.
    num_streams: int = 0
    num_lines: int = 0
    num_jobs: int = 0
    num_tokens: int = 0
    # Streams that their clients have left.
    num_left: int = 0
    # Streams and calls that are retried because a connection broke.
    num_lost: int = 0
    # Streams and calls that are retried because there was no gateway, or because of a documented error.
    num_refused: int = 0
    # Lines that were running at four deaths of the gateway.
    num_given_up: int = 0
    wrong: list[str] = field(default_factory=list)

    def count_broken(self, error: httpx2.TransportError) -> None:
        if isinstance(error, httpx2.ConnectError):
            self.num_refused += 1
        else:
            self.num_lost += 1

    def object(self, what: str) -> None:
        self.wrong.append(what)

    def __str__(self) -> str:
        return f"{self.num_streams} streams, {self.num_lines} lines, {self.num_tokens} tokens, {len(self.wrong)} wrong"
