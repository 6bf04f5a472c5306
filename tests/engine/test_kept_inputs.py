"""Tokens are the same whether K and V of a request are kept or the inputs of its layers, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from alignedserve.engine.request import NewRequest, Request
from alignedserve.instance.direct import DirectEngine
from alignedserve.kv.held import Held
from alignedserve.kv.layout import INPUTS, PLAIN
from alignedserve.types import RequestId
from tests.engine.helpers import greedy_params, make_direct
from tests.tiny_models import NUM_NEW, greedy, prompts

Directory = Callable[[str], Path]
BACKENDS = ["torch", "cpu"]
# Models with one K for each head: learned positions, norms after each part, rotated keys.
FAMILIES = ["opt", "opt-post-norm", "llama-mha", "phi3"]


def _engine(directory: Path, backend: str, **options: Any) -> DirectEngine:
    return make_direct(directory, attention_backend=backend, hidden_cache=True, **options)


def _adopt(engine: DirectEngine, index: int, keeps_inputs: bool, output: list[int] | None = None) -> Request:
    return engine.begin(
        NewRequest(
            RequestId(f"r{index}"),
            prompts()[index],
            greedy_params(),
            0,
            output or [],
            held=Held(layout=INPUTS if keeps_inputs else PLAIN),
        )
    )


def _finish(engine: DirectEngine, requests: list[Request], chunk: int) -> list[list[int]]:
    """Runs the requests together, each in chunks of its own pace, until all have ended."""
    running = list(requests)
    while running:
        engine.execute([(request, min(request.num_pending, chunk)) for request in running])
        running = [request for request in running if len(request.output) < NUM_NEW]
    found = [request.output for request in requests]
    for request in requests:
        engine.release(request)
    engine.check_idle()
    return found


def _alternating(kinds: list[bool]) -> Iterator[bool]:
    return cycle(kinds)


@pytest.mark.slow
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kinds", [[True], [True, False], [False, False, True]], ids=str)
def test_tokens_equal_transformers(
    tiny_model: Directory, family: str, backend: str, kinds: list[bool]
) -> None:
    directory = tiny_model(family)
    engine = _engine(directory, backend)
    kind = _alternating(kinds)
    requests = [_adopt(engine, index, next(kind)) for index in range(len(prompts()))]
    assert _finish(engine, requests, chunk=300) == greedy(directory)


@pytest.mark.slow
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (7, 8), (50, 16), (64, 32)])
def test_chunks_and_blocks_change_nothing(
    tiny_model: Directory, backend: str, chunk: int, block_size: int
) -> None:
    directory = tiny_model("opt")
    engine = _engine(directory, backend, block_size=block_size)
    kind = _alternating([True, True, False])
    requests = [_adopt(engine, index, next(kind)) for index in range(len(prompts()))]
    assert _finish(engine, requests, chunk) == greedy(directory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_computed_again_in_either_form(tiny_model: Directory, backend: str) -> None:
    """A request ends in the middle, its blocks are freed, and it goes on in the other form."""
    directory, index, half = tiny_model("opt"), 7, NUM_NEW // 2
    for keeps_inputs in (True, False):
        engine = _engine(directory, backend)
        request = _adopt(engine, index, keeps_inputs)
        while len(request.output) < half:
            engine.execute([(request, request.num_pending)])
        engine.release(request)
        engine.check_idle()
        again = _adopt(engine, index, not keeps_inputs, request.output)
        assert _finish(engine, [again], chunk=300) == [greedy(directory)[index]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_native_backend_restores_bit_for_bit(tiny_model: Directory, dtype: str) -> None:
    """K and V are projected by the same operations in the same order, so that log-probabilities are equal too."""
    found = []
    for keeps_inputs in (False, True):
        engine = _engine(tiny_model("opt"), "cpu", dtype=dtype)
        params = greedy_params(NUM_NEW, logprobs=1)
        requests = []
        for index, prompt in enumerate(prompts()):
            held = Held(layout=INPUTS if keeps_inputs else PLAIN)
            requests.append(engine.begin(NewRequest(RequestId(f"r{index}"), prompt, params, 0, held=held)))
        outputs = []
        while requests:
            outputs += engine.execute([(request, min(request.num_pending, 40)) for request in requests])
            requests = [request for request in requests if len(request.output) < NUM_NEW]
        found.append([(each.request_id, each.token_id, each.logprobs) for each in outputs])
    assert found[0] == found[1]


def test_half_as_many_blocks_are_taken(tiny_model: Directory) -> None:
    engine = _engine(tiny_model("opt"), "torch")
    num_free = engine.memory.num_free
    kv, inputs = _adopt(engine, 8, False), _adopt(engine, 7, True)
    # 300 tokens of K and V, and 150 tokens of inputs, 32 to a block.
    assert (len(engine.blocks_of(kv)), len(engine.blocks_of(inputs))) == (19, 5)
    assert engine.memory.num_free == num_free - 24
    assert engine.execute([(kv, 300), (inputs, 150)]) and len(inputs.output) == 1
    while inputs.num_computed < 160:
        engine.execute([(inputs, 1)])
    assert len(engine.blocks_of(inputs)) == 5
    engine.execute([(inputs, 1)])
    assert len(engine.blocks_of(inputs)) == 6
    engine.release(kv)
    engine.release(inputs)
    assert engine.memory.num_free == num_free


def test_a_block_that_held_the_other_form_is_used_again(tiny_model: Directory) -> None:
    """Room for one request at a time, so that each takes the blocks of the one before."""
    directory = tiny_model("opt")
    # 512 tokens in blocks of 16, of 3 layers of K and V of 64 float32, and once more for one layer.
    num_bytes = 32 * 16 * 2 * 64 * 4 * (3 + 1)
    for backend in BACKENDS:
        engine = _engine(directory, backend, kv_cache_memory_bytes=num_bytes)
        assert engine.memory.num_blocks == 32
        for index, keeps_inputs in ((8, True), (8, False), (7, True)):
            request = _adopt(engine, index, keeps_inputs)
            assert _finish(engine, [request], chunk=128) == [greedy(directory)[index]]


@pytest.mark.parametrize("family", ["llama-gqa-tied", "qwen2"])
def test_models_whose_inputs_are_no_smaller_are_refused(tiny_model: Directory, family: str) -> None:
    with pytest.raises(ValueError, match="hidden_cache: this model's K is 32 values wide"):
        _engine(tiny_model(family), "torch")


def test_an_engine_without_hidden_cache_keeps_no_inputs(tiny_model: Directory) -> None:
    engine = make_direct(tiny_model("opt"), attention_backend="torch")
    with pytest.raises(ValueError, match="r0: its inputs can't be kept"):
        engine.adopt(NewRequest(RequestId("r0"), prompts()[0], greedy_params(), 0, held=Held(layout=INPUTS)))
