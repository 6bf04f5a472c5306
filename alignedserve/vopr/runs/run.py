"""Makes the history of a seed, and runs histories."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import BinaryIO, cast

from alignedserve.vopr.arrivals import make_arrivals
from alignedserve.vopr.event_logs import HashingFile, OpenLog
from alignedserve.vopr.faults import make_faults
from alignedserve.vopr.front_end.arrivals import make_asking
from alignedserve.vopr.front_end.faults import make_front_faults
from alignedserve.vopr.front_end.whole_run import WholeRun
from alignedserve.vopr.history import Action, AnyAction, History
from alignedserve.vopr.island_run import IslandRun
from alignedserve.vopr.outcome import RunOutcome
from alignedserve.vopr.places import ALL_AIMS
from alignedserve.vopr.plan import make_plan


def history_of(
    seed: int, policies: Sequence[str] = (), systems: Sequence[str] = (), aims: Sequence[str] = ()
) -> History:
    """Returns the history of a seed. Raises ValueError for an unknown aim."""
    plan = make_plan(seed, policies, systems, aims)
    for aim in aims:
        if aim not in ALL_AIMS:
            raise ValueError(f"aim={aim!r}: must be one of {', '.join(ALL_AIMS)}")
    arrivals, faults = (make_asking, make_front_faults) if plan.front else (make_arrivals, make_faults)
    actions: list[Action] = [*arrivals(Random(f"arrivals of {seed}"), plan)]
    actions += faults(Random(f"faults of {seed}"), plan)
    return History(plan, cast(list[AnyAction], sorted(actions, key=lambda action: action.at_s)))


def run(history: History, open_log: OpenLog | None = None) -> RunOutcome:
    return (WholeRun if history.plan.front else IslandRun)(history, open_log)()


def log_hash(history: History) -> str:
    """Returns the hash of everything that all routers of a run receive and send."""
    file = HashingFile()
    run(history, lambda epoch: cast(BinaryIO, file))
    return file.hexdigest()
