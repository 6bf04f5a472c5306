"""The sweep over the default policy's constants: each is set everywhere, and what it changes is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.scheduling.policies.aligned import rt_beside_be
from alignedserve.scheduling.policies.aligned.decode import slo_scheduler
from alignedserve.scheduling.policies.aligned.router import batches, part
from benchmarks.arena import sweep
from benchmarks.arena.played import play
from benchmarks.arena.regimes import Regime, draw
from tests.benchmarks.arena_scores import score
from tests.forkserver import forking

forking(sweep.__name__)
KNOWN = {str(each): each for each in sweep.constants()}


@pytest.fixture
def unchanged() -> Iterator[None]:
    """Restores all constants."""
    yield
    for each in KNOWN.values():
        sweep.set_to(each, each.value)


def tiny(number: int = 0) -> Regime:
    regime = draw(number, policies=("aligned",))
    config = replace(
        replace(regime.config, num_prompts=12, input_len=300, output_len=20, be_backlog=0, be_share=0.5),
        request_rate=40.0,
        slo_ttft_ms=300.0,
        slo_tbt_ms=40.0,
    )
    return replace(regime, config=config, objectives="tight")


def test_constants_are_those_of_the_source() -> None:
    assert len(KNOWN) > 30
    assert KNOWN["rt_beside_be.ENOUGH"].value == rt_beside_be.ENOUGH
    assert KNOWN["decode.slo_scheduler.FALL"].tried() == (2, 8)
    assert KNOWN["decode.slo_scheduler.MAX_OWED"].tried() == (0.25, 1.0)
    # Twice of it is no share.
    assert KNOWN["rt_beside_be.ENOUGH"].tried() == pytest.approx((0.9, 0.975))
    # The pool's tree would keep its own.
    assert not any(name.endswith("LEAF_WIDTH") for name in KNOWN)


@pytest.mark.usefixtures("unchanged")
def test_a_constant_is_set_in_all_modules_that_import_it() -> None:
    found = sweep.set_to(KNOWN["rt_beside_be.LATE"], 7.0)
    assert {name.rpartition("aligned.")[2] for name in found} == {
        *("rt_beside_be", "decode.slo_scheduler", "router.part")
    }
    assert [vars(module)["LATE"] for module in (rt_beside_be, slo_scheduler, part)] == [7.0, 7.0, 7.0]


@pytest.mark.usefixtures("unchanged")
def test_another_constant_of_the_same_name_stays() -> None:
    sweep.set_to(KNOWN["decode.slo_scheduler.PRESSED"], 7.0)
    other = KNOWN["router.batches.PRESSED"]
    found = slo_scheduler.PRESSED, batches.PRESSED
    assert found == (7.0, other.value)


def test_a_sweep_plays_with_the_changed_constant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    regime, constant = tiny(), KNOWN["decode.slo_scheduler.WITHOUT_RT"]
    (scores,) = sweep.sweep([regime], [constant], num_jobs=1)
    as_is, half, double = scores.values()
    assert as_is == play(regime)[0] != half
    for value, played in zip(constant.tried(), (half, double), strict=True):
        monkeypatch.setattr(slo_scheduler, "WITHOUT_RT", value)
        assert play(regime)[0] == played
    sweep.write(tmp_path, [constant], [scores])
    told = json.loads((tmp_path / "arena_constants.json").read_text())
    command = "python -m benchmarks.arena.sweep --number 0 --constant WITHOUT_RT"
    assert told["command"] == command and command in (tmp_path / "arena_constants.md").read_text()
    rows = told["changes"]
    assert [(row["value"], row["tried"]) for row in rows] == [("1.25", "0.625"), ("1.25", "2.5")]
    assert rows[0]["scenarios changed"] == 1
    ratio = half.be_tokens_per_s / as_is.be_tokens_per_s
    assert rows[0]["best effort, mean"] == rows[0]["best effort, worst"] == f"{ratio:.3f}"
    assert [*told["scores"]["0"]] == ["as they are", *(f"{constant}={value:g}" for value in constant.tried())]


def test_changes_are_those_to_the_run_as_it_is() -> None:
    constant = KNOWN["rt_beside_be.ENOUGH"]
    timed, hasty = tiny(), replace(tiny(), objectives="none")
    now = {
        timed: (score("aligned", 0.9, 100.0), score("aligned", 0.88, 150.0)),
        replace(timed, number=1): (score("aligned", 0.5, 0.0), score("aligned", 0.53, 0.0)),
        hasty: (score("aligned", 1.0, 50.0), score("aligned", 1.0, 25.0, answer_s=2.0)),
    }
    scores = [
        {sweep.Run(regime): then, sweep.Run(regime, constant, 0.9): later}
        for regime, (then, later) in now.items()
    ]
    found = sweep.change(constant, 0.9, scores)
    assert [found[f"in time, {what}"] for what in ("mean", "worst")] == ["+0.50", "-2.0"]
    assert [found[f"best effort, {what}"] for what in ("mean", "worst")] == ["1.000", "0.500"]
    assert [found[f"answers, {what}"] for what in ("mean", "worst")] == ["2.000", "2.000"]
    assert found["scenarios changed"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--constant", "NOTHING"], "invalid choice: 'NOTHING'"),
        (["--number", "-1"], "number=-1: scenarios have numbers from 0 on"),
        (["--regime", "objectives=soft"], "must be one of none, loose, tight, mixed, infeasible"),
    ],
)
def test_a_mistake_is_told_before_anything_is_played(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep", *words])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err
