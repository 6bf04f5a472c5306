"""Weights in the types of GGUF files: values are those of the `gguf` package, the native kernel does what the reference
says, and a table is read as it is multiplied."""

from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.cpu.weights import PackedWeight
from alignedserve.kernels.gguf import TYPES, GgufWeight, linear_gguf
from alignedserve.kernels.quantised import linear_quantised
from alignedserve.ops.base import Activation, Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.quantise import Part
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_ops import TorchOps, activate
from tests.kernels.gguf_weights import gguf_weight
from tests.kernels.harness import TOLERANCE, evaluate, randn
from tests.kernels.test_groups import assert_same

ROWS = [0, 1, 2, 5, 6, 7, 13, 250]
# As far as rows are quantised.
CODED = [name for name in TYPES if name != "MXFP4"]


def linear(parts: list[Part], x: torch.Tensor, activation: Activation = Activation.NONE) -> torch.Tensor:
    ops = CpuOps(torch.bfloat16)
    biases = [randn(part.shape[0], seed=9 + i, dtype=torch.bfloat16) for i, part in enumerate(parts)]
    weight = ops.linear_weight(parts, biases, activation)
    return evaluate(ops, x, lambda v: ops.linear(v, weight))


def expected(parts: list[Part], x: torch.Tensor) -> torch.Tensor:
    """In float32."""
    found = []
    for i, part in enumerate(parts):
        bias = randn(part.shape[0], seed=9 + i, dtype=torch.bfloat16)
        if isinstance(part, torch.Tensor):
            found.append(x @ part.float().T + bias)
        elif isinstance(part, GgufWeight) and part.is_mxfp4:
            found.append(linear_quantised(x, part.as_mxfp4(), bias))
        else:
            assert isinstance(part, GgufWeight)
            found.append(linear_gguf(x, part, bias))
    return torch.cat(found, 1)


def sizes_of(name: str) -> list[tuple[int, list[int]]]:
    """Inputs and outputs of parts: whole pieces, a shorter piece at the end, one block."""
    if TYPES[name].values == 256:
        return [(512, [64, 40]), (256, [31, 7, 7]), (1024, [5])]
    return [(512, [64, 40]), (320, [31, 7, 7]), (32, [5])]


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_the_package(name: str) -> None:
    """To the last bit, for any bytes."""
    gguf = pytest.importorskip("gguf")
    data = torch.randint(
        0, 256, (37, 4 * TYPES[name].num_bytes), generator=torch.Generator().manual_seed(0)
    ).byte()
    if name == "MXFP4":
        # The package gives infinity, which is none of the format's numbers, a value.
        data[:, :: TYPES[name].num_bytes].clamp_(max=250)
    with pytest.warns(RuntimeWarning) if name != "MXFP4" else torch.no_grad():
        wanted = torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[name]))
    found = GgufWeight(name, data).dequantised()
    assert found.shape == wanted.shape == GgufWeight(name, data).shape
    same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found == wanted)
    assert (same | found.isnan() & wanted.isnan()).all()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_the_references(name: str, rows: int) -> None:
    """To the last bit."""
    for num_in, widths in sizes_of(name):
        x = randn(rows, num_in, seed=3)
        x = (x * torch.logspace(-4, 4, max(rows, 1))[:rows].unsqueeze(1)).bfloat16().float()
        x[rows // 2 :, 32:64] *= 100
        parts: list[Part] = [gguf_weight(name, width, num_in, seed=i) for i, width in enumerate(widths)]
        x = x.bfloat16().float()
        assert_same(linear(parts, x), expected(parts, x).bfloat16())


@pytest.mark.parametrize("name", TYPES)
def test_what_the_codes_stand_for_is_multiplied(name: str) -> None:
    """Rows are exact in eight bits here, so that nothing is lost but float32's last bits."""
    weight = gguf_weight(name, 40, 512)
    x = torch.randint(-127, 128, (5, 512), generator=torch.Generator().manual_seed(1)).float()
    x[:, ::32] = 127
    wanted = x.double() @ weight.dequantised().double().T
    ops = CpuOps(torch.bfloat16)
    head = ops.linear_weight([weight], is_head=True)
    table, step = ops.parameter(x), StepInputs(5, 1, 1)
    model = ops.compile(lambda step: ops.embed(table, step.token_ids), lambda v: ops.linear(v, head), step, 5)
    step.token_ids[:5] = torch.arange(5)
    step.commit(5, 0, 0)
    model.forward()
    found = model.logits(torch.arange(5, dtype=torch.int32))
    assert (found.double() - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("name", TYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    x = randn(300, 256, dtype=torch.bfloat16)
    ops = CpuOps(torch.bfloat16)
    weight = ops.linear_weight([gguf_weight(name, 200, 256)])
    whole = evaluate(ops, x, lambda v: ops.linear(v, weight))
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 100):
        start = 7 * rows % 200
        part = evaluate(ops, x[start : start + rows], lambda v: ops.linear(v, weight))
        assert torch.equal(part, whole[start : start + rows]), rows


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("activation", [each for each in Activation if each is not Activation.NONE])
def test_activations(name: str, activation: Activation) -> None:
    parts: list[Part] = [
        gguf_weight(name, 41, 256, seed=i, size=0.01) for i in range(2 if activation.is_gated else 1)
    ]
    x = randn(9, 256, seed=3, dtype=torch.bfloat16) * 0.0625
    wanted = activate(expected(parts, x), activation)
    assert (linear(parts, x, activation) - wanted).abs().max() <= 1e-2 * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("widths", [(64, 32, 40), (40, 5, 7)], ids=["whole tiles", "parts of tiles"])
@pytest.mark.parametrize(
    "names",
    [
        ("Q5_0", "Q5_0", "Q8_0"),
        ("Q4_K", "Q6_K", "Q6_K"),
        ("Q4_0", "floats", "IQ4_NL"),
        ("MXFP4", "Q8_0", "floats"),
    ],
    ids=" ".join,
)
def test_parts_of_a_layer_may_differ(names: tuple[str, ...], widths: tuple[int, ...], rows: int) -> None:
    parts: list[Part] = [
        randn(width, 256, seed=i, dtype=torch.bfloat16)
        if name == "floats"
        else gguf_weight(name, width, 256, i, 0.01)
        for i, (name, width) in enumerate(zip(names, widths, strict=True))
    ]
    x = randn(rows, 256, seed=3, dtype=torch.bfloat16)
    wanted = expected(parts, x)
    assert (linear(parts, x).float() - wanted).abs().max() <= TOLERANCE[torch.bfloat16] * wanted.abs().max()


@pytest.mark.parametrize("first", [0, 32, 64, 96])
def test_the_last_outputs_of_such_a_layer_are_a_layer(first: int) -> None:
    """As KV is restored from kept inputs."""
    ops, x = CpuOps(torch.bfloat16), randn(7, 256, seed=3, dtype=torch.bfloat16)
    names = ("Q4_K", "Q4_K", "Q6_K")
    weight = ops.linear_weight(
        [
            gguf_weight(name, width, 256, i)
            for i, (name, width) in enumerate(zip(names, (64, 32, 40), strict=True))
        ]
    )
    whole = evaluate(ops, x, lambda v: ops.linear(v, weight))
    assert torch.equal(
        evaluate(ops, x, lambda v: ops.linear(v, weight.outputs_from(first))), whole[:, first:]
    )


def test_gate_and_up_may_differ() -> None:
    """Both are then floats."""
    parts: list[Part] = [gguf_weight("Q4_K", 40, 256, 1, 0.01), gguf_weight("Q6_K", 40, 256, 2, 0.01)]
    x = randn(7, 256, seed=3, dtype=torch.bfloat16) * 0.0625
    floats: list[Part] = [part.dequantised(torch.bfloat16) for part in parts if isinstance(part, GgufWeight)]
    wanted = activate(expected(floats, x), Activation.SILU_GATED)
    found = linear(parts, x, Activation.SILU_GATED).float()
    assert (found - wanted).abs().max() <= TOLERANCE[torch.bfloat16] * wanted.abs().max()


@pytest.mark.parametrize("name", TYPES)
def test_with_float32_rows_values_are_floats(name: str) -> None:
    """Rows are not quantised."""
    weight, x = gguf_weight(name, 40, 256), randn(7, 256)
    ops = CpuOps(torch.float32)
    packed = ops.linear_weight([weight])
    assert packed.gguf is None
    wanted = x @ weight.dequantised().T
    found = evaluate(ops, x, lambda v: ops.linear(v, packed))
    assert (found - wanted).abs().max() <= TOLERANCE[torch.float32] * wanted.abs().max()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_is_read_as_it_is_multiplied(name: str, dtype: torch.dtype) -> None:
    """And is in memory once."""
    weight = gguf_weight(name, 70, 512)
    for ops in (CpuOps(dtype), TorchOps(dtype)):
        table = ops.linear_weight([weight], is_head=True)
        step = StepInputs(9, 1, 1)
        model = ops.compile(
            lambda step, ops=ops, table=table: ops.embed(table, step.token_ids, scale=2.0),  # type: ignore[misc]
            lambda v, ops=ops, table=table: ops.linear(v, table),  # type: ignore[misc]
            step,
            1,
        )
        ids = torch.tensor([0, 69, 1, 31, 32, 33, 5, 64, 2])
        step.token_ids[:9] = ids
        step.commit(9, 0, 0)
        assert torch.equal(model.forward(), (weight.dequantised(dtype)[ids].float() * 2).to(dtype))


@pytest.mark.parametrize("name", TYPES)
def test_parts_of_outputs_and_inputs_are_those_of_the_values(name: str) -> None:
    weight = gguf_weight(name, 48, 512)
    values = weight.dequantised()
    assert torch.equal(weight.rows(5, 30, 2).dequantised(), values[5:30:2])
    assert torch.equal(weight.columns(256, 512).dequantised(), values[:, 256:])
    with pytest.raises(ValueError, match=f"inputs 0 to 100: must be whole blocks of {TYPES[name].values}"):
        weight.columns(0, 100)


@pytest.mark.parametrize("name", TYPES)
def test_weights_take_the_bytes_of_the_file(name: str) -> None:
    weight = gguf_weight(name, 64, 512)
    packed: PackedWeight = CpuOps(torch.bfloat16).linear_weight([weight])
    assert packed.tiles.numel() == weight.num_bytes
    assert weight.num_bytes <= weight.data.numel() * (1.06 if name == "MXFP4" else 1.04)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("ops", [CpuOps(torch.bfloat16), CpuOps(torch.float32), TorchOps(torch.float32)])
def test_scales_are_numbers(name: str, ops: Ops) -> None:
    weight = gguf_weight(name, 40, 256)
    weight.data[:] = 255
    with pytest.raises(ValueError, match="not finite"):
        ops.linear_weight([weight])
