"""An instance without a router: it waits for others' work, but never for its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.offline.local_instance import LocalInstance
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import ColocatedPart, DecodePart
from alignedserve.timing.cost import CopyChannel
from alignedserve.timing.estimate import Estimate
from tests.engine.helpers import (
    EvictEveryStep,
    greedy_params,
    make_engine,
    make_instance,
    run,
    tokens,
)
from tests.sim.islands import COST
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
        assert self.is_set() or len(worker.copies) or len(worker._compiling), (
            "it waits, and nothing is under way"
        )
        return super().wait(timeout)


class DropEveryStep(Fcfs):
    """Takes every decoding request's KV away after each iteration."""

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return DropAll(limits, self.config)


class DropAll(ColocatedPart):
    def plan(self, at: DecodeBoundary) -> None:
        at.drop(at.ready_and_pending()[0])
        super().plan(at)


def test_a_preempted_request_is_not_waited_for(tiny_model: Directory) -> None:
    """Its copies are so small that they are over when they begin: no thread is there to wake anybody."""
    instance = make_instance(tiny_model(FAMILY), EvictEveryStep)
    instance._wake = Wake(instance)
    instance.reset()
    assert tokens(run(instance, prompts(), greedy_params())) == greedy(tiny_model(FAMILY))
    assert instance.num_evictions > 10


def test_copies_from_the_pool_correct_what_the_next_ones_are_predicted_to_take(
    tiny_model: Directory,
) -> None:
    """The cost model has a byte take a second."""
    fetch = CopyChannel(0.0, 1.0)
    estimate = Estimate(replace(COST, channels=replace(COST.channels, fetch=fetch)))
    instance = LocalInstance(
        make_engine(tiny_model(FAMILY)), EvictEveryStep(SchedulingConfig()), estimate=estimate
    )
    run(instance, prompts()[:3], greedy_params())
    assert instance.num_evictions > 10 and 0 < estimate.fetch_pace < 0.5


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
