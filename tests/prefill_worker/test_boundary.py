"""What a policy may not do on a prefill instance: it is told, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import prefilling
from alignedserve.scheduling.boundary import PrefillBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policy import Policy, PrefillPart
from alignedserve.timing.estimate import Estimate
from tests.works import make_work

LIMITS = InstanceLimits(
    num_blocks=30, block_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=60
)


class InChunks(PrefillPart):
    """Computes the first prompt in chunks of these lengths, all of one iteration."""

    chunks: Sequence[int] = ()

    def plan(self, at: PrefillBoundary) -> None:
        prefilling.admit_while(at, at.waiting, prefilling.fits)
        for num_tokens in self.chunks:
            at.chunk(at.computing[0], num_tokens)


class Chunking(Policy):
    name = "chunking"
    summary = "chunks that a test says"
    chunks: Sequence[int] = ()

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        part = InChunks(limits, self.config)
        part.chunks = self.chunks
        return part


def schedule_of(chunks: Sequence[int]) -> PrefillSchedule:
    policy = Chunking(SchedulingConfig())
    policy.chunks = chunks
    schedule = PrefillSchedule(LIMITS, policy=policy)
    schedule.prefill([make_work(20, output_len=0, num_cached=0)])
    return schedule


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_chunk_has_tokens_and_no_more_than_an_iteration(num_tokens: int) -> None:
    assert [count for _, count in schedule_of([num_tokens]).plan(0.0).chunks] == [num_tokens]


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([0], "to compute 0 tokens, but at most 16"),
        ([17], "to compute 17 tokens, but at most 16"),
        ([4, 4], "to compute 4 tokens once more, but at most 12"),
    ],
)
def test_another_chunk_is_refused(chunks: Sequence[int], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        schedule_of(chunks).plan(0.0)
