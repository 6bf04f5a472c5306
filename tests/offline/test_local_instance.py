"""An instance without a router: it waits for what others do, and never for what it has to do itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.offline.local_instance import LocalInstance
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.policies.base import ColocatedPart, DecodePart
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.timing.estimate import Estimate
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


class Wake(threading.Event):
    """An event that may be waited for only while it is set, or something is under way that will set it."""

    def __init__(self, instance: LocalInstance) -> None:
        super().__init__()
        self._instance = instance

    def wait(self, timeout: float | None = None) -> bool:
        worker = self._instance._worker
        assert self.is_set() or worker._num_copies or len(worker._compiling), (
            "it waits, and nothing is under way"
        )
        return super().wait(timeout)


class DropEveryStep(Fcfs):
    """Takes every decoding request's KV away after each iteration."""

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return DropAll(limits, self.config)


class DropAll(ColocatedPart):
    def plan(self, at: DecodeBoundary) -> None:
        at.drop(at.ready_and_behind()[0])
        super().plan(at)


def test_a_preempted_request_is_not_waited_for(tiny_model: Directory) -> None:
    """Its copies are so small that they are over when they begin: no thread is there to wake anybody."""
    instance = make_instance(tiny_model(FAMILY), EvictEveryStep)
    instance._wake = Wake(instance)
    instance.reset()
    assert tokens(run(instance, prompts(), greedy_params())) == greedy(tiny_model(FAMILY))
    assert instance.num_evictions > 10


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_who_is_dropped_goes_on_where_it_was(tiny_model: Directory, enable_prefix_caching: bool) -> None:
    """Its tokens so far are its prompt."""
    asked = [greedy_params(), SamplingParams(seed=1, max_tokens=64, ignore_eos=True, logprobs=2)] * 10
    params, directory = asked[: len(prompts())], tiny_model(FAMILY)
    dropping = make_instance(directory, DropEveryStep, enable_prefix_caching=enable_prefix_caching)
    assert tokens(run(dropping, prompts(), params)) == tokens(
        run(make_instance(directory), prompts(), params)
    )
    assert dropping.num_drops > 10 and not dropping.num_evictions
