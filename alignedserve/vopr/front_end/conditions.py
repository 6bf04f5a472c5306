"""The current conditions for bytes and store calls in a whole system. Each has a random number of its own
(chances.py)."""

from __future__ import annotations

from typing import TypeVar

from alignedserve.sim.clock import Clock
from alignedserve.vopr.conditions import PassingFaults
from alignedserve.vopr.front_end.store_link import StoreFaults
from alignedserve.vopr.front_end.virtual_network import VirtualNetwork
from alignedserve.vopr.history import Late, LoseStore, StoreForgetful, StoreSlow
from alignedserve.vopr.plan import FrontPlan, Plan

Kind = TypeVar("Kind", Late, LoseStore, StoreSlow, StoreForgetful)


class FrontConditions(PassingFaults, StoreFaults):
    def __init__(self, plan: Plan, front: FrontPlan, clock: Clock) -> None:
        super().__init__(plan, clock)
        self.timeout_s = front.store_timeout_s
        self._front = front

    def rule(self, network: VirtualNetwork) -> None:
        network.latency, network.piece_bytes = self._latency_s, self._piece_bytes

    # ---- the network ----

    def _latency_s(self, process: str, is_up: bool) -> float:
        lates = [each.latency_s for each in self._of(Late, process) if each.is_up == is_up]
        return self._drawn_s(max([self._plan.max_latency_s, *lates]), f"latency {process} {is_up}")

    def _piece_bytes(self, process: str, is_up: bool) -> int:
        """Returns the most bytes of the next piece. Small pieces are rare, because each costs as much time as a large
        one."""
        most = self._front.piece_bytes
        is_whole = self._chances.next(f"whole {process} {is_up}") < 0.5
        return most * 100 if is_whole else 1 + round(most * self._chances.next(f"piece {process} {is_up}"))

    # ---- the store ----

    def is_away(self, process: str) -> bool:
        return bool(self._of(LoseStore, process))

    def delay_s(self, process: str) -> float:
        slow = [each.latency_s for each in self._of(StoreSlow, process)]
        return self._drawn_s(max([self._front.store_latency_s, *slow]), f"store {process}")

    def loses_answer(self, process: str) -> bool:
        rates = [each.rate for each in self._of(StoreForgetful, process)]
        return bool(rates) and self._chances.next(f"answer {process}") < max(rates)

    def _of(self, kind: type[Kind], process: str) -> list[Kind]:
        """Returns the current faults of the process."""
        return [each for each in self._now(kind) if each.process in ("", process)]
