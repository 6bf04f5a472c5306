"""A prompt for an embedding at a prefill instance: nothing of it goes to the pool, and it ends once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import Abort, Gone, Prefill, Work
from alignedserve.protocol.pooling import DTYPE, NO_SAMPLING, POOLINGS
from alignedserve.scheduling.config import SchedulingConfig
from tests.prefill_worker.rig import KEY, Interrupting, Rig, work
from tests.tiny_models import embeddings, prompts
from tests.worker_parts import engine_of

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"
LONG = prompts()[8]

both_poolings = pytest.mark.parametrize("pooling", POOLINGS)


def asked(pooling: str) -> Work:
    plain = work(LONG, NO_SAMPLING)
    return replace(plain, blocks=[], request=replace(plain.request, pooling=pooling))


def check_end(rig: Rig, directory: Path, pooling: str) -> None:
    """It has its vector, the pool has nothing, and when it is called back nothing is left."""
    rig.step_until(lambda: rig.news and engine_of(rig.worker).num_unfinished == 0)
    (news,) = rig.news
    assert (news.key, news.first, news.tokens, news.finish_reason) == (KEY, 0, [], "stop")
    vector = np.frombuffer(news.embedding, DTYPE)
    np.testing.assert_allclose(vector, embeddings(directory, pooling)[8], atol=2e-5)
    assert not rig.pool.any() and not any(report.saved or report.moved for report in rig.reports)
    rig.worker.on(Abort([KEY]))
    rig.step()
    assert rig.said[-1] == Gone([KEY])
    rig.check_idle()


@both_poolings
def test_it_is_computed_in_chunks_and_ends(tiny_model: Directory, pooling: str) -> None:
    rig = Rig(tiny_model(FAMILY))
    rig.worker.on(Prefill([asked(pooling)]))
    check_end(rig, tiny_model(FAMILY), pooling)
    progress = [each for report in rig.reports for each in report.progress]
    assert progress == [(KEY, num, 0) for num in (40, 80, 120, 160, 200, 240, 280)]


@both_poolings
def test_what_the_prefix_cache_has_is_used_for_the_last_state_alone(
    tiny_model: Directory, pooling: str
) -> None:
    rig = Rig(tiny_model(FAMILY), enable_prefix_caching=True)
    for _ in range(2):
        rig.said.clear()
        rig.worker.on(Prefill([asked(pooling)]))
        check_end(rig, tiny_model(FAMILY), pooling)
    assert (sum(report.num_found for report in rig.reports) > 200) is (pooling == "last")


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@both_poolings
def test_preempted_it_begins_again(tiny_model: Directory, pooling: str, enable_prefix_caching: bool) -> None:
    """With its KV in the prefix cache, the last state is computed from there."""
    rig = Rig(
        tiny_model(FAMILY),
        enable_prefix_caching=enable_prefix_caching,
        policy=Interrupting(SchedulingConfig()),
    )
    rig.worker.on(Prefill([asked(pooling)]))
    check_end(rig, tiny_model(FAMILY), pooling)
    num_computed = sum(report.num_computed for report in rig.reports)
    is_reused = enable_prefix_caching and pooling == "last"
    assert num_computed == len(LONG) + (0 if is_reused else 80)


@both_poolings
def test_aborted_half_way_nothing_is_left(tiny_model: Directory, pooling: str) -> None:
    rig = Rig(tiny_model(FAMILY))
    rig.worker.on(Prefill([asked(pooling)]))
    rig.step()
    rig.worker.on(Abort([KEY]))
    rig.step_until(lambda: rig.is_gone)
    assert not rig.news
    rig.check_idle()
