"""A user's own policy, written in this file and named on the command line: it runs everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignedserve.protocol.messages import AnyMessage, DecodeReport, InstanceLimits, PrefillReport
from alignedserve.router.eventlog import LogReader
from alignedserve.router.events import Event, Received, Send
from alignedserve.scheduling import decoding, prefilling
from alignedserve.scheduling.boundary import DecodeBoundary, PrefillBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, RoutedRequest, Urgency
from alignedserve.scheduling.policies import POLICIES, make_policy
from alignedserve.scheduling.policy import DecodePart, Policy, PrefillPart, RouterPart
from alignedserve.timing.estimate import Estimate
from tests.cluster.client import connected
from tests.cluster.processes import Setup, running
from tests.cluster.requests import Result, alone, greedy_requests, results
from tests.sim.islands import BLOCK_SIZE, requests, small_island

Directory = Callable[[str], Path]
NAME = f"{__name__}:OneAtATime"


class LongestFirst(RouterPart):
    def urgency(self, request: RoutedRequest, island: Island) -> Urgency:
        return Urgency(True, -request.num_tokens, False)


class BlockByBlock(PrefillPart):
    def plan(self, at: PrefillBoundary) -> None:
        prefilling.admit_while(at, at.waiting, prefilling.fits)
        for member in at.computing[:1]:
            at.chunk(member, min(member.num_pending, self.limits.block_size))


class OneDecodes(DecodePart):
    def plan(self, at: DecodeBoundary) -> None:
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        for member in at.running[:1]:
            at.run(member)
        decoding.admit_in_order(at, self.config)


class OneAtATime(Policy):
    name = "one at a time"
    summary = "the longest prompt first, a block of one prompt, a token of one request"

    def router(self) -> RouterPart:
        return LongestFirst(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return BlockByBlock(limits, self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return OneDecodes(limits, self.config)


def check_reports(messages: Iterator[AnyMessage]) -> None:
    """They were made as this policy has it."""
    num_decoded = 0
    for message in messages:
        if isinstance(message, PrefillReport):
            assert message.num_computed <= BLOCK_SIZE
        elif isinstance(message, DecodeReport):
            assert len(message.news) <= 1
            num_decoded += len(message.news)
    assert num_decoded > 100


def test_it_runs_in_simulation() -> None:
    island = small_island(policy=NAME)
    heard: list[AnyMessage] = []

    def listen(now: float, event: Event, orders: list[Send]) -> None:
        if isinstance(event, Received):
            heard.append(event.message)

    island.router.observers.append(listen)
    island.submit(requests(12, every_s=0.0))
    island.start()
    assert island.run_until_done(12, limit_s=200.0)
    island.settle()
    island.check_idle()
    check_reports(iter(heard))
    first_tokens = sorted(island.streams, key=lambda stream: stream.times_s[0])
    lengths = [len(stream.request.prompt) for stream in first_tokens]
    # those that came first started before there was anything to choose from
    assert lengths[-4:] == sorted(lengths[-4:], reverse=True)


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_it_runs_in_real_processes(tiny_model: Directory, tmp_path: Path) -> None:
    family, wanted = "llama-gqa-tied", greedy_requests(16, seed=3)
    with running(Setup(tiny_model(family), policy=NAME), tmp_path) as processes:

        async def generate() -> list[Result]:
            async with connected(processes) as client:
                return results(await client.generate(wanted, at_once=8, every=4))

        found = asyncio.run(generate())
    assert found == alone(tiny_model(family), wanted)
    (log,) = tmp_path.glob("*.events")
    steps = LogReader(log).steps()
    check_reports(step.event.message for step in steps if isinstance(step.event, Received))


def test_those_that_are_registered_have_a_name_and_a_line_for_people() -> None:
    for name, policy in POLICIES.items():
        assert name == policy.name and policy.summary and type(make_policy(SchedulingConfig(name))) is policy


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("best", "must be one of aligned, .* or package.module:Class"),
        ("nowhere.at_all:Best", "No module named 'nowhere'; PYTHONPATH=. finds"),
        (f"{__name__}:Worst", "has no attribute 'Worst'"),
        (f"{__name__}:BLOCK_SIZE", "is not a subclass of"),
        (":Best", "Empty module name"),
    ],
)
def test_what_is_no_policy_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"policy='{name}': .*{why}"):
        make_policy(SchedulingConfig(name))
