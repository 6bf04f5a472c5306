"""Prompts, from their arrival until their KV is in the pool. Pure. Their states are drawn in `scheduled_request.py`.

When a prompt starts, it gets blocks for all of its tokens, including shared ones. It holds them until all of its KV is
in the pool, and while decode instances may pull it. Abort removes it in any state. Blocks under a copy are held until
the copy is reported, even if the request was aborted.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from alignedserve.instance.memory import BlockManager
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.prefill_worker.scheduled_request import (
    PromptState,
    ScheduledRequest,
    num_tokens,
)
from alignedserve.prefill_worker.table import PrefillTable
from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


class PromptTable(PrefillTable):
    def __init__(self, max_num_seqs: int, memory: BlockManager, prefix_cache: PrefixCache) -> None:
        super().__init__(memory)
        self._max_num_seqs = max_num_seqs
        self._prefix_cache = prefix_cache
        # Prompts that have not been in any plan yet.
        self._new: list[ScheduledRequest] = []
        # The number of prompts with slots, by whether they are RT.
        self._num_slots = {True: 0, False: 0}

    # ---- from state to state ----------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        num_pending = num_tokens(work) - work.num_cached
        request = ScheduledRequest(work, num_pending, block_hashes=self._prefix_cache.block_hashes(work))
        self._waiting[request.key] = request
        self._new.append(request)

    @property
    def num_missing(self) -> Counter[str]:
        """The tokens that each owner's prompts still lack."""
        missing = Counter[str]()
        for request in chain(self._waiting.values(), self._started.values()):
            if request.num_pending and request.state is not PromptState.ABORTED:
                missing[request.owner] += request.num_pending
        return missing

    def see_new(self, now: float) -> None:
        """Records when the new prompts were first seen. Call it before a plan."""
        for request in self._new:
            request.since_s = now
        self._new.clear()

    def start(self, request: ScheduledRequest) -> None:
        self._started[request.key] = self._waiting.pop(request.key)
        num_shared, num_cached = self._prefix_cache.take(request.work, request), request.work.num_cached
        # Also those blocks that it passes with what it shares here: they go to the pool.
        self._reserve(request, request.num_tokens, num_cached)
        request.num_pending = request.num_tokens - max(num_shared, num_cached)
        self._enter(request, PromptState.LOADING if num_cached > num_shared else PromptState.COMPUTING)

    def loaded(self, key: RequestKey) -> bool:
        """Reports that the prompt's cached KV has arrived. Returns False if it was aborted meanwhile and is gone."""
        request = self._started[key]
        if request.state is PromptState.ABORTED:
            self._leave(key)
            return False
        self._enter(request, PromptState.COMPUTING)
        return True

    def computed(self, key: RequestKey, count: int) -> None:
        request = self._started[key]
        request.num_pending -= count
        if request.num_pending == 0:
            self._enter(request, PromptState.SAVING)

    def let_go(self, key: RequestKey) -> None:
        """Ends `PrefillSchedule.hold`: no decode instance pulls the prompt now or later."""
        request = self._started[key]
        request.is_held = False
        if request.state is PromptState.SAVED:
            self._leave(key)

    def saved(self, key: RequestKey) -> None:
        """Reports that all KV of the prompt is in the pool; or that an aborted prompt is not held and has no copy
        running."""
        request = self._started[key]
        if request.state is not PromptState.ABORTED:
            self._enter(request, PromptState.SAVED)
        if not request.is_held:
            self._leave(key)

    def preempt(self, request: ScheduledRequest) -> None:
        self._enter(request, PromptState.PREEMPTING)

    def preempted(self, key: RequestKey) -> None:
        """Reports that the prompt's computed KV is in the pool. The prompt waits again."""
        scheduled = self._started[key]
        scheduled.preempt()
        self._leave(key)
        scheduled.block_hashes = self._prefix_cache.block_hashes(scheduled.work)
        self._waiting[key] = scheduled

    def abort(self, key: RequestKey) -> bool:
        """Returns True if the request's blocks are held until a copy, or its part in an iteration, has ended."""
        self._waiting.pop(key, None)
        if key in self._started:
            self._enter(self._started[key], PromptState.ABORTED)
        return key in self._started

    def _enter(self, request: ScheduledRequest, state: PromptState) -> None:
        had_slot = request.has_slot
        request.enter(state)
        self._num_slots[request.is_rt] += request.has_slot - had_slot

    # ---- counts -----------------------------------------------------------------------------------------------------

    def in_state(self, state: PromptState) -> list[ScheduledRequest]:
        return [request for request in self._started.values() if request.state is state]

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - sum(self._num_slots.values())

    @property
    def is_be_started(self) -> bool:
        return self._num_slots[False] > 0

    def check_slots(self) -> None:
        with_slots = [request.is_rt for request in self._started.values() if request.has_slot]
        num_slots = {is_rt: with_slots.count(is_rt) for is_rt in (True, False)}
        if num_slots != self._num_slots:
            raise RuntimeError(f"slots are counted as {self._num_slots}, and are {num_slots}")

    @property
    def num_held_blocks(self) -> int:
        """Those of prompts that decode instances may pull. They count in the candidates' share."""
        return sum(each.num_blocks for each in self._started.values() if each.is_held)

    @property
    def rt_behind_copies(self) -> list[ScheduledRequest]:
        """RT with KV that is being copied, and RT that may be waiting for blocks that are being freed. It continues
        when the copy has ended, and then waits for the end of the iteration."""
        copied = (PromptState.LOADING, PromptState.SAVING)
        found = [each for each in self._started.values() if each.state in copied and each.is_rt]
        if any(each.state is PromptState.PREEMPTING for each in self._started.values()):
            found += [each for each in self._waiting.values() if each.is_rt]
        return found
