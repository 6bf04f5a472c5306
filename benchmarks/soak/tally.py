"""What has become of streams and lines so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx


@dataclass
class Tally:
    # answered to their end, rightly
    num_streams: int = 0
    num_lines: int = 0
    num_jobs: int = 0
    num_tokens: int = 0
    # streams that their clients have left
    num_left: int = 0
    # Of streams and calls that are asked again: connections that broke,
    num_lost: int = 0
    # and attempts to make one while there was no gateway, and documented errors
    num_refused: int = 0
    # lines that were under way at four deaths of the gateway
    num_given_up: int = 0
    wrong: list[str] = field(default_factory=list)

    def count_broken(self, error: httpx.TransportError) -> None:
        if isinstance(error, httpx.ConnectError):
            self.num_refused += 1
        else:
            self.num_lost += 1

    def object(self, what: str) -> None:
        self.wrong.append(what)

    def __str__(self) -> str:
        return f"{self.num_streams} streams, {self.num_lines} lines, {self.num_tokens} tokens, {len(self.wrong)} wrong"
