"""Prompts, from when they come until their KV is in the pool. Pure.

    waiting -> loading (if the pool has some of its KV) -> computing, chunk by chunk -> saving -> gone
       '------------------ giving up <-----------------------'

A prompt gets blocks for all of its tokens when it starts, those that it shares included, and holds them until all of
its KV is in the pool. Abort takes it from anywhere. Blocks under a copy are held until the copy is reported, whatever
became of the request.
"""

from __future__ import annotations

from collections.abc import Mapping

from alignedserve.instance.shares import Shares
from alignedserve.prefill_worker.blocks import Blocks
from alignedserve.prefill_worker.members import Member, Members, State, num_tokens
from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


class Prompts:
    def __init__(self, max_num_seqs: int, blocks: Blocks, shares: Shares) -> None:
        self._max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._shares = shares
        # both in the order in which they came there; those that wait have no blocks
        self._waiting: Members = {}
        self._started: Members = {}
        # no plan has seen them yet
        self._new: list[Member] = []
        # of those that have started, those with slots, by whether they are real time
        self._num_slots = {True: 0, False: 0}
        # for others to look at
        self.waiting: Mapping[RequestKey, Member] = self._waiting
        self.started: Mapping[RequestKey, Member] = self._started

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._started

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    # ---- from state to state ----------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        num_pending = num_tokens(work) - work.num_cached
        member = Member(work, num_pending, names=self._shares.names(work))
        self._waiting[member.key] = member
        self._new.append(member)

    def see_new(self, now: float) -> None:
        """Before a plan."""
        for member in self._new:
            member.since_s = now
        self._new.clear()

    def start(self, member: Member) -> None:
        self._started[member.key] = self._waiting.pop(member.key)
        self._blocks.hold(member, self._blocks.needed(member.num_tokens))
        if member.work.num_cached:
            self._enter(member, State.LOADING)
        else:
            member.num_pending -= self._shares.take(member.work)
            self._enter(member, State.COMPUTING)

    def loaded(self, key: RequestKey) -> bool:
        member = self._started[key]
        if member.state is State.DYING:
            self._leave(key)
            return False
        self._enter(member, State.COMPUTING)
        return True

    def computed(self, key: RequestKey, count: int) -> None:
        member = self._started[key]
        member.num_pending -= count
        if member.num_pending == 0:
            self._enter(member, State.SAVING)

    def saved(self, key: RequestKey) -> None:
        state = self._started[key].state
        if state not in (State.SAVING, State.DYING):
            raise RuntimeError(f"request {key}: saved, but it is {state.name}")
        self._leave(key)

    def give_up(self, member: Member) -> None:
        self._enter(member, State.GIVING_UP)

    def gave_up(self, key: RequestKey) -> None:
        member = self._started[key]
        if member.state is not State.GIVING_UP:
            raise RuntimeError(f"request {key}: gave its blocks up, but it is {member.state.name}")
        self._leave(key)
        member.give_up()
        self._waiting[key] = member

    def abort(self, key: RequestKey) -> bool:
        """True if its blocks are held until a copy, or its part in an iteration, has ended."""
        self._waiting.pop(key, None)
        if key in self._started:
            self._enter(self._started[key], State.DYING)
        return key in self._started

    def drop_waiting(self) -> None:
        self._waiting.clear()

    def _enter(self, member: Member, state: State) -> None:
        self._num_slots[member.is_rt] -= member.has_slot
        member.state = state
        self._num_slots[member.is_rt] += member.has_slot

    def _leave(self, key: RequestKey) -> None:
        self._blocks.free(self._started.pop(key))

    # ---- counts -----------------------------------------------------------------------------------------------------

    def in_state(self, state: State) -> list[Member]:
        return [member for member in self._started.values() if member.state is state]

    @property
    def num_blocks(self) -> int:
        return sum(member.num_blocks for member in self._started.values())

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - sum(self._num_slots.values())

    @property
    def is_be_started(self) -> bool:
        return self._num_slots[False] > 0

    def check_slots(self) -> None:
        with_slots = [member.is_rt for member in self._started.values() if member.has_slot]
        num_slots = {is_rt: with_slots.count(is_rt) for is_rt in (True, False)}
        if num_slots != self._num_slots:
            raise RuntimeError(f"slots are counted as {self._num_slots}, and are {num_slots}")

    @property
    def is_rt_copied(self) -> bool:
        """It goes on when the copy has ended: then it should not find a chunk of best effort under way, whose end it
        would have to wait for."""
        copied = (State.LOADING, State.SAVING)
        if any(each.state in copied and each.is_rt for each in self._started.values()):
            return True
        is_waiting = any(each.is_rt for each in self._waiting.values())
        return is_waiting and any(each.state is State.GIVING_UP for each in self._started.values())
