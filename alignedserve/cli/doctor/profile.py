"""Checks of the cost model's profile, which is saved or measured when instances start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, note, ok, warn
from alignedserve.instance.profile.facts import facts_from
from alignedserve.instance.profile.saved import check_is_of, decode, default_path


def check_profile(case: Case) -> Iterator[Finding]:
    config = case.instance
    if not config.needs_profile:
        yield note("not used: no iteration is shortened for a deadline")
        return
    facts = facts_from(
        case.model.config,
        case.form,
        config.engine,
        case.device,
        _num_threads(case),
        config.transfers.pool_kv_dtype,
    )
    path = Path(config.cost_profile) if config.cost_profile else default_path(facts)
    yield profile_finding(path, facts)


def profile_finding(path: Path, facts: dict[str, str]) -> Finding:
    measure = "alignedserve profile MODEL on an idle machine is more exact"
    try:
        profile = decode(path.read_bytes(), path.name)
        check_is_of(profile, facts)
    except FileNotFoundError:
        return note(f"none yet: the first instance measures one in 1 to 3 s; {measure}")
    except (OSError, ValueError) as error:
        return warn(f"{path} is unusable and will be measured again: {error}", measure)
    if profile.cost.has_free_copies:
        return note(f"{path} has no copy times, so copies of KV count as free; {measure}")
    return ok(f"saved, with {profile.num_points} points: {path}")


def _num_threads(case: Case) -> int:
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdecimal() else case.num_threads
