"""The faults that were injected, and which errors of clients they excuse. Pure; times are on one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.soak.plan import Episode
from benchmarks.soak.silences import Silence

# Delay with which a client may notice a fault, for instance because of a full buffer or a busy gateway, in seconds.
GRACE_S = 2.0
# Seconds without a router after which a request fails.
NO_ROUTER_S = 60.0


@dataclass
class Fault:
    episode: Episode
    at_s: float
    # When the system had recovered; None: not yet.
    whole_s: float | None = None
    silence: Silence = field(default_factory=Silence)
    num_lost: int = 0

    @property
    def took_s(self) -> float | None:
        return None if self.whole_s is None else self.whole_s - self.at_s

    def lasted_in(self, begin_s: float, end_s: float) -> bool:
        return self.at_s <= end_s and (self.whole_s is None or begin_s <= self.whole_s)

    def lasted(self, now: float) -> float:
        return (now if self.whole_s is None else self.whole_s) - self.at_s


class FaultLog:
    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self.faults: list[Fault] = []

    def add(self, episode: Episode, now: float) -> Fault:
        self.faults.append(Fault(episode, now))
        return self.faults[-1]

    def excuses_lost(self, begin_s: float, end_s: float) -> bool:
        """Whether a fault excuses a broken connection. Only the gateway has connections to clients."""
        return "gateway" in self._roles(begin_s, end_s)

    def excuses_status(self, status: int, begin_s: float, end_s: float, uses_store: bool = False) -> bool:
        """Whether a fault excuses the status, as documented in docs/reference/api.md under Errors."""
        roles = self._roles(begin_s, end_s)
        match status:
            case 503:
                return bool(roles & {"router", "gateway"}) or (uses_store and "store" in roles)
            case 408:
                # A body was not read while the gateway was stopped.
                return "gateway" in roles
            case 500:
                return self._had_no_router_for_long(begin_s, end_s)
        return False

    def num_gateway_faults(self, begin_s: float, end_s: float) -> int:
        found = self._between(begin_s, end_s)
        return sum(strike.role == "gateway" for fault in found for strike in fault.episode.strikes)

    def _had_no_router_for_long(self, begin_s: float, end_s: float) -> bool:
        return any(
            "router" in fault.episode.roles and fault.lasted(end_s) >= NO_ROUTER_S
            for fault in self._between(begin_s, end_s)
        )

    def _roles(self, begin_s: float, end_s: float) -> set[str]:
        return {role for fault in self._between(begin_s, end_s) for role in fault.episode.roles}

    def _between(self, begin_s: float, end_s: float) -> list[Fault]:
        return [fault for fault in self.faults if fault.lasted_in(begin_s - self._grace_s, end_s)]
