"""How many instances compute prompts and how many decode: decides whether one should change its role now. Pure.

The two loads are measured differently. Prompts wait for instances that compute them, and a waiting prompt is of no use.
Requests that decode share instances, and each makes the others' iterations longer, up to the objective between two
tokens or until the blocks are used up.

    wait    seconds of prompt work that was accepted and is not computed, per instance that computes prompts
    rate    seconds of prompt work that arrive per second, per instance: 1 is all that it can do
    load    of an instance that decodes, if all requests that decode, or will soon, were spread evenly: the
            largest of the share of its blocks, the share of its slots, and its iteration time over the objective

Prefill is short if prompts wait for more than a share of their objective. Decode is short if its load is near 1. The
role that is short gets an instance of the other one, if that can do with one fewer. So an island that is short of
everything stays as it is.

An instance that changes its role serves no requests for a moment, and its requests' KV crosses the host twice. So
changing back takes more than the end of the cause, and there is a pause between two changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alignedserve.protocol.messages import DECODE, PREFILL
from alignedserve.timing.cost import CostModel

# Tuned in simulation (benchmarks/results/role_change.md): OPT-13B, four A100s, conversations and bursts of code.
# Prefill is short if prompts wait for more than this share of the objective for the first token. With one instance
# fewer they may wait for no more.
SHORT_WAIT = 0.3
# The highest rate per prefill instance at which prefill can spare one.
SPARE_RATE = 0.8
# Decode is short above the first load. It can spare an instance if the rest then have no more than the second.
SHORT_LOAD, SPARE_LOAD = 0.95, 0.9
# Seconds from the end of one change to the next one.
PAUSE_S = 2.0
# Seconds that prompts may wait without a requested objective, and that best effort may wait.
UNSTATED_WAIT_S = 3.0
BEST_EFFORT_WAIT_S = 10.0
# Seconds after which a role without any instance is given to one. An instance that died returns before that, or not at
# all.
LACKING_S = 10.0
# Seconds over which arriving work is averaged, and the weight of one objective in the average of objectives.
RECENT_S = 10.0
_WEIGHT = 0.1


@dataclass(frozen=True)
class Decoding:
    """The requests that decode, or will soon, and the capacity of one instance."""

    num_requests: int
    num_tokens: int
    # Limits of one instance.
    max_tokens: int
    max_requests: int
    cost: CostModel | None = None
    # The objective between two tokens, in seconds.
    tbt_s: float = math.inf

    def load(self, num_instances: int) -> float:
        if not num_instances:
            return math.inf
        num_requests, num_tokens = self.num_requests / num_instances, self.num_tokens / num_instances
        load = max(num_tokens / self.max_tokens, num_requests / self.max_requests)
        if self.cost and self.num_requests and self.tbt_s < math.inf:
            length = math.ceil(self.num_tokens / self.num_requests)
            iteration_s = self.cost.iteration([], [length] * math.ceil(num_requests))
            load = max(load, iteration_s / self.tbt_s)
        return load


@dataclass(frozen=True)
class Seen:
    """What the router sees at a moment. An instance that is changing counts in neither role."""

    now: float
    num_prefill: int
    num_decode: int
    # Seconds of prompt work, at one instance, that was accepted and is not computed, for real time and for best effort.
    rt_work_s: float
    be_work_s: float
    decoding: Decoding


class Arrivals:
    """Recent arrivals: seconds of prompt work per second, and the objectives of real time."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._since_s = -math.inf
        self.ttft_s = self.tbt_s = math.inf

    def add(self, work_s: float, ttft_s: float, tbt_s: float, now: float) -> None:
        """Counts a real-time prompt that has arrived."""
        self._work_s = self._left(now) + work_s
        self._since_s = now
        self.ttft_s, self.tbt_s = _average(self.ttft_s, ttft_s), _average(self.tbt_s, tbt_s)

    def rate(self, now: float) -> float:
        return self._left(now) / RECENT_S

    def _left(self, now: float) -> float:
        return self._work_s * math.exp((self._since_s - now) / RECENT_S) if self._work_s else 0.0


def _average(old: float, new: float) -> float:
    if new == math.inf:
        return old
    return new if old == math.inf else old + _WEIGHT * (new - old)


class Proportion:
    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._changed_s = -math.inf
        # The role that no instance has, and since when.
        self._lacking: str | None = None
        self._lacking_since_s = 0.0

    def changed(self, now: float) -> None:
        """Notes that a change has ended, successfully or not."""
        self._changed_s = now

    def wanted(self, seen: Seen) -> str | None:
        """Returns the role that one instance of the other role should take; None: none is short, or none can be
        spared."""
        if not (seen.num_prefill and seen.num_decode):
            return self._lacked(seen)
        self._lacking = None
        if seen.now - self._changed_s < PAUSE_S:
            return None
        if self._is_prefill_short(seen, seen.num_prefill) and self._can_decode_spare(seen):
            return PREFILL
        if seen.decoding.load(seen.num_decode) > SHORT_LOAD and self._can_prefill_spare(seen):
            return DECODE
        return None

    def _lacked(self, seen: Seen) -> str | None:
        if seen.num_prefill + seen.num_decode < 2:
            self._lacking = None
            return None
        lacking = DECODE if seen.num_prefill else PREFILL
        if lacking != self._lacking:
            self._lacking, self._lacking_since_s = lacking, seen.now
        return lacking if seen.now - self._lacking_since_s >= LACKING_S else None

    def _is_prefill_short(self, seen: Seen, num_prefill: int) -> bool:
        ttft_s = self.arrivals.ttft_s
        patience_s = SHORT_WAIT * ttft_s if ttft_s < math.inf else UNSTATED_WAIT_S
        rt_wait_s, be_wait_s = seen.rt_work_s / num_prefill, seen.be_work_s / num_prefill
        return rt_wait_s > patience_s or rt_wait_s + be_wait_s > max(BEST_EFFORT_WAIT_S, patience_s)

    def _can_decode_spare(self, seen: Seen) -> bool:
        return seen.num_decode > 1 and seen.decoding.load(seen.num_decode - 1) <= SPARE_LOAD

    def _can_prefill_spare(self, seen: Seen) -> bool:
        num_left = seen.num_prefill - 1
        if not num_left or self._is_prefill_short(seen, num_left):
            return False
        return self.arrivals.rate(seen.now) / num_left <= SPARE_RATE
