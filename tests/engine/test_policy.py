"""The policy against a fabricated engine: only counts, thousands of iterations in a moment."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.engine.policy import FcfsPolicy, Limits, Plan, Queues
from alignedserve.engine.request import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId


class FakeEngine:
    """Does what plans say to counts, and checks that every plan fits."""

    def __init__(self, limits: Limits, num_blocks: int) -> None:
        self.limits, self.num_blocks, self.num_free = limits, num_blocks, num_blocks
        self.queues = Queues()
        self.policy = FcfsPolicy(limits)
        self.finished: list[Request] = []

    def add(self, prompt_len: int, output_len: int) -> None:
        request = Request(
            request_id=RequestId(str(len(self.queues))),
            prompt=np.zeros(prompt_len, dtype=np.int32),
            params=SamplingParams(),
            seed=0,
            stop_token_ids=frozenset(),
            max_output_len=output_len,
        )
        self.queues.waiting.append(request)

    def step(self) -> None:
        queues, plan = self.queues, self._plan()
        for request in plan.evict:
            queues.running.remove(request)
            queues.preempted.append(request)
            self._hold(request, 0)
        for chosen, source in ((plan.resume, queues.preempted), (plan.admit, queues.waiting)):
            for request in chosen:
                assert source.popleft() is request, "taken out of turn"
                queues.running.append(request)
                self._hold(request, self.limits.blocks_for(request.num_tokens))
        assert plan.work, "no progress"
        assert sum(count for _, count in plan.work) <= self.limits.max_num_batched_tokens
        assert len(queues.running) <= self.limits.max_num_seqs
        for request, count in plan.work:
            self._compute(request, count)

    def _plan(self) -> Plan:
        """The shorter way that there is for decodes comes to the same."""
        queues = self.queues
        queues.is_decoding = False
        plan = self.policy.plan(queues, self.num_free)
        queues.is_decoding = all(request.num_pending == 1 for request in queues.running)
        assert self.policy.plan(queues, self.num_free) == plan
        return plan

    def _compute(self, request: Request, count: int) -> None:
        assert 0 < count <= min(request.num_pending, self.limits.max_prefill_chunk)
        needed = self.limits.blocks_for(request.num_computed + count)
        self._hold(request, max(needed, request.num_blocks))
        request.num_computed += count
        if request.num_pending == 0:
            request.output.append(0)
            if len(request.output) == request.max_output_len:
                self.queues.running.remove(request)
                self._hold(request, 0)
                self.finished.append(request)

    def _hold(self, request: Request, num_blocks: int) -> None:
        self.num_free -= num_blocks - request.num_blocks
        request.num_blocks = num_blocks
        assert self.num_free >= 0, f"planned {-self.num_free} blocks more than there are"


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_num_seqs=st.integers(1, 12),
    max_tokens=st.integers(1, 100),
    chunk=st.integers(1, 100),
    spare_blocks=st.integers(0, 30),
)
def test_every_request_ends_and_every_plan_fits(
    seed: int, max_num_seqs: int, max_tokens: int, chunk: int, spare_blocks: int
) -> None:
    rng = random.Random(seed)
    limits = Limits(max_num_seqs, max_tokens, min(chunk, max_tokens), block_size=4)
    engine = FakeEngine(limits, num_blocks=limits.blocks_for(60) + spare_blocks)
    arrivals = [(rng.randint(1, 40), rng.randint(1, 20)) for _ in range(rng.randint(1, 25))]
    while arrivals or len(engine.queues):
        if arrivals and rng.random() < 0.5:
            engine.add(*arrivals.pop())
        if len(engine.queues):
            engine.step()
    assert engine.num_free == engine.num_blocks
    assert all(len(request.output) == request.max_output_len for request in engine.finished)


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_prefill_chunk=64, block_size=4)
    engine = FakeEngine(limits, num_blocks=4)
    engine.add(8, 8)
    engine.add(8, 8)
    engine.add(8, 8)
    old, young, waiting = engine.queues.waiting
    engine.step()  # both prompts fit exactly
    assert engine.queues.running == [old, young]
    engine.step()  # neither has room for its ninth token: the younger gives way
    assert engine.queues.running == [old] and list(engine.queues.preempted) == [young]
    while old not in engine.finished:
        engine.step()
    engine.step()
    assert engine.queues.running[0] is young
    assert waiting not in engine.finished
