"""Which pairs of a prefill and a decode instance use the link between them, and which transfer through host memory.

    on the link -> (two pulls in a row fail) -> over host memory, for a pause -> tried with one request
        ^                                            ^                                    |    |
        |                                            '--- twice as long: that failed -----'    |
        '-------------------------------- that succeeded --------------------------------------'

Failed pulls between two ticks of the router count as one. A connection that breaks fails every pull that waits for it.
Its instance may also have died, which the router learns by the tick. When either instance reconnects, the pair starts
anew.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from alignedserve.protocol.messages import FailedPull
from alignedserve.router.clock import EventClock
from alignedserve.router.views import PrefillView
from alignedserve.types import InstanceId, RequestKey

# Failures in a row after which a pair leaves its link.
MAX_FAILURES = 2
# Seconds until the link is tried again: the first pause, and the longest.
FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 600.0

# A prefill instance, and the decode instance that pulls from it.
Pair = tuple[InstanceId, InstanceId]


@dataclass(eq=False, slots=True)
class _Trouble:
    """The state of a pair after a failed pull."""

    num_failures: int = 0
    # Seconds of the last pause; 0: the pair uses its link.
    pause_s: float = 0.0
    # When the link may be tried again: seconds on the router's clock.
    due_s: float = inf
    # The request of the last trial.
    trial: RequestKey | None = None


@dataclass(eq=False, slots=True)
class LinkHealth:
    _clock: EventClock
    _troubles: dict[Pair, _Trouble] = field(default_factory=dict)
    # The requests and the reason of failed pulls since the last tick.
    _failed: dict[Pair, tuple[set[RequestKey], str]] = field(default_factory=dict)
    _remarks: list[str] = field(default_factory=list)

    # ---- which way KV goes ------------------------------------------------------------------------------------------

    def may_stage(self, stager: PrefillView, decode: InstanceId) -> bool:
        """Returns whether a request may be staged or held there for this decode instance. During a trial of the link,
        no second request may."""
        trouble = self._troubles.get((stager.instance_id, decode))
        if trouble is None or not trouble.pause_s:
            return True
        return self._clock.now >= trouble.due_s and not stager.is_pulled(trouble.trial)

    def staged(self, stager: InstanceId, decode: InstanceId, key: RequestKey) -> None:
        """Notes that the request will be staged there, or is held there."""
        if trouble := self._troubles.get((stager, decode)):
            trouble.trial = key

    def may_pull(self, stager: InstanceId, decode: InstanceId, key: RequestKey) -> bool:
        """Returns whether a request that is staged there may use the link. It may have been staged before the link
        failed."""
        trouble = self._troubles.get((stager, decode))
        return trouble is None or not trouble.pause_s or trouble.trial == key

    def over_host(self, decode: InstanceId) -> list[InstanceId]:
        """Returns the prefill instances that send KV to this one through host memory."""
        return [
            stager for (stager, to), trouble in self._troubles.items() if to == decode and trouble.pause_s
        ]

    # ---- what becomes of pulls --------------------------------------------------------------------------------------

    def failed(self, decode: InstanceId, pull: FailedPull) -> None:
        """Records a failed pull. It counts at the next tick, if both instances are still there."""
        keys, _ = self._failed.setdefault((pull.source, decode), (set(), pull.reason))
        keys.update(pull.keys)

    def succeeded(self, stager: InstanceId, decode: InstanceId, key: RequestKey) -> None:
        pair = stager, decode
        if not self.may_pull(stager, decode, key):
            return  # It was under way when others failed.
        self._failed.pop(pair, None)
        trouble = self._troubles.pop(pair, None)
        if trouble and trouble.pause_s:
            self._remarks.append(f"KV goes from {stager} to {decode} over the link again")

    def tick(self) -> None:
        failed, self._failed = self._failed, {}
        for pair, (keys, reason) in failed.items():
            self._count(pair, keys, reason)

    def forget(self, instance_id: InstanceId) -> None:
        """Forgets everything about the links of an instance that is gone."""
        self._troubles = {pair: each for pair, each in self._troubles.items() if instance_id not in pair}
        self._failed = {pair: each for pair, each in self._failed.items() if instance_id not in pair}

    def take_remarks(self) -> list[str]:
        """Returns sentences for the log, each once."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def _count(self, pair: Pair, keys: Collection[RequestKey], reason: str) -> None:
        trouble = self._troubles.setdefault(pair, _Trouble())
        if trouble.pause_s:
            if trouble.trial in keys:
                self._pause(trouble, min(2 * trouble.pause_s, MAX_PAUSE_S))
            return
        trouble.num_failures += 1
        if trouble.num_failures == MAX_FAILURES:
            self._pause(trouble, FIRST_PAUSE_S)
            stager, decode = pair
            self._remarks.append(
                f"KV goes from {stager} to {decode} through host memory: {MAX_FAILURES} pulls over the link failed in "
                f"a row, the last because of {reason!r}; it is tried again in {FIRST_PAUSE_S:g} s"
            )

    def _pause(self, trouble: _Trouble, seconds: float) -> None:
        trouble.pause_s, trouble.due_s, trouble.trial = seconds, self._clock.now + seconds, None
