"""Bits of preempted requests' KV flip in host memory: the requests compute it again, and get their tokens."""

from __future__ import annotations

import logging

import pytest

from alignedserve import LLM, demo
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import RequestId
from tests.engine.helpers import EvictEveryStep, greedy_params

PROMPTS = [[5 + number, *range(30)] for number in range(3)]
CHANGED = "of the KV pool has changed since it was saved"


def answers(instance: LocalInstance, flips_bits: bool) -> dict[RequestId, list[int]]:
    for number, prompt in enumerate(PROMPTS):
        instance.add_request(RequestId(str(number)), prompt, greedy_params(20), seed=0)
    found: dict[RequestId, list[int]] = {}
    num_steps = 0
    while instance.num_unfinished:
        for output in instance.step():
            if output.token_id is not None:
                found.setdefault(output.request_id, []).append(output.token_id)
        num_steps += 1
        if flips_bits and instance._memory:
            # What is not saved yet is overwritten. A second flip of the same bit would undo the first.
            for request in instance._requests.values():
                instance._memory.blocks[request.blocks[:1], num_steps] ^= 1
    instance.check_idle()
    instance.close()
    return found


def test_kv_that_has_changed_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", use_tqdm=False, max_model_len=256)
    expected = answers(llm.instance, flips_bits=False)
    policy = EvictEveryStep(SchedulingConfig())
    with caplog.at_level(logging.WARNING):
        instance = LocalInstance(llm.engine, policy, verify_blocks=1.0)
        assert answers(instance, flips_bits=True) == expected
        assert instance.num_evictions
    assert CHANGED in caplog.text
    caplog.clear()
    # Without changes, nothing is found.
    assert answers(LocalInstance(llm.engine, policy, verify_blocks=1.0), flips_bits=False) == expected
    assert CHANGED not in caplog.text


def test_a_share_that_can_not_be_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"^verify_blocks=1\.1: must be from 0 to 1$"):
        LLM("nowhere", verify_blocks=1.1)
