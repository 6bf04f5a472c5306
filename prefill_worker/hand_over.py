"""RT prompts with newly computed KV that a decode instance may pull from the blocks where it was computed, beside the
copy to the pool.

    held -> let go, when the KV was pulled, or the router has sent Unstage, or the request is dropped

A prompt that is let go during a pull is held until the pull has ended. Its blocks are free when it is let go and its KV
is in the pool. A new order for the same request waits for that. Held blocks share a limit with the candidates of decode
instances (`stages.py`), so the longest prompt always has room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.instance.executor import Transfers
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.transport.completions import Outcome
from alignedserve.types import BlockId, RequestKey


class HandOver:
    def __init__(
        self, schedule: PrefillSchedule, transfers: Transfers, let_go: Callable[[RequestKey], None]
    ) -> None:
        """`let_go` is called when a prompt is no longer held."""
        self._schedule = schedule
        self._transfers = transfers
        self._let_go = let_go
        # For each held prompt, the order that waits until it is gone.
        self._then: dict[RequestKey, Callable[[], None] | None] = {}

    def __len__(self) -> int:
        return len(self._then)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._then

    def hold(self, key: RequestKey, blocks: Sequence[BlockId]) -> bool:
        """Lets decode instances pull the prompt's KV. Returns False and does nothing if too many blocks are already
        held."""
        if not self._schedule.hold(key):
            return False
        self._then[key] = None
        self._transfers.stage(key, blocks, self._left_buffer)
        return True

    def when_gone(self, key: RequestKey, order: Callable[[], None]) -> bool:
        """Carries out the order when the prompt is gone. Returns False and does nothing if it is not held."""
        if key not in self._then:
            return False
        self._then[key] = order
        return True

    def drop(self, key: RequestKey) -> bool:
        """Lets no instance pull the prompt any more, and forgets the order that waits for it. Returns False if it is
        not held. Safe to repeat."""
        if key not in self._then:
            return False
        self._then[key] = None
        self._transfers.unstage(key)
        return True

    def _left_buffer(self, outcome: Outcome) -> None:
        """Handles the end of the hold: the prompt was pulled or withdrawn."""
        (key,) = outcome.keys
        order = self._then.pop(key)
        self._schedule.let_go(key)
        self._let_go(key)
        if order:
            order()
