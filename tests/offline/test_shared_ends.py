"""Real time and best effort in the same blocks, on a real engine: greedy tokens equal transformers' in float32,
whatever is overwritten and comes back."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.decode_worker.worker import DecodeWorker
from alignedserve.instance.memory import BlockManager
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestId
from tests.engine.helpers import greedy_params, make_engine
from tests.tiny_models import MAX_LEN, greedy, prompts

Directory = Callable[[str], Path]
BLOCK_SIZE = 16
RT = Deadlines(is_rt=True, first_due_s=0.0, tbt_s=1000.0)
FAMILY = "llama-gqa-tied"


def instance_of(directory: Path, num_blocks: int, share_blocks: bool = True, **options: Any) -> LocalInstance:
    engine = make_engine(
        directory,
        kv_cache_memory_bytes=num_blocks * block_bytes_of(directory, options.get("kv_cache_dtype", "auto")),
        has_reversed=share_blocks,
        block_size=BLOCK_SIZE,
        **options,
    )
    config = SchedulingConfig("bros", share_blocks=share_blocks, evict_ahead=1, admit_ahead=1)
    return LocalInstance(engine, make_policy(config), options.get("enable_prefix_caching", True))


def block_bytes_of(directory: Path, kv_cache_dtype: str = "auto") -> int:
    """3 layers, k and v, and as many heads as the model has, in float32 or less."""
    config: dict[str, int] = json.loads((directory / "config.json").read_text())
    num_heads, head_dim = config.get("num_key_value_heads", 4), config.get("head_dim") or 16
    row_bytes = {"auto": 4 * head_dim, "fp8": head_dim, "int8": head_dim + 4}[kv_cache_dtype]
    return 3 * 2 * num_heads * BLOCK_SIZE * row_bytes


@pytest.fixture
def num_ops(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often an instance has done each thing with blocks that two share."""
    counts: Counter[str] = Counter()
    plain = DecodeWorker._carry_out_ends

    def copying(self: DecodeWorker, ops: Any) -> None:
        counts.update(type(op).__name__ for op in ops)
        plain(self, ops)

    def counted(name: str) -> None:
        method = getattr(BlockManager, name)

        def counting(*parts: Any) -> Any:
            counts[name] += 1
            return method(*parts)

        monkeypatch.setattr(BlockManager, name, counting)

    monkeypatch.setattr(DecodeWorker, "_carry_out_ends", copying)
    counted("lend")
    counted("give_up")
    return counts


def run_both_classes(instance: LocalInstance, seed: int, every: int) -> list[list[int]]:
    """Every prompt as best effort from the beginning, and once more as real time, one after another."""
    rng = random.Random(seed)
    outputs: dict[RequestId, list[int]] = {}
    numbers = [*range(len(prompts()))]
    rng.shuffle(numbers)

    def add(name: str, number: int, deadlines: Deadlines | None) -> None:
        outputs[RequestId(name)] = []
        instance.add_request(RequestId(name), prompts()[number], greedy_params(), 0, deadlines)

    def step() -> None:
        for output in instance.step():
            if output.token_id is not None:
                outputs[output.request_id].append(output.token_id)

    for number in numbers:
        add(f"be {number}", number, None)
    for number in numbers:
        for _ in range(every):
            step()
        add(f"rt {number}", number, RT)
    while instance.num_unfinished:
        step()
    instance.check_idle()
    return [outputs[RequestId(f"{tier} {number}")] for tier in ("be", "rt") for number in sorted(numbers)]


def check_used(num_ops: Counter[str]) -> None:
    assert all(num_ops[name] for name in ("lend", "Checkpoint", "give_up", "Renew", "Restore")), num_ops


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("num_blocks", [MAX_LEN // BLOCK_SIZE, MAX_LEN // BLOCK_SIZE + 20])
def test_tokens_are_transformers_when_real_time_overwrites(
    tiny_model: Directory, num_ops: Counter[str], backend: str, num_blocks: int
) -> None:
    directory = tiny_model(FAMILY)
    instance = instance_of(directory, num_blocks, attention_backend=backend, max_num_batched_tokens=64)
    assert run_both_classes(instance, seed=0, every=6) == greedy(directory) * 2
    check_used(num_ops)


@pytest.mark.parametrize("family", ["mistral-window", "opt", "qwen3"])
def test_likewise_for_other_families(tiny_model: Directory, num_ops: Counter[str], family: str) -> None:
    directory = tiny_model(family)
    engine_blocks = MAX_LEN // BLOCK_SIZE + 8
    instance = instance_of(directory, engine_blocks, max_num_batched_tokens=48, max_prefill_chunk=20)
    assert run_both_classes(instance, seed=1, every=4) == greedy(directory) * 2
    assert num_ops["lend"]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_in_any_order(
    tiny_model: Directory, num_ops: Counter[str], seed: int, enable_prefix_caching: bool
) -> None:
    """With the cache, real time finds its prompts' KV of before, and never best effort's."""
    directory = tiny_model(FAMILY)
    num_blocks = MAX_LEN // BLOCK_SIZE + 6 * seed
    instance = instance_of(
        directory, num_blocks, enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=64
    )
    assert run_both_classes(instance, seed, every=6) == greedy(directory) * 2
    assert num_ops["Checkpoint"] and num_ops["Restore"]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_the_tokens_are_those_without_sharing(
    tiny_model: Directory, num_ops: Counter[str], kv_cache_dtype: str
) -> None:
    instances = (
        instance_of(tiny_model(FAMILY), MAX_LEN // BLOCK_SIZE, share_blocks, kv_cache_dtype=kv_cache_dtype)
        for share_blocks in (False, True)
    )
    found = [run_both_classes(instance, seed=0, every=6) for instance in instances]
    assert found[0] == found[1] and num_ops["Checkpoint"]
