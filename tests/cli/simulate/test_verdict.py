"""The sentence at the end of a comparison, by figures that are made up."""

from __future__ import annotations

import pytest

from alignedserve.cli.simulate.compare import Row
from alignedserve.cli.simulate.verdict import verdict
from tests.cli.simulate.rows import found, row


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("aligned", 0.955)], "aligned reaches 95.5 % attainment for real time."),
        (
            [row("bros", 0.3), row("fcfs", 0.898), row("aligned", 0.447)],
            "aligned reaches 44.7 % attainment for real time, 45.1 points behind fcfs, the best.",
        ),
        (
            [row("aligned", 0.99), row("fcfs", 0.955), row("bros", 0.2)],
            "aligned reaches 99.0 % attainment for real time, the most: next is fcfs, 3.5 points behind.",
        ),
        # Without the default policy the sentence is about the first.
        (
            [row("bros", 0.2), row("fcfs", 0.9)],
            "bros reaches 20.0 % attainment for real time, 70.0 points behind fcfs, the best.",
        ),
        # Where policies are not what is compared, names say more.
        (
            [row("aligned", 0.8), row("aligned", 0.95, num_decode=2), row("aligned", 0.95, num_decode=3)],
            "aligned 1+2 reaches 95.0 % attainment for real time, the most: next is aligned 1+3, 0.0 points behind.",
        ),
        (
            [row("aligned", 0.8), row("aligned", 0.9, num_decode=2), row("fcfs", 0.95, num_decode=2)],
            "aligned 1+2 reaches 90.0 % attainment for real time, 5.0 points behind fcfs 1+2, the best.",
        ),
        (
            [row("aligned", 1.0, 974), row("fcfs", 1.0, 1461), row("bros", 0.5, 5000)],
            "aligned reaches 100.0 % attainment for real time, the most: next is fcfs, 0.0 points behind; "
            "best effort gets 974 tokens/s, 0.67 of what fcfs gives it beside as much real time.",
        ),
        (
            [row("aligned", 0.9, 500), row("fcfs", 0.5, 900)],
            "aligned reaches 90.0 % attainment for real time, the most: next is fcfs, 40.0 points behind; "
            "best effort gets 500 tokens/s.",
        ),
        (
            [row("aligned", 0.0, 500, num_rt=0), row("fcfs", 0.0, 400, num_rt=0)],
            "best effort under aligned gets 500 tokens/s, the most.",
        ),
        ([found("aligned", 3.2)], "aligned reaches 90 % attainment for real time up to 3.2 requests/s."),
        (
            [found("fcfs", 4.0), found("aligned", 3.2)],
            "aligned reaches 90 % attainment for real time up to 3.2 requests/s, 0.80 of the 4 of fcfs, the best.",
        ),
        (
            [found("aligned", 8.0), found("fcfs", 4.0)],
            "aligned reaches 90 % attainment for real time up to 8 requests/s, the most: next is fcfs with 4.",
        ),
        (
            [found("aligned", 0.0), found("fcfs", 4.0)],
            "aligned reaches 90 % attainment for real time at no rate; "
            "fcfs reaches 90 % attainment for real time up to 4 requests/s.",
        ),
        (
            [row("aligned", 0.0, 400, num_rt=0), row("fcfs", 0.0, 500, num_rt=0)],
            "best effort under aligned gets 400 tokens/s, 0.80 of what fcfs gives it.",
        ),
        # A point apart is level, however it is rounded.
        (
            [row("aligned", 0.07, 400), row("fcfs", 0.06, 500)],
            "aligned reaches 7.0 % attainment for real time, the most: next is fcfs, 1.0 points behind; "
            "best effort gets 400 tokens/s, 0.80 of what fcfs gives it beside as much real time.",
        ),
        (
            [found("aligned", 8.0), found("fcfs", 0.0)],
            "aligned reaches 90 % attainment for real time up to 8 requests/s.",
        ),
    ],
)
def test_a_comparison_comes_to_a_sentence(rows: list[Row], said: str) -> None:
    assert verdict(rows, attainment=0.9) == said


def test_nothing_is_said_of_nothing() -> None:
    assert verdict([], attainment=0.9) is None
    assert verdict([found("aligned", 0.0)], attainment=0.9) is None
