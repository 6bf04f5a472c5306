"""Prefixes on their way to the pool, and the best effort that waits for them. Pure.

Requests with the same prefix are often submitted together, such as the lines of a job. The first of them brings the
prefix: it computes its KV and saves it to the pool. Others wait in the prefill queue until the pool has it, and then
compute only their own tokens.

A wait ends when the started request is saved, or when it is recalled for any reason. A request waits for each part of
its prompt at most once. So it starts even if all requests that would bring its prefix fail.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from alignedserve.router.requests import RequestState
from alignedserve.scheduling.prefixes import TOKENS_PER_HASH, pays_to_wait
from alignedserve.types import RequestKey


class _Wait(NamedTuple):
    state: RequestState
    # The number of its first tokens that the other request brings or has found in the pool.
    num_tokens: int


class PrefixesInFlight:
    def __init__(self) -> None:
        # The requests with prompts that begin with the tokens of each hash, in the order in which they started.
        self._by_hash: dict[bytes, list[RequestState]] = {}
        # The requests that wait, by the request that each waits for.
        self._waits: dict[RequestKey, dict[RequestKey, _Wait]] = {}
        # The request that each one waits for.
        self._bringer_of: dict[RequestKey, RequestKey] = {}

    def __contains__(self, key: RequestKey) -> bool:
        """Returns whether the request brings its prompt's KV."""
        return key in self._waits

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def num_waiting(self) -> int:
        return len(self._bringer_of)

    # ---- requests that bring KV --------------------------------------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Adds a started request that will save its whole prompt to the pool."""
        self._waits[state.key] = {}
        for block_hash in state.prefix_hashes:
            self._by_hash.setdefault(block_hash, []).append(state)

    def found(self, state: RequestState) -> list[RequestState]:
        """Returns the requests that waited for this one, if the pool has found its first tokens. They may wait again,
        for the tokens after those."""
        return self._end(state.key, state.num_found) if state.key in self and state.num_found else []

    def discard(self, state: RequestState) -> list[RequestState]:
        """Removes a request that brings nothing more. Returns those that waited for it. Safe to repeat."""
        if state.key not in self._waits:
            return []
        for block_hash in state.prefix_hashes:
            bringers = self._by_hash[block_hash]
            bringers.remove(state)
            if not bringers:
                del self._by_hash[block_hash]
        ended = self._end(state.key, state.num_tokens)
        del self._waits[state.key]
        return ended

    def _end(self, bringer: RequestKey, num_tokens: int) -> list[RequestState]:
        """Ends all waits for this request. None of these requests waits for its first `num_tokens` again."""
        waits, self._waits[bringer] = self._waits[bringer].values(), {}
        for state, num_awaited in waits:
            state.num_awaited = min(num_awaited, num_tokens)
            del self._bringer_of[state.key]
        return [wait.state for wait in waits]

    # ---- requests that wait for it -----------------------------------------------------------------------------------

    def lets_wait(self, state: RequestState) -> bool:
        """Returns whether a request that could start has to wait, and remembers what for. A request has to wait if
        another brings enough of what it lacks, and computes little else: others are computed meanwhile. Real time never
        waits. A request with KV of its own in the pool gets no other."""
        if not self._by_hash or state.is_rt or state.blocks or state.is_alone or state.is_embedding:
            return False
        hashes = state.prefix_hashes
        # If a request brings KV up to one hash, it brings or has found that up to each hash before.
        count = bisect_left(hashes, True, key=lambda each: each not in self._by_hash)
        if not count:
            return False
        bringer, num_tokens = self._by_hash[hashes[count - 1]][0], TOKENS_PER_HASH * count
        if state.deadlines.job_due_s < bringer.deadlines.job_due_s and not bringer.is_rt:
            # Others may go ahead of the bringer that would not go ahead of this one.
            return False
        num_before = max(bringer.num_found, state.num_awaited)
        num_common = num_tokens - num_before
        num_lacking = max(state.num_tokens - num_before, bringer.num_missing)
        if not pays_to_wait(num_common, num_lacking):
            return False
        self._waits[bringer.key][state.key] = _Wait(state, num_tokens)
        self._bringer_of[state.key] = bringer.key
        return True

    def forget(self, key: RequestKey) -> None:
        """Removes a request that waits. Safe to repeat."""
        if bringer := self._bringer_of.pop(key, None):
            del self._waits[bringer][key]

    def check(self, waiting: Iterable[RequestKey]) -> None:
        """Raises RuntimeError unless exactly these requests wait, each for one that brings something."""
        listed = {key: bringer for bringer, waits in self._waits.items() for key in waits}
        if listed != self._bringer_of or listed.keys() != {*waiting}:
            raise RuntimeError(f"requests {sorted(waiting)} wait, but {listed} are known to")
