"""Decode steps through the engine's public interface. It adopts requests with random KV, as if computed elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from alignedserve.engine.build import BuiltEngine, build_engine
from alignedserve.engine.choices import block_format
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest
from alignedserve.instance.direct import DirectEngine
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.models import config_of, dtype_of, source_of

BLOCK_SIZE = 16
# Keys and queries with unit variance and dummy weights would also work. This is small so no logit overflows in float16.
KV_DEVIATION = 0.1


@contextmanager
def engine_for(
    bench: Bench,
    model: str,
    batches: Sequence[Sequence[int]],
    max_steps: int,
    decode_kernel: str | None = None,
    spare_blocks: int = 0,
    **options: Any,
) -> Iterator[BuiltEngine]:
    """Yields an engine with room for each of `batches` (prefix lengths) alone and `max_steps` more tokens. Its KV cache
    holds random values."""
    config = config_of(model, bench)
    longest = max(max(batch) for batch in batches) + max_steps
    max_model_len = min(config.max_position, max(longest + BLOCK_SIZE, 4096))
    wanted = EngineConfig(
        source_of(model, bench),
        load_format="dummy",
        device=str(bench.device),
        attention_backend=bench.options.backend,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=max(map(len, batches)),
        block_size=BLOCK_SIZE,
        use_tqdm=False,
        **kernel_option(decode_kernel or bench.options.decode_kernels[0]),
        # Only the sizes that are measured.
        **optional("cudagraph_capture_sizes", tuple(sorted(set(map(len, batches))))),
        **options,
    )
    form = block_format(wanted, config, dtype_of(config, bench))
    num_columns = max(sum(form.num_columns(length + max_steps + 1) for length in batch) for batch in batches)
    num_columns = max(num_columns + spare_blocks, form.num_columns(max_model_len))
    free_memory()
    built = build_engine(replace(wanted, kv_cache_memory_bytes=num_columns * form.column_bytes))
    fill_with_noise(built.engine.cache.blocks)
    try:
        yield built
    finally:
        built.engine.reset()
        del built
        free_memory()


def kernel_option(name: str) -> dict[str, Any]:
    return optional("decode_kernel", name)


def has_decode_kernels() -> bool:
    return bool(kernel_option(""))


def optional(name: str, value: Any) -> dict[str, Any]:
    """Returns the EngineConfig argument if EngineConfig has that field."""
    return {name: value} if name in {field.name for field in fields(EngineConfig)} else {}


def fill_with_noise(blocks: torch.Tensor) -> None:
    """Never writes NaN, nor zeros, which are faster."""
    for block in torch.split(blocks, 64):
        block.normal_(0.0, KV_DEVIATION)


class Decoding:
    """A decode batch: each `step` produces one token per request, so prefixes grow by one."""

    def __init__(self, engine: Engine, lengths: Sequence[int], max_steps: int) -> None:
        """`lengths`: tokens attended to in the first step, including the new one."""
        self._engine, self.direct = engine, DirectEngine(engine)
        tokens, vocab_size = np.random.default_rng(0), engine.vocabulary.size
        params = SamplingParams(temperature=0, max_tokens=max_steps + 2, ignore_eos=True)
        self.work = []
        for index, length in enumerate(lengths):
            prompt = tokens.integers(vocab_size, size=length - 1).tolist()
            request = self.direct.begin(
                NewRequest(
                    RequestId(f"r{index}"),
                    prompt,
                    params,
                    seed=0,
                    output=[int(tokens.integers(vocab_size))],
                    num_computed=length - 1,
                )
            )
            self.direct.grow([(request, 1 + max_steps)])
            self.work.append((request, 1))

    def step(self) -> None:
        outputs = self._engine.execute(self.work)
        if len(outputs) != len(self.work) or outputs[0].error is not None:
            raise RuntimeError(f"{len(outputs)} tokens of {len(self.work)}: {outputs[:1]}")

    def wall_seconds(self, num_steps: int, warm_ups: int = 3) -> list[float]:
        """Returns the seconds of each step, from the call until its tokens are on the host."""
        for _ in range(warm_ups):
            self.step()
        seconds = []
        for _ in range(num_steps):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def close(self) -> None:
        for request, _ in self.work:
            self.direct.release(request)

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
