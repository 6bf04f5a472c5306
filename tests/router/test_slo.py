"""Objectives that the model can't keep even when it does nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Prefill, Rejected, Request, Submit
from alignedserve.router.events import Connected
from alignedserve.router.intake import DEFAULT_SLACK
from alignedserve.timing.cost_presets import load_cost_model
from tests.router.script import DECODE, GATEWAY, POOL, PREFILL, Script, hello, request

COST = load_cost_model("opt-13b/a100-80gb")
# a prompt of six tokens
TTFT_S, TBT_S = COST.fastest_ttft_s(6, 32), COST.fastest_tbt_s(7)


def profiled() -> Script:
    script = Script(connect=False)
    for name in (POOL, PREFILL, DECODE, GATEWAY):
        cost = COST if name in (PREFILL, DECODE) else None
        script.router.on(Connected(replace(hello(name), cost=cost)), 0.0)
    return script


def asking(ttft_s: float, tbt_s: float, slo_defaults: list[str] | None = None) -> Request:
    return replace(request(), ttft_s=ttft_s, tbt_s=tbt_s, slo_defaults=slo_defaults or [])


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "named", "possible_s"),
    [(0.99 * TTFT_S, 1.0, "slo.ttft_ms=", TTFT_S), (1.0, 0.5 * TBT_S, "slo.tbt_ms=", TBT_S)],
)
def test_what_is_impossible_is_refused_with_what_is_possible(
    ttft_s: float, tbt_s: float, named: str, possible_s: float
) -> None:
    script = profiled()
    script.say(GATEWAY, Submit(asking(ttft_s, tbt_s)))
    rejected = script.take_one(Rejected, GATEWAY)
    assert rejected.reason == "slo" and rejected.message.startswith(named)
    assert f"must be at least {1000 * possible_s:.3g}" in rejected.message
    script.router.check_idle()


def test_what_is_just_possible_is_taken() -> None:
    script = profiled()
    script.say(GATEWAY, Submit(asking(1.01 * TTFT_S, 1.01 * TBT_S)))
    assert script.state().deadlines.tbt_s == 1.01 * TBT_S


def test_a_default_is_raised_and_that_is_said_once() -> None:
    script = profiled()
    script.say(GATEWAY, Submit(asking(0.5 * TTFT_S, 1.0, ["ttft_s", "tbt_s"])))
    deadlines = script.state().deadlines
    assert deadlines.first_due_s == pytest.approx(DEFAULT_SLACK * TTFT_S) and deadlines.tbt_s == 1.0
    (remark,) = script.router.take_remarks()
    assert "default objective ttft_s" in remark
    script.say(GATEWAY, Submit(replace(asking(0.5 * TTFT_S, 1.0, ["ttft_s"]), key=2)))
    assert script.router.take_remarks() == []
    script.reserve()
    # instances cut their chunks by it
    assert script.take_one(Prefill, PREFILL).works[0].request.ttft_s == deadlines.first_due_s


def test_nothing_is_refused_that_nobody_has_measured_or_that_has_begun() -> None:
    script = Script()
    script.say(GATEWAY, Submit(asking(1e-6, 1e-6)))
    assert script.state().deadlines.tbt_s == 1e-6
    script = profiled()
    script.say(GATEWAY, Submit(asking(1e-6, 1e-6), delivered=[50]))
    assert script.state().output == [50]
