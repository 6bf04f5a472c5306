"""Whole systems in virtual time: a seed gives one run, all is answered whatever dies, and faults are noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.types import RequestKey
from alignedserve.vopr.front_end.whole_run import WholeRun
from alignedserve.vopr.history import Ask, History, SubmitJob
from alignedserve.vopr.plan import SYSTEMS
from alignedserve.vopr.runs.run import history_of, run
from alignedserve.vopr.runs.shrink import Shrinker


def short(seed: int, seconds: float = 20.0, **changes: Any) -> History:
    """The beginning of the history of a seed's whole system."""
    history = history_of(seed, systems=("whole",))
    plan = replace(history.plan, duration_s=seconds, **changes)
    return History(plan, [action for action in history.actions if action.at_s < seconds])


def quiet(*actions: Ask | SubmitJob, **changes: Any) -> History:
    """These clients, of a system with one island in which nothing goes wrong."""
    plan = short(1).plan
    assert plan.front
    front = replace(plan.front, num_islands=1, batch_lines=4, batch_jobs=2)
    plan = replace(
        plan, iteration_s=0.3, num_gateways=2, silence_s=10.0, duration_s=5.0, front=front, **changes
    )
    return History(plan, list(actions))


CHATS = [
    Ask(at_s=0.5 * n, key=RequestKey(n), prompt_len=9 * n, output_len=5 * n, is_chat=n % 2 == 0)
    for n in range(1, 5)
]
JOB = SubmitJob(at_s=1.0, key=RequestKey(9), num_lines=10, prompt_len=20, output_len=20)


def failing(history: History) -> str:
    failure = run(history).failure
    assert failure
    return str(failure)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_dies_all_is_answered_and_nothing_is_left(seed: int) -> None:
    assert run(short(seed)).failure is None


def test_chats_and_jobs_are_answered_where_nothing_goes_wrong() -> None:
    outcome = run(quiet(*CHATS, JOB))
    assert outcome.failure is None
    assert outcome.ends == {"answered": 4, "job completed": 1}


@pytest.mark.slow
def test_a_saved_history_replays_to_the_same_journal(tmp_path: Path) -> None:
    short(7).save(tmp_path / "seven.json")
    saved = History.load(tmp_path / "seven.json")
    assert saved == short(7)
    first, second = (WholeRun(each, keeps_lines=True) for each in (short(7), saved))
    assert first().num_events == second().num_events
    assert first.front.journal.lines == second.front.journal.lines


def test_a_seed_makes_what_it_is_kept_to() -> None:
    assert all(history_of(seed, systems=("whole",)).plan.front for seed in range(3))
    assert not any(history_of(seed, systems=("island",)).plan.front for seed in range(3))
    assert any(history_of(seed, systems=SYSTEMS).plan.front for seed in range(100))


# ---- what breaks is noticed ------------------------------------------------------------------------------------------


def test_a_lease_that_is_not_renewed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renew(self: Any) -> None:
        return

    monkeypatch.setattr("alignedserve.batch.runner.BatchRunner._renew", renew)
    assert "was not renewed" in failing(quiet(JOB))


def test_a_request_that_is_not_aborted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.generation.generation.Generation.close", lambda self: None)
    leaving = Ask(at_s=1.0, key=RequestKey(1), prompt_len=20, output_len=150, leaves_after_s=10.0)
    assert "no client waits for" in failing(quiet(leaving))


def test_a_line_that_runs_before_it_has_begun_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(self: Any, number: int) -> None:
        return

    monkeypatch.setattr("alignedserve.batch.job_run.JobRun._begin", begin)
    assert "before the store knows" in failing(quiet(JOB))


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_a_planted_bug_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a gateway fails when it is asked for a prompt of 27 tokens."""
    from alignedserve.gateway.islands.islands import Islands

    open_ = Islands.open

    def broken(self: Islands, request: Any, *args: Any) -> None:
        if len(request.prompt) == 28:
            raise RuntimeError("27 words are one too many")
        open_(self, request, *args)

    monkeypatch.setattr(Islands, "open", broken)
    shrinker = Shrinker(quiet(*CHATS))
    assert shrinker.shrink().actions == [CHATS[2]]
