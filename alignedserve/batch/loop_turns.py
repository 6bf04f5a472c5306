"""Turns on the event loop for long work: one step at a time, and the loop's other tasks in between."""

from __future__ import annotations

import asyncio


class LoopTurns:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self) -> None:
        """Waits for a turn; call it between two steps. The loop runs its other tasks between any two turns, however
        many tasks wait. Turns are first come, first served."""
        async with self._turn:
            await asyncio.sleep(0)
