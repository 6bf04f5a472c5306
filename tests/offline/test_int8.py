"""KV that leaves for int8 memory and comes back after each iteration: the demo model's answers stay right."""

from __future__ import annotations

import random

import pytest
import torch

from alignedserve import LLM, SamplingParams, demo
from alignedserve.demo.tasks import TASKS, check
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.scheduling.config import SchedulingConfig
from tests.engine.helpers import EvictEveryStep

NUM_PER_TASK = 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_right_however_often_their_kv_was_away(dtype: str) -> None:
    llm = LLM(str(demo.MODEL_DIR), pool_kv_dtype="int8", dtype=dtype, use_tqdm=False, max_model_len=512)
    llm.instance.close()
    policy = EvictEveryStep(SchedulingConfig())
    llm.instance = LocalInstance(llm.engine, policy, pool_kv_dtype="int8")
    dice = random.Random(3)
    # short ones: each of their tokens takes all of their KV out and back
    examples = [
        task.generate(dice) for name, task in TASKS.items() for _ in range(NUM_PER_TASK) if name != "pick"
    ]
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    results = llm.chat(chats, SamplingParams(temperature=0, max_tokens=256), use_tqdm=False)
    right = [
        check(example, result.outputs[0].text) for example, result in zip(examples, results, strict=True)
    ]
    assert llm.instance.num_evictions > 10 * len(examples)
    # without int8, 2 in 100 are wrong
    assert sum(right) >= 0.9 * len(examples)
    llm.instance.check_idle()
    llm.instance.close()


def test_an_unknown_format_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="^pool_kv_dtype='int4': must be one of auto, int8$"):
        LLM("nowhere", pool_kv_dtype="int4")


def test_nothing_is_changed_that_does_not_leave() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for pool_kv_dtype in ("auto", "int8"):
        llm = LLM(
            str(demo.MODEL_DIR),
            pool_kv_dtype=pool_kv_dtype,
            dtype="float32",
            use_tqdm=False,
            max_model_len=256,
        )
        answers.append(llm.generate("Count from 8 to 30.", params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.instance.close()
    assert torch.equal(*(torch.tensor(each) for each in answers))
