"""What a decode instance does at its next iteration boundary. Pure: no tensors, no clock, counts of blocks only.

The running batch R, candidate requests Q (they belong with R) and the candidate batch B (it runs next), after each
iteration:
1. who ended leaves, and its blocks are free (`holders.py`);
2. when R will not fit: victims are named (`eviction.py`, `victims.py`);
3. Q is admitted in order while there are slots and blocks (`candidates.py`, `admission.py`);
4. B is admitted likewise once Q is empty and R is below its fill mark.

Where the discipline has deadlines, and how long iterations take can be foretold, real time (RT) and best effort (BE)
share it like this (`mixing.py`):

- **Time.** All RT runs, and of BE as much as RT allows (`iterations.py`). While RT is about to come, iterations are
  short, and none begins in the moment in which its KV is on its way.
- **Room.** RT is admitted before BE, which leaves some blocks and a slot free for it. When RT finds none all the same,
  BE is evicted.
- **Trickle.** While BE is there, a credit grows, which is spent on BE beyond what RT allows.
"""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.decode_worker.admission import Admission
from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.eviction import Eviction
from alignedserve.decode_worker.holders import Holders
from alignedserve.decode_worker.iterations import Iterations
from alignedserve.decode_worker.mixing import Mixing
from alignedserve.decode_worker.options import DecodeOptions
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.estimate import Estimate
from alignedserve.messages import InstanceLimits, Work
from alignedserve.types import InstanceId, RequestKey


class DecodeSchedule:
    def __init__(
        self,
        limits: InstanceLimits,
        options: DecodeOptions | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        """Without an estimate there are no deadlines, only classes."""
        self.limits = limits
        options = options or DecodeOptions()
        mixing = None
        if estimate is not None and options.discipline.has_deadlines:
            mixing = Mixing(limits, options.mix, estimate)
        candidates, holders = Candidates(limits.max_model_len), Holders(limits)
        self._mixing, self._candidates, self._holders = mixing, candidates, holders
        self._eviction = Eviction(limits.block_size, options, candidates, holders, mixing)
        self._admission = Admission(limits, options, candidates, holders, mixing)
        self._iterations = Iterations(limits, holders, self._eviction, mixing)

    def plan(self, now: float) -> DecodePlan:
        """Takes the blocks that it plans with. What it plans fits."""
        if self._mixing:
            running, pulling = self._holders.running.values(), self._holders.pulling.values()
            self._mixing.look([*running], [*pulling], [*self._candidates], now)
        plan = DecodePlan(wants_evicted=self._eviction.choose())
        plan.pulls += self._admission.admit_before_iteration()
        self._iterations.fill(plan)
        plan.pulls += self._admission.admit_beside_iteration()
        return plan

    # ---- orders -----------------------------------------------------------------------------------------------------

    def offer(self, works: Iterable[Work], is_batch: bool, source: InstanceId | None = None) -> None:
        """Candidates from here on. A batch is one by itself, also beside what is left of an earlier one."""
        if is_batch:
            self._candidates.begin_batch()
        for work in works:
            key = work.request.key
            if key in self._candidates or key in self._holders:
                raise RuntimeError(f"request {key}: offered, but it is here already")
            self._candidates.add(work, is_batch, source)

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        """Real time that will be offered in a moment: prompts that are computed, and those that have been."""
        if self._mixing:
            self._mixing.expect(num_prefilling, num_ready, now)

    def drop_candidates(self) -> list[RequestKey]:
        """Takes all of them back. Returns those that are being pulled: they are left to `abort`."""
        self._candidates.clear()
        return list(self._holders.pulling)

    def evict(self, key: RequestKey) -> bool:
        """It runs no more; its blocks are held until `evicted`. False, and nothing changed, if it does not run."""
        return self._holders.evict(key)

    def abort(self, key: RequestKey) -> bool:
        """Forgets it, whatever its state. True if its blocks are held until the copy under way is reported."""
        return not self._candidates.drop(key) and self._holders.abort(key)

    # ---- what came of plans -----------------------------------------------------------------------------------------

    def pulled(self, key: RequestKey) -> bool:
        """Its KV has arrived. True: it runs from here on; False: it was aborted meanwhile, and is gone."""
        return self._holders.pulled(key)

    def pull_failed(self, key: RequestKey) -> None:
        self._holders.pull_failed(key)

    def evicted(self, key: RequestKey) -> bool:
        """Its KV is in the pool, and it is gone. False if it was aborted meanwhile."""
        return self._holders.evicted(key)

    def evict_failed(self, key: RequestKey) -> bool:
        """True: it runs again; False: it was aborted meanwhile, and is gone."""
        return self._holders.evict_failed(key)

    def took(self, seconds: float, outside_s: float = 0.0) -> None:
        """The iteration of the last plan, and what part of it was outside the engine. Corrects what the next ones are
        foretold to take."""
        if self._mixing:
            self._mixing.took(seconds, outside_s)

    def computed(self, key: RequestKey, count: int) -> None:
        """A part of what was pending; no token came of it."""
        self._holders.running[key].num_cached += count

    def sampled(self, keys: Iterable[RequestKey]) -> None:
        running = self._holders.running
        for key in keys:
            member = running[key]
            member.num_cached = member.num_tokens
            member.num_tokens += 1

    def ended(self, key: RequestKey) -> None:
        self._holders.ended(key)

    # ---- counts -----------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> float:
        """Of iterations, measured over predicted."""
        return self._mixing.estimate.pace if self._mixing else 1.0

    @property
    def num_free_blocks(self) -> int:
        return self._holders.num_free

    @property
    def num_running(self) -> int:
        return len(self._holders.running)

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def best_effort(self) -> tuple[int, int]:
        """Requests of it that run, and their blocks."""
        blocks = [member.num_blocks for member in self._holders.running.values() if not member.is_rt]
        return len(blocks), sum(blocks)

    def lengths(self) -> list[int]:
        """Of all that run, in tokens."""
        return [member.num_tokens for member in self._holders.running.values()]

    def source_of(self, key: RequestKey) -> InstanceId | None:
        """Where to pull it from; of a request in a plan's pulls."""
        return self._holders.pulling[key].source

    def check(self) -> None:
        """Every block is held once or free."""
        self._holders.check()

    def check_idle(self) -> None:
        self.check()
        num_left = self.num_candidates + len(self._holders)
        if num_left:
            raise RuntimeError(f"idle, but {num_left} requests are left")
