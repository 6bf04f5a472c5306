"""What `make attack` reports as broken, and the attacks that it finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.attack import __main__ as attack
from benchmarks.attack.attacks import all_attacks, drawn
from benchmarks.attack.target import Finding
from benchmarks.attack.verdict import HEAD, Measured, Watched, is_broken, objections, row

BASELINE = Watched(silence_s=0.1, health_s=0.01, num_tokens=500, num_unwell=0, wrong=[])
HELD = Finding("router.flood", True, "all answered")
CALM = Measured(BASELINE, 8 << 20, 1 << 20, died={}, is_up=True, last_status=200)


def with_watched(**changes: Any) -> Measured:
    return replace(CALM, watched=replace(BASELINE, **changes))


@pytest.mark.parametrize(
    ("finding", "measured"),
    [
        (replace(HELD, held=False), CALM),
        (HELD, replace(CALM, is_up=False)),
        (HELD, replace(CALM, last_status=503)),
        (HELD, replace(CALM, died={"decode-0": 77})),
        (replace(HELD, detail="killed 770"), replace(CALM, died={"decode-0": 77})),
        (HELD, with_watched(wrong=["a stream broke"])),
        (HELD, with_watched(silence_s=1.2)),
        (HELD, with_watched(health_s=1.2)),
        (HELD, replace(CALM, is_settled=False)),
        # What an attack leaves behind does not widen what is allowed.
        (HELD, replace(CALM, after=replace(BASELINE, silence_s=1.2))),
        (HELD, replace(CALM, after=replace(BASELINE, health_s=1.2))),
        (HELD, replace(CALM, after=replace(BASELINE, wrong=["a stream broke"]))),
        (HELD, replace(CALM, after=replace(BASELINE, num_unwell=1))),
        (replace(HELD, ratio=10.1), CALM),
    ],
)
def test_one_thing_that_is_wrong_is_enough(finding: Finding, measured: Measured) -> None:
    assert len(objections(finding, measured, BASELINE)) == 1
    assert is_broken([(HELD, CALM), (finding, measured)], BASELINE)
    first, second = row(finding, measured, BASELINE).splitlines()
    assert " BROKEN " in first and second.startswith("    BROKEN: ")


@pytest.mark.parametrize(
    ("finding", "measured"),
    [
        (HELD, CALM),
        (replace(HELD, detail="killed 77, and it came back"), replace(CALM, died={"decode-0": 77})),
        # a busy machine; memory is reported, and judged by people
        (HELD, with_watched(silence_s=1.0, health_s=1.0, num_unwell=3)),
        (HELD, replace(CALM, grown_bytes=1 << 32)),
    ],
)
def test_what_held_has_one_line(finding: Finding, measured: Measured) -> None:
    assert objections(finding, measured, BASELINE) == []
    line = row(finding, measured, BASELINE)
    assert " held " in line and line.endswith(finding.detail)
    # under its heading
    assert line.index(" held ") + 1 == HEAD.index("verdict")


def test_a_busy_machine_widens_what_is_allowed() -> None:
    around = replace(BASELINE, silence_s=0.9, health_s=0.6)
    slow = with_watched(silence_s=4.4, health_s=2.9)
    assert objections(HELD, slow, around) == [] != objections(HELD, slow, BASELINE)
    assert objections(HELD, replace(slow, slack=5.0), BASELINE) == []


def test_another_key_may_be_slower_during_a_flood() -> None:
    finding = replace(HELD, ratio=9.9)
    assert objections(finding, CALM, BASELINE) == [] and "9.9 times as long" in row(finding, CALM, BASELINE)


def test_where_no_speed_counts_only_a_hang_does() -> None:
    for finding, seconds, expected in (
        (replace(HELD, ratio=99.0), 19.0, 0),
        (HELD, 21.0, 2),
        (replace(HELD, held=False), 0.1, 1),
    ):
        measured = with_watched(silence_s=seconds, health_s=seconds)
        assert len(objections(finding, measured, BASELINE, hang_s=20.0)) == expected


def test_a_number_draws_attacks_of_one_server_which_all_come_in_time() -> None:
    drawn_once = [drawn(number) for number in range(60)]
    for attacks in drawn_once:
        assert len({attack.needs_keys for attack in attacks}) == 1
        assert not any(attack.is_timed for attack in attacks)
    # A run has time for about five.
    first = {attack.name for attacks in drawn_once for attack in attacks[:5]}
    assert first == {attack.name for attack in all_attacks() if not attack.is_timed}
    assert drawn(7) == drawn(7)


def test_attacks_are_found_by_name_and_those_with_keys_come_last() -> None:
    attacks = all_attacks()
    assert "router.flex_with_many_choices" in [attack.name for attack in attacks]
    assert [attack.needs_keys for attack in attacks] == sorted(attack.needs_keys for attack in attacks)
    assert {attack.name.split(".")[0] for attack in all_attacks("router.")} == {"router"}


@pytest.mark.parametrize(("end_s", "started", "num_rows"), [(0.0, [False], 1), (1e9, [False, True], None)])
def test_once_the_time_is_up_no_further_server_is_started(
    end_s: float, started: list[bool], num_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacks, begun = all_attacks(), list[bool]()

    @contextmanager
    def session(has_keys: bool, slack: float) -> Iterator[SimpleNamespace]:
        begun.append(has_keys)
        yield SimpleNamespace(baseline=lambda: BASELINE, measure=lambda attack: (HELD, CALM))

    monkeypatch.setattr(attack, "session", session)
    rows, _ = attack.attack_all(attacks, end_s=end_s)
    assert begun == started and len(rows) == (num_rows or len(attacks))
