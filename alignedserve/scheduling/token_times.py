"""When the requests of an instance got their last tokens, and how much of their objectives is left. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.scheduling.boundary import DecodeRequest


@dataclass(eq=False, slots=True)
class Mark:
    """The policy's data of a request."""

    # The number of its output tokens, and since when it has had this number or has been here.
    num_output: int
    since_s: float
    # Seconds that each of its chunks and tokens may wait and run; 0: it is not a job with a window.
    step_s: float = 0.0


class TokenTimes:
    def look(self, requests: Iterable[DecodeRequest], now: float) -> None:
        """Updates the marks of requests that got a token. Must see a request before the other methods are called for
        it."""
        for request in requests:
            mark = request.mark
            if mark is None:
                request.mark = self._mark(request, now)
            elif mark.num_output != request.num_output:
                mark.num_output, mark.since_s = request.num_output, now

    def left_s(self, request: DecodeRequest, now: float) -> float:
        """Returns the seconds until its next token is due. Real time only."""
        if not request.num_output:
            return request.deadlines.first_due_s - now
        return float(request.mark.since_s + request.deadlines.tbt_s - now)

    def _mark(self, request: DecodeRequest, now: float) -> Mark:
        return Mark(request.num_output, now)
