"""Layers in groups on a GPU, or in Triton's interpreter: to the last bit what the same kernels compute with blocks of
all layers, and nearly what plain torch does."""

from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.kv_rows import INT8
from alignedserve.kv.groups import LayerGroups
from alignedserve.ops import cuda_attention
from alignedserve.ops.cuda_ops import CudaOps
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.grouped_model import GroupedModel, grouped_and_whole
from tests.kernels.tiny_model import Shape
from tests.ops.test_cuda_attention import flash_attention
from tests.ops.test_step_groups import be_as_on_a_gpu

SHAPE = Shape(num_layers=3, windows=(8, None, 8), hidden=32, intermediate=32)
LENGTH = 80
IDS = torch.randint(0, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
# Decodes come first.
STEPS: list[list[tuple[int, int, int]]] = [
    [(1, 0, 5), (0, 0, 72)],
    [(0, 72, 73), (1, 5, 6)],
    [(0, 73, 74), (1, 6, 10)],
    [(1, 10, 13), (0, 74, 78)],
]


# One of them each time. Single kernels with groups: tests/kernels/triton.
@pytest.mark.slow
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize(
    ("kernel", "block_size", "is_flash", "kv_dtype"),
    [
        ("balanced", 8, True, None),
        ("plain", 16, False, INT8),
        ("balanced", 32, False, None),
        ("plain", 8, True, INT8),
    ],
)
def test_triton_computes_the_same_with_groups(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    block_size: int,
    is_flash: bool,
    kv_dtype: torch.dtype | None,
) -> None:
    """Rows of the block table are as wide as each step needs, and steps are filled up."""
    monkeypatch.setattr(cuda_attention, "has_flash_attention", lambda device, dtype: is_flash)
    monkeypatch.setattr(cuda_attention, "flash_attention", flash_attention)

    def model(groups: LayerGroups, is_plain: bool = False) -> GroupedModel:
        ops = TorchOps(torch.float32) if is_plain else CudaOps(torch.float32, "cpu", kernel, graph_sizes=(4,))
        return GroupedModel(ops, SHAPE, block_size, 2, LENGTH, groups, kv_dtype)

    groups, whole = grouped_and_whole(SHAPE)
    grouped, expected, plain = model(groups), model(whole), model(whole, is_plain=True)
    be_as_on_a_gpu(grouped.step)
    for spans in STEPS:
        grouped.step.host_block_table(2, grouped.span.num_columns(max(end for _, _, end in spans)))
        outputs = [end - start for _, start, end in spans]
        found = grouped.run(spans, IDS, outputs)
        assert torch.equal(found, expected.run(spans, IDS, outputs))
        # Values that are rounded to one of 256 codes may differ by one.
        tolerance = 1e-4 if kv_dtype is None else 2e-2
        torch.testing.assert_close(found, plain.run(spans, IDS, outputs), rtol=1e-4, atol=tolerance)
    assert grouped.num_freed > 0
