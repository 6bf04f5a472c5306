"""A whole model with weights in the types of GGUF files: the native backend yields what the torch backend does, and a
token's result does not depend on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from alignedserve.kernels.gguf import TYPES
from alignedserve.ops.base import Linear
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.experts import Expert, ExpertsSpec, TakeExpert
from alignedserve.ops.quantise import Part
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.gguf_weights import gguf_weight
from tests.kernels.test_invariance import LENGTH, Engine
from tests.kernels.tiny_model import Shape

DENSE = Shape(hidden=256, intermediate=256, num_heads=8, num_kv_heads=2, head_dim=32)
SHAPES = {
    "dense": DENSE,
    "experts": replace(DENSE, num_experts=5, top_k=2),
    "adapters": replace(DENSE, num_adapters=2),
}
# The second and third are what files named Q4_K_M have.
MIXTURES = [("Q5_0", "Q5_0", "Q8_0"), ("Q4_K", "Q4_K", "Q6_K"), ("IQ4_XS", "floats", "MXFP4")]


class Coded:
    """Weights of layers are random ones, of one type after the other. The same calls yield the same weights."""

    types: Sequence[str] = ()
    num_made = 0

    def coded(self, part: Part, kind: int) -> Part:
        name = self.types[kind % len(self.types)]
        if not isinstance(part, torch.Tensor) or name == "floats":
            return part
        self.num_made += 1
        num_out, num_in = part.shape
        size = num_in**-0.5 / gguf_weight(name, 16, 256).dequantised().std().item()
        return gguf_weight(name, num_out, num_in, self.num_made, size)

    def linear_weight(self, parts: Sequence[Part], *args: Any, **kwargs: Any) -> Linear:
        coded = [self.coded(part, 0 if len(parts) == 2 else i) for i, part in enumerate(parts)]
        return super().linear_weight(coded, *args, **kwargs)  # type: ignore[misc]

    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> Any:
        def coded(number: int) -> Expert:
            given = take(number)
            return Expert(self.coded(given.gate, 0), self.coded(given.up, 0), self.coded(given.down, 2))

        return super().expert_weights(spec, coded)  # type: ignore[misc]


class CodedCpu(Coded, CpuOps): ...


class CodedTorch(Coded, TorchOps): ...


def run_of(ops: CodedCpu | CodedTorch, types: Sequence[str], name: str, cut: int = LENGTH) -> torch.Tensor:
    """Logits of all tokens, which are computed so many at a time."""
    ops.types = types
    engine = Engine(SHAPES[name], ops.dtype, 16, 2, ops=ops)
    starts = range(0, LENGTH, cut)
    return torch.cat([engine.run([(1, start, min(LENGTH, start + cut))])[1] for start in starts])


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("types", [*((each,) for each in TYPES), *MIXTURES], ids=" ".join)
def test_a_model_yields_what_its_values_yield(types: Sequence[str], name: str) -> None:
    found = run_of(CodedCpu(torch.bfloat16, 2), types, name)
    wanted = run_of(CodedTorch(torch.float32), types, name)
    # Where a row nearly chose another expert, the difference is large.
    assert ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median() <= 0.05
    for cut in (1, 7):
        assert torch.equal(run_of(CodedCpu(torch.bfloat16, 2), types, name, cut), found)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("types", [*((each,) for each in ("Q4_1", "Q6_K", "MXFP4")), *MIXTURES], ids=" ".join)
def test_in_float32_a_model_yields_its_values(types: Sequence[str], name: str) -> None:
    found = run_of(CodedCpu(torch.float32, 2), types, name)
    wanted = run_of(CodedTorch(torch.float32), types, name)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()
