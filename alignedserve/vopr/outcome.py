"""The result of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from alignedserve.vopr.failures import Failure


@dataclass
class RunOutcome:
    failure: Failure | None
    # In virtual seconds.
    duration_s: float
    num_requests: int
    num_tokens: int
    num_events: int
    # How many actions of each kind happened, including kills by the fence.
    happened: Counter[str] = field(default_factory=Counter)
    # How many requests were in each phase.
    phases: Counter[str] = field(default_factory=Counter)
    # How requests ended.
    ends: Counter[str] = field(default_factory=Counter)
    # How often it visited each place: see places.py.
    visited: Counter[str] = field(default_factory=Counter)
