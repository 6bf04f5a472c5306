"""The pool between its connection and its ticks, live and in virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from alignedserve.kvpool.pool import Pool
from alignedserve.protocol.messages import AnyMessage, Message, PoolUse, Welcome

# Seconds between checks of the reservations. Changes in the pool's use are then sent to the router.
TICK_S = 0.25


class PoolShell:
    def __init__(
        self,
        pool: Pool,
        send: Callable[[Message], None],
        has_router: Callable[[], bool],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._pool = pool
        self._send = send
        self._has_router = has_router
        self._clock = clock or time.monotonic
        # The use that the router knows.
        self._told = PoolUse(-1, -1)

    def on_up(self, welcome: Welcome) -> None:
        self._told = PoolUse(-1, -1)

    def on_down(self) -> None:
        """Does nothing: the pool keeps what it holds for the next router."""

    def on_message(self, message: AnyMessage) -> None:
        self._answer(self._pool.on(message, self._clock()))

    def tick(self) -> None:
        self._answer(self._pool.tick(self._clock(), self._has_router()))
        use = PoolUse(self._pool.num_free_blocks, self._pool.num_spare_blocks)
        if use != self._told:
            self._told = use
            self._send(use)
            if use.num_free_blocks == self._pool.num_blocks:
                self._pool.check_idle()

    def _answer(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._send(message)
