"""Turns on the event loop for long work: one step at a time, with the loop's other tasks in between."""

from __future__ import annotations

import asyncio


class LoopTurns:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self) -> None:
        """Waits for a turn, between one step and the next. However many tasks wait, the loop goes round between any
        two of them; the one which has waited longest is the next."""
        async with self._turn:
            await asyncio.sleep(0)
