"""Admits requests to a decode instance. Pure.

Candidate requests are admitted in order. The candidate batch follows once there are none, while the running batch is
below its fill mark. Real time (RT) goes before best effort (BE), and BE leaves headroom. RT is admitted in the order of
its due times, except that a lost request counts as due DEMOTION_S later: a prompt that can't be in time, or a stream
that has missed its objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.rt_demand import RtDemand
from alignedserve.scheduling.policies.aligned.decode.slo_scheduler import DecodeSloScheduler
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.timing.estimate import Estimate

# The mark of a BE request that was admitted on credit. It is not evicted for RT.
OWED = "owed"


class Admission:
    def __init__(
        self, config: SchedulingConfig, estimate: Estimate, slo: DecodeSloScheduler, demand: RtDemand
    ) -> None:
        self._config = config
        self._estimate = estimate
        self._slo = slo
        self._demand = demand

    # ---- when -------------------------------------------------------------------------------------------------------

    def admit_before_iteration(self, at: DecodeBoundary) -> None:
        """Admits RT, and before it one BE request if BE is owed and absent. Runs before the iteration is planned, which
        may wait for RT's KV."""
        if self._slo.is_be_owed and not _is_be_started(at):
            self._admit_owed(at)
        if any(request.num_pooled for request in self._admit(at, is_rt=True)):
            self._demand.pulls()

    def admit_beside_iteration(self, at: DecodeBoundary) -> None:
        """Admits BE if no RT waits. Its KV is loaded while the iteration runs."""
        is_rt_waiting = any(request.is_rt for request in chain(at.requests, at.batch))
        # An idle instance has no next boundary at which it could try again.
        may_pull = not at.running or self._demand.may_pull_be()
        if may_pull and not is_rt_waiting:
            self._admit(at, is_rt=False)

    def _admit(self, at: DecodeBoundary, is_rt: bool) -> list[DecodeRequest]:
        return decoding.admit_while(
            at,
            self._config,
            is_rt,
            lambda request: self._has_room(at, request),
            lambda requests: by_due(requests, self._estimate, at.now) if is_rt else requests,
        )

    def _admit_owed(self, at: DecodeBoundary) -> None:
        """Admits the first BE request that fits, even if RT waits."""
        for scheduled in chain(at.requests, at.batch):
            if not scheduled.is_rt and self._fits(at, scheduled):
                scheduled.mark = OWED
                at.admit(scheduled)
                return

    # ---- whether there is room --------------------------------------------------------------------------------------

    def _has_room(self, at: DecodeBoundary, newcomer: DecodeRequest) -> bool:
        """Returns whether the newcomer may be admitted. BE leaves headroom, unless nothing else runs: a BE request that
        is alone may take everything, because it can be evicted for RT."""
        if newcomer.is_rt:
            growth = at.growth(decoding.num_ahead(self._config), is_rt=True)
            growth += at.growth(self._config.evict_ahead, is_rt=False)
            needed = decoding.needed(at, newcomer, self._config) + decoding.watermark(at, self._config)
            return at.num_free_slots > 0 and needed + growth <= at.num_free_blocks
        if not (at.running or at.arriving):
            return self._fits(at, newcomer)
        has_slot = at.num_free_slots > self._demand.num_headroom_slots
        return has_slot and self._fits(at, newcomer, self._demand.num_headroom_blocks)

    def _fits(self, at: DecodeBoundary, newcomer: DecodeRequest, num_left: int = 0) -> bool:
        return decoding.has_room(at, newcomer, self._config, num_left)


def by_due(requests: Iterable[AnyDecode], estimate: Estimate, now: float) -> list[AnyDecode]:
    """Returns RT requests sorted by due time. A lost one counts as due DEMOTION_S later. A stream that is only a little
    late is not lost: it would else stand still while prompts go before it."""

    def place_s(request: DecodeRequest) -> float:
        due_s = request.deadlines.token_due_s(request.num_output)
        if request.num_output:
            return (
                request.deadlines.lost_s(request.num_output) + DEMOTION_S if request.is_lost(now) else due_s
            )
        return due_s + DEMOTION_S if due_s < now + needed_s(request, estimate) else due_s

    return sorted(requests, key=place_s)


def needed_s(
    request: DecodeRequest,
    estimate: Estimate,
    ahead: Sequence[tuple[int, int]] = (),
    lengths: Sequence[int] = (),
) -> float:
    """Returns the seconds from a candidate's admission to its next token, with these chunks before it, and decodes of
    these lengths beside it."""
    fetching_s = estimate.fetch(request.num_pooled) if request.num_pooled else 0.0
    return fetching_s + estimate.iteration([*ahead, (request.num_cached, request.num_pending)], lengths)


def _is_be_started(at: DecodeBoundary) -> bool:
    return any(not request.is_rt for request in chain(at.running, at.arriving))
