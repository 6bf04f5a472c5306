"""Who is in the next iteration, and with how many tokens. Pure.

Without deadlines, all whom blocks and tokens allow. With them all real time (RT), and of best effort (BE) as much as
keeps the iteration within what RT's next tokens allow. The others sit out: they keep their blocks, and nothing is
moved. Without RT everybody runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.decode_worker.eviction import Eviction
from alignedserve.decode_worker.holders import Holders
from alignedserve.decode_worker.members import Member
from alignedserve.decode_worker.mixing import Mixing
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.messages import InstanceLimits


class Iterations:
    def __init__(
        self, limits: InstanceLimits, holders: Holders, eviction: Eviction, mixing: Mixing | None
    ) -> None:
        self._limits = limits
        self._holders = holders
        self._eviction = eviction
        self._mixing = mixing
        self._num_planned = 0

    def fill(self, plan: DecodePlan) -> None:
        ready: list[Member] = []
        behind: list[Member] = []
        for member in self._holders.running.values():
            (behind if member.num_tokens - member.num_cached > 1 else ready).append(member)
        self._num_planned += 1
        mixing = self._mixing
        if mixing is None:
            self._decode(plan, ready)
            self._catch_up(plan, behind, None, [], math.inf)
        elif behind or any(not member.is_rt for member in ready):
            self._fill_mixed(mixing, plan, ready, behind)
        else:
            members = self._decode(plan, ready)
            mixing.planned([], [member.num_tokens for member in members], num_be=0)

    def _fill_mixed(
        self, mixing: Mixing, plan: DecodePlan, ready: Sequence[Member], behind: Sequence[Member]
    ) -> None:
        """Real time, then as much of best effort as it allows."""
        plan.hold_s = mixing.hold_s([each for each in self._holders.running.values() if each.is_rt])
        if plan.hold_s:
            return
        rt = self._decode(plan, [member for member in ready if member.is_rt])
        rt_behind = [member for member in behind if member.is_rt]
        bound_s = mixing.bound_s([*rt, *rt_behind])
        lengths = [member.num_tokens for member in rt]
        chunks = self._catch_up(plan, rt_behind, mixing, lengths, bound_s)
        be = [member for member in ready if not member.is_rt]
        chosen = self._decode(plan, mixing.choose(rt, be, chunks, bound_s))
        lengths += [member.num_tokens for member in chosen]
        be_behind = [member for member in behind if not member.is_rt]
        chunks += self._catch_up(plan, be_behind, mixing, lengths, bound_s, chunks)
        mixing.planned(chunks, lengths, num_be=len(chosen))

    def _decode(self, plan: DecodePlan, members: Iterable[Member]) -> list[Member]:
        """Those that have a block for their next token."""
        block_size, deciding = self._limits.block_size, []
        for member in members:
            if member.num_tokens <= member.num_blocks * block_size or self._grow(member, member.num_tokens):
                plan.run.append(member.key)
                member.last_run = self._num_planned
                deciding.append(member)
        return deciding

    def _catch_up(
        self,
        plan: DecodePlan,
        behind: Iterable[Member],
        mixing: Mixing | None,
        lengths: Sequence[int],
        bound_s: float,
        chunks: Sequence[tuple[int, int]] = (),
    ) -> list[tuple[int, int]]:
        """Those whose KV was lost, as far as tokens, blocks and time allow. Returns their chunks."""
        taken: list[tuple[int, int]] = []
        for member in behind:
            budget = self._limits.max_num_batched_tokens - len(plan.run) - sum(count for _, count in taken)
            count = min(member.num_pending, budget)
            if count > 0 and mixing:
                count = mixing.most_tokens(member, count, [*chunks, *taken], lengths, bound_s)
            if count <= 0 or not self._grow(member, member.num_cached + count):
                continue
            taken.append((member.num_cached, count))
            if count == member.num_pending:
                plan.run.append(member.key)
            else:
                plan.chunks.append((member.key, count))
        return taken

    def _grow(self, member: Member, num_tokens: int) -> bool:
        """Victims get no blocks: they are about to give theirs back."""
        if num_tokens <= member.num_blocks * self._limits.block_size:
            return True
        return member.key not in self._eviction.named and self._holders.grow(member, num_tokens)
