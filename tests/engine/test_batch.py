"""Batches of adopted requests with a caller that decides what is computed when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve.engine.request import NewRequest, Request
from alignedserve.instance.direct import DirectEngine
from alignedserve.kv.held import Held
from alignedserve.kv.layout import PLAIN, REVERSED
from alignedserve.types import RequestId
from tests.engine.helpers import greedy_params, make_direct
from tests.tiny_models import greedy, prompts

FAMILY = "llama-gqa-tied"


@pytest.fixture
def directory(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(FAMILY)


def adopt(engine: DirectEngine, directory: Path, number: int, num_output: int) -> Request:
    """One that has got so many tokens elsewhere, and whose KV is still to be computed."""
    output = greedy(directory)[number][:num_output]
    return engine.begin(NewRequest(RequestId(f"r{number}"), prompts()[number], greedy_params(), 0, output))


def test_one_that_catches_up_token_by_token_takes_its_own_and_not_its_last(directory: Path) -> None:
    engine = make_direct(directory)
    request = adopt(engine, directory, 2, num_output=6)
    for _ in range(request.num_pending + 5):
        engine.execute([(request, 1)])
    assert request.output == greedy(directory)[2][:12]
    engine.release(request)


def test_the_same_batch_in_other_rows_is_another_one(directory: Path) -> None:
    engine = make_direct(directory)
    both = [adopt(engine, directory, number, num_output=1) for number in (2, 3)]
    engine.execute([(request, request.num_pending) for request in both])
    for _ in range(8):
        engine.execute([(request, 1) for request in both])
        rows = [request.row for request in both]
        for request in both:
            engine.part(request)
        for request in both:
            engine.join(request)
        assert [request.row for request in both] == rows[::-1]
    assert [request.output for request in both] == [greedy(directory)[number][:10] for number in (2, 3)]
    for request in both:
        engine.release(request)


def test_decodes_beside_chunks_get_their_tokens(directory: Path) -> None:
    """In any order: those that decode are computed first."""
    engine = make_direct(directory)
    early, late = adopt(engine, directory, 2, num_output=1), adopt(engine, directory, 6, num_output=1)
    engine.execute([(early, early.num_pending)])
    while late.num_pending > 1:
        engine.execute([(late, min(late.num_pending, 9)), (early, 1)])
    for request, number in ((early, 2), (late, 6)):
        assert request.output == greedy(directory)[number][: len(request.output)]
        engine.release(request)
    assert len(late.output) == 2 and len(early.output) > 7


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_reversed_requests_get_their_tokens_beside_others(
    directory: Path, backend: str, block_size: int
) -> None:
    """Chunks, decodes, and rows that others had before."""
    engine = make_direct(directory, has_reversed=True, attention_backend=backend, block_size=block_size)
    for first_reversed in (0, 1):
        requests = []
        for number in (2, 3, 6):
            held = Held(layout=REVERSED if number % 2 == first_reversed else PLAIN)
            new = NewRequest(RequestId(f"r{number}"), prompts()[number], greedy_params(), 0, held=held)
            requests.append(engine.begin(new))
        while any(len(request.output) < 12 for request in requests):
            engine.execute([(request, min(request.num_pending, 9)) for request in requests])
        for request, number in zip(requests, (2, 3, 6), strict=True):
            assert request.output == greedy(directory)[number][: len(request.output)]
            engine.release(request)


def test_an_engine_that_was_not_built_for_it_takes_no_reversed_request(directory: Path) -> None:
    engine = make_direct(directory)
    with pytest.raises(RuntimeError, match="has_reversed"):
        engine.adopt(NewRequest(RequestId("r"), prompts()[2], greedy_params(), 0, held=Held(layout=REVERSED)))
