"""Checks that a request submitted again comes with the tokens that its client has: all of them, and the right ones."""

from __future__ import annotations

from alignedserve.protocol.messages import Request, Submit
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.clock import Clock
from alignedserve.sim.model import sample
from alignedserve.vopr.failures import Broken


class Delivered:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # For each call id: when the call was made, and how many tokens its client had at which second.
        self._calls: dict[str, list[tuple[float, int]]] = {}

    def begins(self, call: str) -> None:
        self._calls[call] = [(self._clock.now, 0)]

    def shown(self, call: str, num_tokens: int) -> None:
        self._calls[call].append((self._clock.now, num_tokens))

    def __call__(self, now: float, event: Event, sends: list[Send]) -> None:
        match event:
            case Received(message=Submit(request=request, delivered=delivered, waited_s=waited_s)):
                self._check_right(request, delivered)
                if shown := self._calls.get(request.request_id):
                    # It was sent then, or later.
                    sent_s = shown[0][0] + waited_s
                    num_shown = max(count for at_s, count in shown if at_s < sent_s or count == 0)
                    if len(delivered) < num_shown:
                        raise Broken(
                            f"a request is submitted with {len(delivered)} tokens; its client has {num_shown}"
                        )

    def _check_right(self, request: Request, delivered: list[int]) -> None:
        if delivered != [sample(request.seed, k) for k in range(len(delivered))]:
            raise Broken(f"a request is submitted with wrong tokens (seed {request.seed}, {delivered})")
