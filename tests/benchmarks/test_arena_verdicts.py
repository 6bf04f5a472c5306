"""The arena's verdicts: how far policies are behind, what opens the gate, and what falls with load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.arena.curve import curve_page, falls, goodput, plot_curve
from benchmarks.arena.gate import failures, worse
from benchmarks.arena.regret import Judged, at, be_by_value, by_value, standings
from tests.benchmarks.arena_scores import judged_from, judged_of, score

# ---- scores ---------------------------------------------------------------------------------------------------------


def test_regret_is_counted_from_the_best() -> None:
    judged = judged_of({"aligned": 0.9, "fcfs": 0.95, "bros": 0.2})
    assert {name: each.regret for name, each in judged.verdicts.items()} == {
        "aligned": 0.05,
        "fcfs": 0.0,
        "bros": 0.75,
    }
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["fcfs"]
    assert judged.verdicts["bros"].goodput_share == pytest.approx(0.2 / 0.95)


def test_best_effort_is_compared_where_real_time_is_level() -> None:
    judged = judged_of(
        {"aligned": 0.95, "fcfs": 0.94, "bros": 0.5}, {"aligned": 600, "fcfs": 800, "bros": 5000}
    )
    assert {name: each.be_share for name, each in judged.verdicts.items()} == {
        "aligned": 0.75,
        "fcfs": 1.0,
        "bros": None,
    }
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["fcfs"]
    nothing = judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": 0.0, "fcfs": 0.0})
    assert nothing.verdicts["aligned"].be_share is None


def windows_of(**jobs_in_time: tuple[float, float]) -> Judged:
    """Of each policy: how much real time is in time, and how many jobs are in their windows."""
    scores = [score(name, rt, 100.0, jobs_in_time=jobs) for name, (rt, jobs) in jobs_in_time.items()]
    return judged_from(scores, best_effort="windows")


def test_windows_are_kept_or_missed_where_real_time_is_level() -> None:
    """They all get as many tokens a second: when these come is what counts."""
    judged = windows_of(aligned=(0.95, 0.6), fcfs=(0.945, 0.8), bros=(0.5, 1.0))
    found = {name: (each.be_share, each.windows_regret) for name, each in judged.verdicts.items()}
    assert found == {"aligned": (pytest.approx(0.75), 0.2), "fcfs": (1.0, 0.0), "bros": (None, None)}
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["fcfs"]
    # Where none is kept under any policy there is nothing to compare.
    nothing = windows_of(aligned=(1.0, 0.0), fcfs=(1.0, 0.0))
    assert nothing.verdicts["aligned"].windows_regret is None and not nothing.tells_apart
    # Without windows there are none to miss.
    assert judged_of({"aligned": 1.0}, {"aligned": 5.0}).verdicts["aligned"].windows_regret is None


def answers_of(objectives: str, be: Mapping[str, float] | None = None, **answer_s: float) -> Judged:
    scores = [
        score(name, 1.0, (be or {}).get(name, 0.0), answer_s=seconds) for name, seconds in answer_s.items()
    ]
    return judged_from(scores, objectives=objectives, best_effort="share" if be else "none")


@pytest.mark.parametrize("objectives", ["none", "infeasible"])
def test_where_nothing_can_be_in_time_answers_count(objectives: str) -> None:
    judged = answers_of(objectives, aligned=2.0, fcfs=2.05, bros=4.0)
    assert [each.answer_share for each in judged.verdicts.values()] == [
        1.0,
        pytest.approx(0.9756, abs=1e-4),
        0.5,
    ]
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["aligned", "fcfs"]
    assert {each.goodput_share for each in judged.verdicts.values()} == {None}
    # Where they can be, it does not matter how soon.
    loose = answers_of("loose", aligned=2.0, bros=4.0)
    assert loose.verdicts["bros"].is_best and loose.verdicts["bros"].answer_share is None


def test_best_effort_is_compared_with_that_beside_answers_that_come_as_soon() -> None:
    be = {"aligned": 50.0, "fcfs": 60.0, "bros": 100.0}
    judged = answers_of("none", be, aligned=2.0, fcfs=2.05, bros=4.0)
    # Under `bros` best effort gets more and real time waits for it.
    found = {name: each.be_share for name, each in judged.verdicts.items()}
    assert found == {"aligned": pytest.approx(50 / 60), "fcfs": 1.0, "bros": 1.0}
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["fcfs"]


def test_where_nothing_is_in_time_there_is_no_share_of_it() -> None:
    judged = judged_of({"aligned": 0.0, "fcfs": 0.0})
    assert judged.verdicts["aligned"].goodput_share is None and judged.verdicts["aligned"].is_best


def test_standings_are_over_all_scenarios() -> None:
    judged = [
        judged_of({"aligned": 1.0, "fcfs": 0.9}, {"aligned": 90, "fcfs": 100}),
        judged_of({"aligned": 0.8, "fcfs": 0.9}, load=1.5),
        judged_of({"aligned": 0.5, "fcfs": 0.1}, load=2.0),
        judged_of({"aligned": 0.7, "fcfs": 0.7}, {"aligned": 50, "fcfs": 100}),
        # Nobody wins these, and nothing can be late in the second.
        judged_of({"aligned": 0.9, "fcfs": 0.9}),
        answers_of("none", aligned=1.0, fcfs=1.0),
    ]
    first, second = standings(judged)
    assert (first.policy, second.policy) == ("aligned", "fcfs")
    assert first.mean == pytest.approx(0.1 / 5) and second.mean == pytest.approx(0.5 / 5)
    assert (first.worst, second.worst) == (0.1, 0.4)
    # It is not best where best effort has half of what it has under another one.
    assert (first.won, second.won) == (0.5, 0.5)
    assert (first.be_mean, first.be_p5, second.be_mean) == (0.75, 0.5, 1.0)
    assert first.overload_worst == pytest.approx(0.8 / 0.9) and second.overload_worst == pytest.approx(0.2)
    assert first.answer_mean == 1.0 and first.windows_mean is None
    assert first.overload_mean == pytest.approx((0.8 / 0.9 + 1) / 2)


def test_nobody_wins_where_nothing_differs() -> None:
    level = judged_of({"aligned": 1.0, "fcfs": 0.995})
    assert not level.tells_apart and [each.won for each in standings([level])] == [None, None]


def test_windows_have_standings() -> None:
    judged = [
        windows_of(aligned=(1.0, 0.9), fcfs=(1.0, 1.0)),
        windows_of(aligned=(1.0, 0.5), fcfs=(1.0, 0.4)),
    ]
    ours, theirs = sorted(standings(judged), key=lambda each: each.policy)
    assert ours.windows_mean == pytest.approx(0.05) and ours.windows_worst == 0.1
    assert ours.won == 0.5 and theirs.be_mean == pytest.approx(0.9)


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [at(values, share) for share in (0.05, 0.5, 0.95, 0.98, 1.0)] == [5, 50, 95, 98, 100]
    assert at([7.0], 0.05) == at([7.0], 0.98) == 7.0


def test_regrets_are_found_by_regime() -> None:
    judged = [
        judged_of({"aligned": 0.8, "fcfs": 0.9}, load=1.0),
        judged_of({"aligned": 0.9, "fcfs": 0.8}, load=1.0),
        judged_of({"aligned": 0.5, "fcfs": 0.7}, load=2.0),
    ]
    assert by_value(judged, "load", "aligned") == {"1": [0.1, 0.0], "2": [0.2]}
    assert by_value(judged, "load", "bros") == {}
    # Where nothing can be late nobody is behind. Best effort is compared all the same.
    assert by_value([answers_of("none", aligned=1.0, fcfs=2.0)], "load", "fcfs") == {}
    never_late = answers_of("none", {"aligned": 5.0, "fcfs": 10.0}, aligned=1.0, fcfs=1.0)
    assert be_by_value([never_late, *judged], "load", "aligned") == {"0.5": [0.5]}


# ---- the gate -------------------------------------------------------------------------------------------------------

LEVEL = judged_of({"aligned": 1.0, "fcfs": 0.9})


def test_the_gate_opens_for_the_best() -> None:
    # A point behind is level: nothing is made of how shares are rounded.
    assert failures([LEVEL, judged_of({"aligned": 0.94, "fcfs": 0.95})], "aligned") == []
    be = judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": 96, "fcfs": 100})
    overload = judged_of({"aligned": 0.49, "fcfs": 0.5}, load=2.0)
    assert failures([LEVEL, be, overload], "aligned") == []
    # Another one that has as small a mean regret, and wins more often, is not ahead.
    assert failures([be], "aligned") == []
    # What nobody can do is no goodput.
    infeasible = judged_of({"aligned": 0.0, "fcfs": 0.01}, load=2.0, objectives="infeasible")
    assert failures([LEVEL, infeasible], "aligned") == []


@pytest.mark.parametrize(
    ("judged", "found"),
    [
        ([judged_of({"aligned": 0.93, "fcfs": 0.95})], ["more than 1 point behind in 1 of 2: [0]"]),
        (
            [judged_of({"aligned": 0.9, "fcfs": 0.95})],
            ["more than 1 point behind in 1 of 2: [0]", "scenario 0: aligned is 5.0 points behind"],
        ),
        (
            [judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": 94, "fcfs": 100})],
            ["scenario 0: aligned has 0.94 of the best effort of the best"],
        ),
        (
            [windows_of(aligned=(1.0, 0.9), fcfs=(1.0, 1.0))],
            ["scenario 0: aligned has 0.90 of the jobs in their windows of the best"],
        ),
        (
            [answers_of("none", {"aligned": 90.0, "fcfs": 100.0}, aligned=1.0, fcfs=1.0)],
            ["scenario 0: aligned has 0.90 of the best effort of the best"],
        ),
        (
            [judged_of({"aligned": 0.08, "fcfs": 0.1}, load=1.5)],
            ["more than 1 point behind", "scenario 0: aligned has 0.80 of the best goodput"],
        ),
        (
            [judged_of({"aligned": 0.0, "fcfs": 0.01}, load=1.5)],
            ["scenario 0: aligned has 0.00 of the best goodput"],
        ),
        (
            [judged_of({"aligned": 0.8, "fcfs": 1.0})],
            ["1 point behind in", "20.0 points behind", "fcfs has a smaller mean regret"],
        ),
    ],
)
def test_the_gate_says_what_is_too_far_behind(judged: list[Judged], found: list[str]) -> None:
    told = failures([LEVEL, *judged], "aligned")
    assert len(told) == len(found)
    for line, part in zip(told, found, strict=True):
        assert part in line


def test_scenarios_in_which_nothing_can_be_late_do_not_help() -> None:
    behind, never_late = judged_of({"aligned": 0.93, "fcfs": 0.95}), answers_of("none", aligned=1.0, fcfs=1.0)
    assert failures([LEVEL] * 49 + [behind], "aligned") == []
    assert len(failures([LEVEL] * 48 + [behind, never_late], "aligned")) == 1


def test_two_of_a_hundred_may_be_behind_by_more_than_a_point() -> None:
    behind = judged_of({"aligned": 0.93, "fcfs": 0.95})
    assert failures([LEVEL] * 98 + [behind] * 2, "aligned") == []
    assert len(failures([LEVEL] * 97 + [behind] * 3, "aligned")) == 1


# ---- curves ---------------------------------------------------------------------------------------------------------


def at_loads(**in_time: Sequence[float]) -> list[Judged]:
    loads = (0.5, 1.0, 1.5, 2.0)
    return [
        judged_of({name: shares[k] for name, shares in in_time.items()}, load=load)
        for k, load in enumerate(loads)
    ]


def test_goodput_is_the_load_that_is_in_time() -> None:
    judged = at_loads(aligned=(1.0, 0.9, 0.6, 0.45), fcfs=(1.0, 0.8, 0.4, 0.1))
    assert [goodput(each, "aligned") for each in judged] == pytest.approx([0.5, 0.9, 0.9, 0.9])
    text = curve_page(judged, "a machine", "the command")
    assert "| policy | 0.5 | 1 | 1.5 | 2 |" in text and "| `fcfs` | 0.50 | 0.80 | 0.60 | 0.20 |" in text


def test_goodput_must_not_fall_as_load_rises() -> None:
    judged = at_loads(aligned=(1.0, 0.9, 0.58, 0.43), fcfs=(1.0, 0.8, 0.4, 0.4))
    assert falls(judged, "aligned") == []
    assert falls(judged, "fcfs") == [
        "scenario 0: goodput of fcfs falls from 0.80 of what fits to 0.60 at a load of 1.5"
    ]


def test_a_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_curve(at_loads(aligned=(1.0, 0.9, 0.6, 0.45)), "aligned", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


# ---- against a record -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "now", "is_worse"),
    [
        (0.95, 0.93, False),
        (0.95, 0.919, True),
        # It was behind already.
        (0.80, 0.795, False),
        (0.80, 0.78, True),
    ],
)
def test_a_policy_is_worse_that_is_further_behind_than_allowed_and_than_before(
    then: float, now: float, is_worse: bool
) -> None:
    before, after = (judged_of({"aligned": in_time, "fcfs": 0.95}) for in_time in (then, now))
    assert bool([*worse(before, after, "aligned")]) == is_worse


def test_a_policy_is_worse_with_less_best_effort_at_level_real_time() -> None:
    def judged(tokens_per_s: float) -> Judged:
        return judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": tokens_per_s, "fcfs": 1000.0})

    assert not [*worse(judged(1000.0), judged(910.0), "aligned")]
    assert [*worse(judged(1000.0), judged(890.0), "aligned")]
    assert not [*worse(judged(700.0), judged(660.0), "aligned")]
    assert [*worse(judged(700.0), judged(640.0), "aligned")]
