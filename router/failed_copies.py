"""Failed copies of KV, kept until the router's next tick. The cause of a failure may persist, and immediate retries
would run in a tight loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import Failed
from alignedserve.router.eviction import Eviction
from alignedserve.router.recovery import Recovery
from alignedserve.router.request_state import RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.types import InstanceId


@dataclass(frozen=True)
class _FailedCopy:
    state: RequestState
    # When the request entered the phase in which its copy failed.
    since_s: float
    sender: InstanceId
    failed: Failed


@dataclass(eq=False, slots=True)
class FailedCopies:
    _requests: RequestTable
    _recovery: Recovery
    _eviction: Eviction
    _waiting: list[_FailedCopy] = field(default_factory=list)

    def add(self, sender: InstanceId, failed: Failed) -> None:
        state = self._requests.get(failed.key)
        if state and state.instance_id == sender:
            self._waiting.append(_FailedCopy(state, state.since_s, sender, failed))

    def retry(self) -> None:
        """Handles the failures of requests that are still in the phase in which their copy failed."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if self._requests.get(each.failed.key) is not each.state or each.state.since_s != each.since_s:
                continue
            if each.failed.what == "evict":
                self._eviction.failed(each.sender, each.failed.key)
            else:
                self._recovery.failed(each.sender, each.failed)
