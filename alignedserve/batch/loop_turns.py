"""Turns on the event loop, for those who have much to do: a step each, one after the other, and others in between."""

from __future__ import annotations

import asyncio


class LoopTurns:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self) -> None:
        """Between one step and the next one. However many want to go on, the loop goes round between any two of them;
        who has waited longest is the next."""
        async with self._turn:
            await asyncio.sleep(0)
