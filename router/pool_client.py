"""The router's requests to the pool, and whether it is worth repeating refused ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import AnyMessage, Commit, Release, Reserve
from alignedserve.router.requests import RequestState
from alignedserve.router.state import RouterState
from alignedserve.types import RequestKey


@dataclass(eq=False, slots=True)
class PoolClient:
    _router: RouterState
    # Whether blocks were released since victims without room last asked for it.
    _may_retry_victims: bool = False
    # The number of the last Reserve.
    _number: int = 0

    def send(self, message: AnyMessage) -> None:
        if pool := self._router.cluster.pool:
            self._router.outbox.send(pool.instance_id, message)

    def reserve(self, state: RequestState, num_tokens: int) -> None:
        self._number += 1
        state.reserve_number = self._number
        self.send(Reserve(state.key, num_tokens, state.request.request_id, self._number))

    def commit(self, state: RequestState, is_candidate: bool) -> None:
        due_s = self._router.policy.admission_due_s(state, self._router.island)
        self.send(Commit(state.key, state.num_cached, due_s, is_candidate))

    def release(self, keys: Sequence[RequestKey]) -> None:
        if keys:
            self.retry_refused()
            self.send(Release(list(keys)))

    def retry_refused(self) -> None:
        """Lets prompts and victims ask for room once more, because the pool may have some again."""
        self._may_retry_victims = True
        self._router.prefill_queue.clear_refusals()

    def take_victims_retry(self) -> bool:
        """Returns whether victims that found no room should ask again. Resets that."""
        may_retry, self._may_retry_victims = self._may_retry_victims, False
        return may_retry
