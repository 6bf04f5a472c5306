"""What is captured, in which order, and what comes of it when that fails. Capturing itself needs a GPU: see
benchmarks/gpu/correct.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alignedserve.ops.cuda_model import CudaModel
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import StepShape

DECODES = [StepShape(size, size, size) for size in (1, 8)]
CHUNKS = [
    StepShape(size, 8, 8, num_chunks=8, max_chunk_len=size, max_context_len=90, num_context_tokens=90)
    for size in (16, 32)
]


class Listing(CudaModel):
    """Notes what it would capture, and can't do what is refused."""

    def __init__(self, step: StepInputs, refused: list[StepShape]) -> None:
        super().__init__(lambda: torch.zeros(0), lambda x: x, lambda x: (x, x), step, 8, lambda x: x)
        self.captured: list[StepShape] = []
        self._refused = refused

    def _captured_step(self, shape: StepShape) -> Any:
        if shape in self._refused:
            raise RuntimeError("operation not permitted")
        self.captured.append(shape)


@pytest.fixture
def step() -> StepInputs:
    return StepInputs(max_tokens=32, max_seqs=8, max_blocks_per_seq=4)


def test_decodes_come_first_and_of_each_kind_the_largest(step: StepInputs) -> None:
    model = Listing(step, [])
    model.capture([*CHUNKS, *DECODES], use_tqdm=False)
    assert model.captured == [*DECODES[::-1], *CHUNKS[::-1]]
    assert step.ladder.rung(StepShape(3, 3, 3)) == DECODES[1]
    assert step.ladder.rung(StepShape(20, 1, 0, 1, 20, 20, 20)) == CHUNKS[1]


def test_without_graphs_of_chunks_the_others_are_used(
    step: StepInputs, caplog: pytest.LogCaptureFixture
) -> None:
    Listing(step, CHUNKS).capture([*CHUNKS, *DECODES], use_tqdm=False)
    assert "kernel by kernel: operation not permitted" in caplog.text
    assert step.ladder.rung(StepShape(3, 3, 3)) == DECODES[1]
    own = StepShape(20, 1, 0, 1, 20, 20, 20)
    assert step.ladder.rung(own) == own


def test_without_graphs_of_decodes_there_is_no_engine(step: StepInputs) -> None:
    with pytest.raises(RuntimeError, match="not permitted"):
        Listing(step, DECODES).capture([*CHUNKS, *DECODES], use_tqdm=False)
