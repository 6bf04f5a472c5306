"""Layers with blocks by groups compute exactly the same as with blocks of all layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from alignedserve.kernels.kv_rows import FP8, INT8
from alignedserve.kv.groups import LayerGroups, layer_groups
from alignedserve.ops.base import Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.grouped_model import GroupedModel, grouped_and_whole
from tests.kernels.harness import DTYPES, assert_close
from tests.kernels.tiny_model import LlamaLike, Shape, fill_step, new_cache

LENGTH = 230
IDS = torch.randint(0, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
SHAPES = {
    "one full layer": Shape(num_layers=4, windows=(8, None, 8, 8)),
    "unused room": Shape(num_layers=5, windows=(64, None, None, 65, 65), num_heads=6, head_dim=24),
    "windows of a tile": Shape(num_layers=3, windows=(64, None, 64), num_heads=3, num_kv_heads=1),
    "one token": Shape(num_layers=2, windows=(1, None), head_dim=32),
}


def test_what_the_groups_are() -> None:
    num_groups = {name: grouped_and_whole(shape)[0].num_groups for name, shape in SHAPES.items()}
    assert num_groups == {"one full layer": 4, "unused room": 5, "windows of a tile": 3, "one token": 2}
    assert layer_groups((8, None, None, 8, 8, 8), 6).num_groups == 3


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
    # A smaller case of a failure is not looked for: each one makes models, and keeps them.
    phases=[Phase.generate],
)
@given(data=st.data())
def test_chunks_and_decodes_are_the_same_bits(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, data: st.DataObject
) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32]), "block size")
    threads, seed = data.draw(st.integers(1, 3), "threads"), data.draw(st.integers(0, 99), "seed")
    cuts = data.draw(st.lists(cut_spans(), min_size=1, max_size=3), "spans")
    grouped, whole = (
        GroupedModel(
            CpuOps(dtype, threads), SHAPES[name], block_size, len(cuts), LENGTH, groups, kv_dtype, seed
        )
        for groups in grouped_and_whole(SHAPES[name])
    )
    while any(cuts):
        ready = [seq for seq, left in enumerate(cuts) if left]
        spans = [(seq, *cuts[seq].pop(0)) for seq in data.draw(st.permutations(ready))]
        outputs = [data.draw(st.sampled_from([0, 1, end - start])) for _, start, end in spans]
        found, expected = (model.run(spans, IDS, outputs) for model in (grouped, whole))
        assert not expected.isnan().any()
        assert torch.equal(found, expected)
    assert grouped.num_freed > 0 == whole.num_freed


@st.composite
def cut_spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Chunks, and runs of decodes between them, of a sequence that passes its windows."""
    ends, start = [], 0
    while start < 200:
        count = draw(st.sampled_from([1, 1, 7, 16, 50, 100]))
        for _ in range(6 if count == 1 else 1):
            start = min(start + count, LENGTH)
            ends.append(start)
    # The last tokens pass what the longest chunk has left behind.
    ends = sorted({*ends, LENGTH - 1, LENGTH})
    return list(zip([0, *ends], ends, strict=False))


STEPS: list[list[tuple[int, int, int]]] = [
    [(1, 0, 5), (0, 0, 90)],
    [(0, 90, 91), (1, 5, 40)],
    [(1, 40, 41), (0, 91, 92)],
    [(0, 92, 93), (1, 41, 150)],
    [(1, 150, 151), (0, 93, 100)],
]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_plain_torch_agrees(name: str, block_size: int) -> None:
    groups, whole = grouped_and_whole(SHAPES[name])
    native, plain = (
        GroupedModel(ops, SHAPES[name], block_size, 2, 160, groups)
        for ops in (CpuOps(torch.float32), TorchOps(torch.float32))
    )
    expected = GroupedModel(TorchOps(torch.float32), SHAPES[name], block_size, 2, 160, whole)
    for spans in STEPS:
        outputs = [end - start for _, start, end in spans]
        of_whole = expected.run(spans, IDS, outputs)
        assert torch.equal(plain.run(spans, IDS, outputs), of_whole)
        assert_close(native.run(spans, IDS, outputs), of_whole)
    assert plain.num_freed == native.num_freed > 0


@pytest.mark.parametrize("backend", [CpuOps, TorchOps])
def test_what_does_not_fit_the_groups_is_refused(backend: Callable[..., Ops]) -> None:
    shape = SHAPES["one full layer"]
    groups, ops = layer_groups(shape.windows, 4), backend(torch.float32)
    cache = new_cache(Shape(num_layers=1), 4, 16, torch.float32)
    with pytest.raises(ValueError, match="cache must have the 1 layers of a group, not 2"):
        ops.bind_cache(new_cache(Shape(num_layers=2), 4, 16, torch.float32), groups=groups)
    with pytest.raises(ValueError, match="inputs can be kept where layers are one group, not 4"):
        StepInputs(8, 1, 4, num_groups=4).keep_inputs(cache)
    with pytest.raises(ValueError, match="StepInputs must have 4 groups of layers, not 1"):
        compute(LlamaLike(ops, shape), StepInputs(8, 1, 4), cache, groups)
    with pytest.raises(ValueError, match="layer must be below the cache's 4, not 4"):
        longer = Shape(num_layers=5, sliding_window=8)
        compute(LlamaLike(ops, longer), StepInputs(8, 1, 4, num_groups=4), cache, groups)


def compute(model: LlamaLike, step: StepInputs, cache: torch.Tensor, groups: LayerGroups) -> None:
    compiled = model.compile(step, cache, groups=groups)
    fill_step(step, [], 16)
    compiled.forward()
