"""Lets observers see each step of a router's core."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.router.events import Event, Send
from alignedserve.router.router import Router
from alignedserve.sim.router import Observer


def observed(core: Router, observers: Sequence[Observer]) -> Router:
    """Returns the core, which from here on calls the observers as the simulator's router does."""
    step = core.on

    def on(event: Event, now: float) -> list[Send]:
        sends = step(event, now)
        for observer in observers:
            observer(now, event, sends)
        return sends

    core.on = on  # type: ignore[method-assign]
    return core
