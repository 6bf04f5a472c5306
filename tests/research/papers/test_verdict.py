"""When a claim counts as reproduced."""

from __future__ import annotations

import pytest

from research.papers.verdict import Verdict, amount, at_least, at_most, gain, together


@pytest.mark.parametrize(
    ("claimed", "ours", "verdict"),
    [
        (1.5, 2.0, Verdict.REPRODUCED),
        (1.5, 1.4, Verdict.REPRODUCED),
        (1.5, 1.39, Verdict.PARTLY),
        (1.5, 1.03, Verdict.PARTLY),
        (1.5, 1.02, Verdict.REFUTED),
        (1.5, 0.7, Verdict.REFUTED),
    ],
)
def test_a_gain_is_reproduced_with_four_fifths_of_it(claimed: float, ours: float, verdict: Verdict) -> None:
    assert gain(claimed, ours) is verdict


def test_a_claim_of_no_gain_has_no_verdict() -> None:
    with pytest.raises(ValueError, match=r"claimed=1\.01"):
        gain(1.01, 2.0)
    with pytest.raises(ValueError, match="claimed=0"):
        amount(0.0, 0.1)


def test_a_loss_is_judged_by_how_much_is_lost() -> None:
    assert amount(0.1473, 0.12) is Verdict.REPRODUCED
    assert amount(0.1473, 0.05) is Verdict.PARTLY
    assert amount(0.1473, -0.3) is Verdict.REFUTED


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(0.08, Verdict.REPRODUCED), (0.1, Verdict.REPRODUCED), (0.2, Verdict.PARTLY), (0.21, Verdict.REFUTED)],
)
def test_a_cost_may_not_exceed_what_is_claimed(ours: float, verdict: Verdict) -> None:
    assert at_most(0.1, ours) is verdict


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(0.9, Verdict.REPRODUCED), (0.89, Verdict.PARTLY), (0.45, Verdict.PARTLY), (0.44, Verdict.REFUTED)],
)
def test_a_share_may_not_fall_below_what_is_claimed(ours: float, verdict: Verdict) -> None:
    assert at_least(0.9, ours) is verdict


def test_of_several_parts_all_have_to_agree() -> None:
    assert together([Verdict.REFUTED, Verdict.REFUTED]) is Verdict.REFUTED
    assert together([Verdict.REPRODUCED]) is Verdict.REPRODUCED
    assert together([Verdict.REPRODUCED, Verdict.REFUTED]) is Verdict.PARTLY
    with pytest.raises(ValueError, match="without parts"):
        together([])
