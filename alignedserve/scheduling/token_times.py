"""When requests at an instance got their last tokens, and what is left of their objectives since. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.scheduling.boundary import DecodeRequest


@dataclass(eq=False, slots=True)
class Mark:
    """What is kept of a request."""

    # The number of tokens of its answer, and since when it has had so many, or is here.
    num_output: int
    since_s: float
    # For how long each of its chunks and tokens may wait and run; 0 for what is no job with a window.
    step_s: float = 0.0


class TokenTimes:
    def look(self, requests: Iterable[DecodeRequest], now: float) -> None:
        """Sees which have got a token. It must have seen a request before it says what that has left."""
        for request in requests:
            mark = request.mark
            if mark is None:
                request.mark = self._mark(request, now)
            elif mark.num_output != request.num_output:
                mark.num_output, mark.since_s = request.num_output, now

    def left_s(self, request: DecodeRequest, now: float) -> float:
        """The seconds until its next token is due, which is real time."""
        if not request.num_output:
            return request.deadlines.first_due_s - now
        return float(request.mark.since_s + request.deadlines.tbt_s - now)

    def _mark(self, request: DecodeRequest, now: float) -> Mark:
        return Mark(request.num_output, now)
