from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from alignedserve.ops.cuda_shapes import MAX_CHUNKS, chunk_shapes, decode_shapes
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import Ladder, StepShape

MIXED = StepShape(64, 8, 8, num_chunks=4, max_chunk_len=64, max_context_len=100, num_context_tokens=200)
LADDER = Ladder(
    [StepShape(4, 4, 4), StepShape(8, 8, 8), MIXED, replace(MIXED, num_tokens=16, max_chunk_len=16)]
)


@pytest.mark.parametrize(("num", "filled_up_to"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_decodes_take_the_next_size(num: int, filled_up_to: int) -> None:
    shape = LADDER.rung(StepShape(num, num, num))
    assert shape == StepShape(filled_up_to, filled_up_to, filled_up_to)


def test_steps_with_chunks_take_the_next_size() -> None:
    own = StepShape(20, 3, 2, num_chunks=2, max_chunk_len=15, max_context_len=100, num_context_tokens=120)
    assert LADDER.rung(own) == MIXED
    assert LADDER.rung(replace(own, num_tokens=16)).num_tokens == 16
    assert LADDER.rung(replace(own, num_tokens=65)).num_tokens == 65


def test_decodes_of_which_some_want_no_output_are_no_decodes() -> None:
    assert LADDER.rung(StepShape(3, 2, 3)) == replace(MIXED, num_tokens=16, max_chunk_len=16)


@pytest.mark.parametrize(
    "too_much",
    [
        {"num_outputs": 9},
        {"num_decodes": 7},
        {"num_chunks": 5},
        {"max_context_len": 101},
        {"num_context_tokens": 201},
    ],
    ids=str,
)
def test_a_step_that_does_not_fit_stays_as_it_is(too_much: dict[str, int]) -> None:
    own = StepShape(20, 3, 2, num_chunks=2, max_chunk_len=15, max_context_len=100, num_context_tokens=120)
    own = replace(own, **too_much)
    assert LADDER.rung(own) == own


def test_what_there_are_graphs_for() -> None:
    step = StepInputs(max_tokens=600, max_seqs=8, max_blocks_per_seq=4)
    cache = torch.empty(1, 1, 2, 40, 16, 128, dtype=torch.bfloat16, device="meta")
    assert decode_shapes([1, 8, 16], step) == [StepShape(1, 1, 1), StepShape(8, 8, 8)]
    shapes = chunk_shapes(step, cache)
    assert [shape.num_tokens for shape in shapes][-3:] == [512, 576, 600]
    assert {shape.num_chunks for shape in shapes} == {min(MAX_CHUNKS, 8)}
    # four blocks of 16
    assert {shape.max_context_len for shape in shapes} == {64}
    assert {shape.num_context_tokens * 2 * 40 * 128 * 2 // 2**20 for shape in shapes} == {127}
    assert not any(shape.is_decode for shape in shapes)


def test_even_the_smallest_instance_has_no_shape_twice() -> None:
    step = StepInputs(max_tokens=8, max_seqs=8, max_blocks_per_seq=4)
    cache = torch.empty(1, 1, 2, 1, 16, 64, dtype=torch.bfloat16, device="meta")
    shapes = chunk_shapes(step, cache)
    assert [shape.num_tokens for shape in shapes] == [8] and not shapes[0].is_decode
