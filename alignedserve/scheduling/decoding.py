"""Helpers of decode policies. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.timing.estimate import Estimate

InOrder = Callable[[Sequence[DecodeRequest], DecodeBoundary], Sequence[DecodeRequest]]

# vLLM's watermark: the share of blocks that stays free when a request joins others.
WATERMARK = 0.01


# ---- which requests leave --------------------------------------------------------------------------------------------


def victims(at: DecodeBoundary, num_iterations: int, in_order: InOrder) -> list[DecodeRequest]:
    """Returns the requests that must leave so that blocks suffice for `num_iterations`. At least one request stays.

    Eviction takes a moment, because the router has to reserve blocks in the pool, so it is ordered ahead of time.
    """
    missing = at.growth(num_iterations) - at.num_free_blocks - at.num_blocks_to_come
    chosen: list[DecodeRequest] = []
    for request in in_order(at.running, at)[:-1] if missing > 0 else ():
        if missing <= 0:
            break
        chosen.append(request)
        missing -= at.num_freed(request) + at.growth_of(request, num_iterations)
    return chosen


def longest_of_older_batch(
    requests: Iterable[DecodeRequest], at: DecodeBoundary, has_classes: bool = False
) -> list[DecodeRequest]:
    """Returns the requests in order of eviction: those of older batches first, longer ones before shorter ones. With
    classes, best effort goes before real time. Requests that were already to be evicted at the last boundary stay in
    front."""
    return sorted(
        requests,
        key=lambda request: (
            not at.was_evicted(request),
            has_classes and request.is_rt,
            request.batch,
            -request.num_tokens,
        ),
    )


def youngest(requests: Iterable[DecodeRequest], at: DecodeBoundary) -> list[DecodeRequest]:
    """Returns the requests in order of eviction: the last admitted first. Requests that were already to be evicted at
    the last boundary stay in front."""
    in_order = [*requests][::-1]
    return sorted(in_order, key=lambda request: not at.was_evicted(request))


def return_s(request: DecodeRequest, estimate: Estimate, is_recomputed: bool) -> float:
    """Returns the seconds that the request needs to leave and to come back: for copies of its KV, or to compute again
    what is not in the pool."""
    num_pooled = request.num_pooled
    if not is_recomputed:
        return estimate.fetch(request.num_cached - num_pooled) + estimate.fetch(request.num_cached)
    computing_s = estimate.iteration([(num_pooled, request.num_tokens - num_pooled)], [])
    return computing_s + (estimate.fetch(num_pooled) if num_pooled else 0.0)


# ---- which requests run ----------------------------------------------------------------------------------------------


def run_all(at: DecodeBoundary) -> None:
    """Runs all requests for which there are blocks and tokens. Requests that are behind get the tokens that are
    left."""
    ready, behind = at.ready_and_pending()
    at.run_many(ready)
    for request in behind:
        if at.num_tokens_left:
            at.chunk(request, min(request.num_pending, at.num_tokens_left))


# ---- which requests join ---------------------------------------------------------------------------------------------


def num_ahead(config: SchedulingConfig) -> int:
    """Returns for how many iterations of all requests admission leaves blocks. vLLM's rule leaves none. Here it is one
    more than victims are chosen ahead, so that no request is admitted and evicted at the next boundary."""
    return config.evict_ahead + 1 if config.admit_ahead is None else config.admit_ahead


def watermark(at: DecodeBoundary, config: SchedulingConfig) -> int:
    """Returns the number of blocks that admission leaves free by vLLM's rule. A request that runs alone may take
    all."""
    if config.admit_ahead is not None or not (at.running or at.arriving):
        return 0
    return int(WATERMARK * at.limits.num_blocks)


def needed(at: DecodeBoundary, newcomer: DecodeRequest, config: SchedulingConfig) -> int:
    """Returns the number of blocks that must be free to admit the request."""
    return at.growth_of(newcomer, num_ahead(config))


def num_free(at: DecodeBoundary, config: SchedulingConfig) -> int:
    """Returns the number of free blocks that new requests may take; negative if the current requests will need more."""
    return at.num_free_blocks - at.growth(num_ahead(config)) - watermark(at, config)


def has_room(
    at: DecodeBoundary, newcomer: DecodeRequest, config: SchedulingConfig, num_blocks_left: int = 0
) -> bool:
    """Returns whether the request can be admitted and still leave `num_blocks_left` blocks free."""
    if at.num_free_slots <= 0:
        return False
    wanted = needed(at, newcomer, config) + num_blocks_left
    return wanted <= at.num_free_blocks and wanted <= num_free(at, config)


class RoomToCome:
    """The blocks and slots that admission finds after all leaving requests have left. New requests take them in
    order."""

    def __init__(
        self, at: DecodeBoundary, config: SchedulingConfig, leaving: Sequence[DecodeRequest]
    ) -> None:
        self._at = at
        self._config = config
        self._num_blocks = min(at.num_free_blocks, num_free(at, config)) + at.num_blocks_to_come
        self._num_blocks += sum(map(self._num_given, leaving))
        self._num_slots = at.num_free_slots + at.num_slots_to_come + len(leaving)
        # The number of requests beside which the next one runs.
        self._num_here = len(at.running) + len(at.arriving) - len(leaving)

    def fits(self, request: DecodeRequest, num_blocks_left: int = 0) -> bool:
        """Returns whether there is room for the request, with `num_blocks_left` blocks still free."""
        return (
            needed(self._at, request, self._config) + num_blocks_left <= self._num_blocks
            and self._num_slots > 0
        )

    def make(
        self,
        request: DecodeRequest,
        may_leave: Iterable[DecodeRequest],
        num_kept_free: int = 0,
        *,
        only_needed: bool = False,
    ) -> list[DecodeRequest] | None:
        """Chooses as many of `may_leave`, in order, as must leave to admit the request, and takes that room for it.
        Returns them; None if even all of them would not suffice, and then none leaves. Chooses more until
        `num_kept_free` blocks are left, if there are more. With `only_needed`, those stay that a later one of their
        class makes unnecessary, unless their eviction was ordered already."""
        num_wanted = needed(self._at, request, self._config)
        num_blocks, num_slots = self._num_blocks - num_wanted, self._num_slots - 1
        chosen: list[DecodeRequest] = []
        for each in () if num_blocks >= num_kept_free and num_slots >= 0 else may_leave:
            chosen.append(each)
            num_blocks += self._num_given(each)
            num_slots += 1
            if num_blocks >= num_kept_free and num_slots >= 0:
                break
        for each in chosen[:-1] if only_needed else ():
            is_enough = num_blocks - self._num_given(each) >= num_kept_free and num_slots > 0
            if is_enough and each.is_rt == chosen[-1].is_rt and not self._at.was_evicted(each):
                chosen.remove(each)
                num_blocks, num_slots = num_blocks - self._num_given(each), num_slots - 1
        is_alone = self._num_here == len(chosen)
        if num_blocks + (watermark(self._at, self._config) if is_alone else 0) < 0 or num_slots < 0:
            return None
        self._num_blocks, self._num_slots = num_blocks, num_slots
        self._num_here += 1 - len(chosen)
        return chosen

    def _num_given(self, request: DecodeRequest) -> int:
        """Returns the number of blocks that others may use after it has left."""
        return self._at.num_freed(request) + self._at.growth_of(request, num_ahead(self._config))


def admit_in_order(at: DecodeBoundary, config: SchedulingConfig, is_rt: bool | None = None) -> None:
    """Admits as many requests as there is room for, of one class or of both."""
    admit_while(at, config, is_rt, lambda request: has_room(at, request, config))


def admit_while(
    at: DecodeBoundary,
    config: SchedulingConfig,
    is_rt: bool | None,
    may_join: Callable[[DecodeRequest], bool],
    in_order: Callable[[Sequence[DecodeRequest]], Sequence[DecodeRequest]] = list,
) -> list[DecodeRequest]:
    """Admits candidate requests, `in_order`. When there are none left, admits the candidate batch, while the instance
    is below its fill mark. Unless `is_rt` is None, admits only that class."""
    requests, batch = at.requests, at.batch
    admitted = _admit_from(at, in_order(requests), is_rt, math.inf, may_join) if requests else []
    if batch and not any(is_rt in (None, request.is_rt) for request in at.requests):
        mark = config.fill_mark * at.limits.num_blocks
        admitted += _admit_from(at, batch, is_rt, mark, may_join)
    return admitted


def _admit_from(
    at: DecodeBoundary,
    requests: Sequence[DecodeRequest],
    is_rt: bool | None,
    fill_mark: float,
    may_join: Callable[[DecodeRequest], bool],
) -> list[DecodeRequest]:
    admitted = []
    for request in (each for each in requests if is_rt in (None, each.is_rt)):
        if should_wait(at, request):
            continue
        if at.limits.num_blocks - at.num_free_blocks >= fill_mark or not may_join(request):
            break
        at.admit(request)
        admitted.append(request)
    return admitted


# ---- instances that also compute prompts -----------------------------------------------------------------------------


def should_wait(at: DecodeBoundary, request: DecodeRequest) -> bool:
    """Returns whether another request computes or brings its prefix. Requests that begin in this plan count as well."""
    return at.should_wait(request)


def real_time_first(requests: Iterable[AnyDecode]) -> list[AnyDecode]:
    return sorted(requests, key=lambda request: not request.is_rt)


def compute(at: DecodeBoundary, request: DecodeRequest, num_tokens: int) -> int:
    """Computes up to `num_tokens` of the request's pending tokens. Returns how many."""
    most = at.limits.max_prefill_chunk or at.limits.max_num_batched_tokens
    count = min(request.num_pending, num_tokens, at.num_tokens_left, most)
    return count if count > 0 and at.chunk(request, count) else 0


def go_on(at: DecodeBoundary, requests: Sequence[DecodeRequest]) -> None:
    """Computes these requests, in order, with the tokens that are left."""
    _, behind = at.ready_and_pending()
    if not behind:
        at.run_many(requests)
        return
    for request in requests:
        compute(at, request, at.num_tokens_left)


def begin_in_order(
    at: DecodeBoundary,
    config: SchedulingConfig,
    candidates: Iterable[DecodeRequest],
    num_tokens: int | None = None,
) -> None:
    """Admits requests that had to leave, and then new prompts, while there is room and tokens are left. A prompt that
    waits for another one does not hold up the rest. `num_tokens` bounds the tokens of all prompts that begin in this
    iteration."""
    num_left = at.num_tokens_left if num_tokens is None else num_tokens
    for request in sorted(candidates, key=lambda request: not (request.is_returning or request.num_output)):
        if should_wait(at, request):
            continue
        if num_left <= 0 or not has_room(at, request, config):
            break
        at.admit(request)
        if not request.num_pooled:
            num_left -= compute(at, request, num_left)
