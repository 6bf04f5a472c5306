"""A prompt's log-probabilities at a prefill instance: all of them, once, with the request's first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Failed, InstanceLimits, NewTokens, Prefill, Work
from alignedserve.protocol.prompt_logprobs import TokenLogprobs, unpack
from alignedserve.scheduling.boundary import PrefillBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import Policy
from alignedserve.scheduling.policy import PrefillPart
from alignedserve.timing.estimate import Estimate
from tests.engine.helpers import greedy_params
from tests.prefill_worker.rig import Interrupting, InterruptingPart, Rig, work
from tests.tiny_models import prompts
from tests.worker_parts import engine_of

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"
# 300 tokens, in chunks of forty
LONG = prompts()[8]


def asked() -> Work:
    return work(LONG, greedy_params(prompt_logprobs=2))


def run(rig: Rig, ordered: Work) -> NewTokens:
    """To the end of the prompt."""
    num_news = len(rig.news)
    rig.worker.on(Prefill([ordered]))
    rig.step_until(lambda: rig.news[num_news:] and engine_of(rig.worker).num_unfinished == 0)
    (news,) = rig.news[num_news:]
    return news


def logprobs_of(news: NewTokens) -> list[TokenLogprobs]:
    return [*chain.from_iterable(unpack(news.prompt_logprobs))]


def at_once(directory: Path) -> list[TokenLogprobs]:
    """Those of a prompt that nothing interrupts."""
    with closing(Rig(directory)) as rig:
        found = logprobs_of(run(rig, asked()))
    assert len(found) == len(LONG) - 1
    return found


def interrupting() -> Policy:
    return Interrupting(SchedulingConfig())


class Waiting(Interrupting):
    """Plans nothing between the interruption and the moment at which it may go on."""

    def __init__(self, config: SchedulingConfig) -> None:
        super().__init__(config)
        self.may_go_on: list[bool] = []

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return WaitingPart(limits, self.config, self.may_go_on)


class WaitingPart(InterruptingPart):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, may_go_on: Sequence[bool]) -> None:
        super().__init__(limits, config)
        self._may_go_on = may_go_on

    def plan(self, at: PrefillBoundary) -> None:
        if not self.is_done or self._may_go_on:
            super().plan(at)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_prompt_that_is_preempted_half_way_has_each_once(
    tiny_model: Directory, enable_prefix_caching: bool
) -> None:
    directory = tiny_model(FAMILY)
    with closing(Rig(directory, enable_prefix_caching=enable_prefix_caching, policy=interrupting())) as rig:
        news = run(rig, asked())
        # It went on where it was.
        assert sum(report.num_computed for report in rig.reports) == len(LONG)
        assert_alike(logprobs_of(news), at_once(directory))
        rig.check_idle()


def test_a_preempted_prompt_that_is_ordered_anew_has_each_once(tiny_model: Directory) -> None:
    """Its KV was lost, and the router begins with it again."""
    directory, policy = tiny_model(FAMILY), Waiting(SchedulingConfig())
    with closing(Rig(directory, policy=policy)) as rig:
        rig.worker.on(Prefill([asked()]))
        rig.step_until(lambda: rig.worker.prompts._logprobs and not rig.worker._requests)
        rig.worker.drop_orders()
        policy.may_go_on.append(True)
        news = run(rig, asked())
        assert_alike(logprobs_of(news), at_once(directory))
        rig.check_idle()


def test_a_prompt_that_is_computed_again_after_its_first_tokens_has_none(tiny_model: Directory) -> None:
    """They went out with the first token, and a second time nobody expects them."""
    with closing(Rig(tiny_model(FAMILY))) as rig:
        first = run(rig, asked())
        assert first.first == 0 and first.prompt_logprobs
        again = replace(asked(), output=list(first.tokens))
        for ordered in (again, replace(again, num_cached=len(LONG))):
            news = run(rig, ordered)
            assert (news.first, news.prompt_logprobs) == (1, b"")
        rig.check_idle()


def test_it_has_none_either_if_it_is_preempted_then(tiny_model: Directory) -> None:
    with closing(Rig(tiny_model(FAMILY), policy=interrupting())) as rig:
        news = run(rig, replace(asked(), output=[1]))
        assert (news.first, news.prompt_logprobs) == (1, b"")
        assert not any(isinstance(each, Failed) for each in rig.said)
        rig.check_idle()


def assert_alike(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert len(found) == len(expected)
    for (logprob, rank, likeliest), (wanted, wanted_rank, wanted_likeliest) in zip(
        found, expected, strict=True
    ):
        assert logprob == pytest.approx(wanted, abs=1e-4) and rank == wanted_rank
        assert likeliest == pytest.approx(wanted_likeliest, abs=1e-4)
