"""The router's requests to the pool, and whether it is worth repeating refused ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.protocol.messages import AnyMessage, Commit, ForgetAll, Release, Reserve, Reserved
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.scheduling.prefixes import prefix_group
from alignedserve.types import RequestKey

# The most first blocks of prompts that are remembered. The owner with most of them loses its oldest one.
MOST_SAVED = 65_536


@dataclass(eq=False, slots=True)
class PoolClient:
    _router: RouterState
    # By owner: the hashes of first blocks for which room was reserved, so that the pool may know what follows them. The
    # least recently used first.
    _saved: dict[str, OrderedDict[bytes, None]] = field(default_factory=dict)
    # Whether the pool may know other content, which was there before this router.
    may_know_more: bool = False
    # Whether blocks were released since victims without room last asked for it.
    _may_retry_victims: bool = False
    # The number of the last Reserve.
    _number: int = 0

    def send(self, message: AnyMessage) -> None:
        if pool := self._router.cluster.pool:
            self._router.outbox.send(pool.instance_id, message)

    def reserve(self, state: RequestState, num_tokens: int, finds_only: bool = False) -> None:
        self._number += 1
        state.reserve_number = self._number
        request, hashes = state.request, self._hashes_of(state)
        follows = "tool" if request.brings_results else "user" if request.awaits else ""
        if not finds_only:
            self._note_saved(request.owner, hashes)
        self.send(
            Reserve(
                state.key,
                num_tokens,
                request.request_id,
                self._number,
                hashes,
                owner=request.owner,
                follows=follows,
                finds_only=finds_only,
            )
        )

    def may_find(self, state: RequestState) -> bool:
        """Returns whether the pool may have KV for the prompt. If nothing was saved that begins like it, the question
        is not worth the time of an answer."""
        if not self._router.cluster.loads_prefixes:
            return False
        for first in self._hashes_of(state)[:1]:
            if first in self._saved.get(state.owner, ()):
                self._saved[state.owner].move_to_end(first)
                return True
            return self.may_know_more
        return False

    def _note_saved(self, owner: str, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes[:1]:
            saved = self._saved.setdefault(owner, OrderedDict())
            saved[block_hash] = None
            saved.move_to_end(block_hash)
            if sum(map(len, self._saved.values())) > MOST_SAVED:
                max(self._saved.values(), key=len).popitem(last=False)

    def reserve_answer(self, state: RequestState) -> bool:
        """Asks for room for a complete answer, behind what is known of its prompt. Takes back the request's blocks.
        Returns False and asks for nothing if no later prompt could use the answer. Where the prompt was computed by
        the same instance, it is saved only now, so it may be used as well."""
        pool = self._router.cluster.pool
        if pool is None or not self._shares(state):
            return False
        block_size = pool.hello.limits.block_size
        prompt, answer = state.block_hashes(block_size), state.take_answer_hashes(block_size)
        if not (answer or (prompt and self._router.cluster.is_colocated)):
            return False
        self._note_saved(state.owner, [*prompt, *answer])
        # The pool may have a spare of it that the router does not count.
        state.lose_blocks()
        self.release([state.key])
        self._number += 1
        state.reserve_number = self._number
        num_tokens = (len(prompt) + len(answer)) * block_size
        self.send(
            Reserve(
                state.key,
                num_tokens,
                state.request.request_id,
                self._number,
                [*prompt, *answer],
                is_optional=True,
                awaits=state.request.awaits,
                owner=state.request.owner,
            )
        )
        return True

    def _hashes_of(self, state: RequestState) -> list[bytes]:
        """Returns the hashes of the blocks that the request may have in common with others; none if it shares no KV."""
        pool = self._router.cluster.pool
        if pool is None or state.blocks or not self._shares(state):
            return []
        return state.block_hashes(pool.hello.limits.block_size)

    def _shares(self, state: RequestState) -> bool:
        return state.may_share and self._router.cluster.shares_pool_blocks

    def brings_prefix(self, state: RequestState) -> bool:
        """Returns whether the pool will have the prompt's KV for others once it is saved."""
        return not state.blocks and self._shares(state)

    def take(self, state: RequestState, reserved: Reserved) -> None:
        """Gives the request the reserved blocks. Counts how much of its KV was found, if it may share any."""
        pool = self._router.cluster.pool
        if pool is None or reserved.blocks is None:
            raise RuntimeError(
                f"request {state.key} takes blocks, and there is no pool, or they were refused"
            )
        if self._hashes_of(state):
            counters = self._router.counters.of(pool.instance_id)
            counters.num_asked_tokens += state.num_tokens
            counters.num_found_tokens += reserved.num_found
        if not state.blocks and reserved.num_tokens > reserved.num_found:
            # The pool already had KV of it that the router did not know of, perhaps from an earlier era.
            state.is_alone |= self._router.era > 0
        state.take_blocks(reserved.blocks, reserved.num_tokens, reserved.num_found, pool.hello.limits.span)

    def note_writes(self, state: RequestState) -> None:
        """Notes that an instance was told to save more of the request's KV. Until it has, only what lasts counts."""
        if pool := self._router.cluster.pool:
            state.num_cached = pool.hello.limits.span.num_lasting(state.num_cached)

    def distrust_all(self) -> None:
        """Begins a new era: no further request gets KV that is known now, or that present requests compute from it."""
        self._router.era += 1
        self._saved.clear()
        self.may_know_more = False
        without_kv = list[RequestState]()
        for state in self._router.requests:
            if state.phase is Phase.QUEUED and not state.blocks:
                without_kv.append(state)
            else:
                state.is_alone = True
                self._router.prefill_queue.prefix_ended(state)
        for state in without_kv:
            # One of them may bring the prefix for which they waited.
            state.era, state.num_awaited = self._router.era, 0
        forget = ForgetAll(self._router.era)
        self.send(forget)
        for instance in self._router.cluster.instances:
            self._router.outbox.send(instance.instance_id, forget)

    def commit(self, state: RequestState, is_candidate: bool) -> None:
        due_s = self._router.policy.admission_due_s(state, self._router.island)
        has_group = (
            is_candidate and not state.is_rt and self._shares(state) and not self._router.cluster.has_window
        )
        group = prefix_group(state.prefix_hashes) if has_group else 0
        self.send(Commit(state.key, state.num_cached, due_s, is_candidate, group, state.first_whole))

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
