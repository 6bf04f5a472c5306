"""Who asked hears how far a prompt is, until its first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import NewTokens, PromptProgress, Submit, Tokens
from alignedserve.router.views import ColocatedView
from alignedserve.types import InstanceId
from tests.router.script import (
    GATEWAY,
    ONE,
    POOL,
    PREFILL,
    Script,
    decode_report,
    prefill_report,
    request,
)

COLOCATED = "colocated-0"
NUM_PROMPT = 6


@dataclass
class Prompted:
    """A request whose prompt an instance has begun with."""

    script: Script
    instance: str

    def report(self, **fields: Any) -> None:
        report = prefill_report if self.instance == PREFILL else decode_report
        self.script.say(self.instance, report(**fields))

    def heard(self) -> list[PromptProgress]:
        sent = self.script.take()
        found = [message for to, message in sent if to == GATEWAY and isinstance(message, Tokens)]
        return [progress for tokens in found for progress in tokens.progress]


def prompted(instance: str, wants: bool = True, delivered: list[int] | None = None) -> Prompted:
    script = Script(connect=False)
    for name in (POOL, instance, GATEWAY):
        script.connect(name)
    asked = replace(request(num_prompt=NUM_PROMPT), reports_progress=wants)
    script.say(GATEWAY, Submit(asked, delivered or []))
    if instance == PREFILL:
        script.reserve()
    else:
        script.say(instance, decode_report(admitted=[ONE]))
    script.take()
    return Prompted(script, instance)


@pytest.mark.parametrize("instance", [PREFILL, COLOCATED])
def test_who_asks_hears_of_every_chunk_and_that_all_is_computed(instance: str) -> None:
    at = prompted(instance)
    at.report(progress=[(ONE, 2, 2)])
    at.script.tick(0.5)
    at.report(progress=[(ONE, 4, 2)])
    assert at.heard() == [
        PromptProgress(ONE, NUM_PROMPT, 2, 2, 0.0),
        PromptProgress(ONE, NUM_PROMPT, 4, 2, 0.5),
    ]
    at.script.tick(0.25)
    at.report(news=[NewTokens(ONE, 0, [50], num_reused=2)])
    assert at.heard() == [PromptProgress(ONE, NUM_PROMPT, NUM_PROMPT, 2, 0.75)]


@pytest.mark.parametrize("instance", [PREFILL, COLOCATED])
def test_a_prompt_that_fails_is_not_said_to_be_computed(instance: str) -> None:
    at = prompted(instance)
    at.report(news=[NewTokens(ONE, 0, [], finish_reason="error", error="NaN in its logits")])
    assert at.heard() == []


@pytest.mark.parametrize("instance", [PREFILL, COLOCATED])
def test_nobody_else_does(instance: str) -> None:
    at = prompted(instance, wants=False)
    at.report(progress=[(ONE, 4, 0)])
    assert at.heard() == []


@pytest.mark.parametrize("instance", [PREFILL, COLOCATED])
def test_a_prompt_that_is_computed_again_for_later_tokens_is_no_news(instance: str) -> None:
    at = prompted(instance, delivered=[50])
    at.report(progress=[(ONE, 4, 0)])
    assert at.heard() == []


def test_a_stream_that_is_computed_again_counts_as_computed_with_its_next_token() -> None:
    """Otherwise the router would take its prompt for work ahead until it ends."""
    at = prompted(COLOCATED, delivered=[50])
    view = at.script.router.state.cluster.decode(InstanceId(COLOCATED))
    assert isinstance(view, ColocatedView) and view.pending.count(is_rt=True) == 1
    at.report(news=[NewTokens(ONE, 1, [51])])
    assert view.pending.count(is_rt=True) == 0
