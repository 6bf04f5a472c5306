"""Mixtures of experts in the native program, beside plain torch in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from alignedserve.kernels.quantised import INT4, INT8, MXFP4, QuantisedWeight, quantise_int8
from alignedserve.ops.base import Activation, Linear, Ops, Value
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.experts import ClampedSwiglu, Expert, ExpertsSpec, choose_experts, gated
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.harness import DTYPES, assert_close, evaluate, randn
from tests.kernels.test_groups import weight_of

SPECS = {
    "two of eight": ExpertsSpec(8, 2, 48, 40, normalises=True),
    "odd sizes": ExpertsSpec(5, 3, 33, 17, normalises=False),
    "all": ExpertsSpec(3, 3, 16, 70, normalises=False),
    "one": ExpertsSpec(20, 1, 64, 32, normalises=True),
    "clamped": ExpertsSpec(6, 2, 64, 40, normalises=True, swiglu=ClampedSwiglu(1.7, 0.6)),
}


def expert(spec: ExpertsSpec, number: int) -> Expert:
    inner, hidden = spec.intermediate_size, spec.hidden_size

    def random(part: int, *size: int) -> torch.Tensor:
        return randn(*size, seed=3 * number + part, dtype=torch.bfloat16) / 8

    weights = random(0, inner, hidden), random(1, inner, hidden), random(2, hidden, inner)
    if spec.swiglu is None:
        return Expert(*weights)
    return Expert(
        *weights, *(random(3 + part, width) * 8 for part, width in enumerate((inner, inner, hidden)))
    )


def logits_of(spec: ExpertsSpec, rows: int) -> torch.Tensor:
    return randn(rows, spec.num_experts, seed=77, dtype=torch.bfloat16)


def mixed(
    ops: Ops,
    spec: ExpertsSpec,
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: Sequence[Expert] | None = None,
) -> torch.Tensor:
    """The mixture of x [rows, hidden], with x as residual. Rows come in as embeddings of their own numbers."""
    rows = len(x)
    step = StepInputs(max_tokens=max(rows, 1), max_seqs=1, max_blocks_per_seq=1)
    step.token_ids[:rows] = torch.arange(rows)
    step.commit(rows, 0, 0)
    tables = [ops.parameter(each if rows else torch.zeros(1, each.shape[1])) for each in (x, logits)]
    experts = ops.expert_weights(spec, lambda number: weights[number] if weights else expert(spec, number))
    identity = ops.linear_weight([torch.eye(spec.hidden_size)])

    def forward(step: StepInputs) -> object:
        values, chosen_by = (ops.embed(table, step.token_ids) for table in tables)
        return ops.mix_experts(values, chosen_by, experts, ops.embed(tables[0], step.token_ids))

    model = ops.compile(forward, lambda hidden: ops.linear(hidden, identity), step, max_rows=1)
    return model.forward().clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 30, 300])
@pytest.mark.parametrize("name", SPECS)
def test_odd_sizes_and_numbers_of_rows(name: str, rows: int, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    x, logits = randn(rows, spec.hidden_size, dtype=torch.bfloat16), logits_of(spec, rows)
    assert_close(
        mixed(CpuOps(dtype), spec, x, logits),
        mixed(TorchOps(torch.float32), spec, x, logits).to(dtype).float(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_that_share_its_experts(dtype: torch.dtype) -> None:
    spec = SPECS["two of eight"]
    x, logits = randn(400, spec.hidden_size, dtype=torch.bfloat16), logits_of(spec, 400)
    whole = mixed(CpuOps(dtype), spec, x, logits)
    for rows in (1, 2, 3, 7, 40, 100):
        some = slice(5 * rows % 300, 5 * rows % 300 + rows)
        assert torch.equal(mixed(CpuOps(dtype, num_threads=3), spec, x[some], logits[some]), whole[some]), (
            rows
        )


def test_all_rows_through_the_same_experts() -> None:
    spec = SPECS["two of eight"]
    x, logits = randn(250, spec.hidden_size), torch.arange(8.0).expand(250, 8)
    assert_close(
        mixed(CpuOps(torch.float32), spec, x, logits), mixed(TorchOps(torch.float32), spec, x, logits)
    )


def test_the_clamped_swiglu_is_what_it_says() -> None:
    spec = ExpertsSpec(1, 1, 1, 1, normalises=True, swiglu=ClampedSwiglu(alpha=1.5, limit=2.0))
    for gate, up, made in (
        (1.0, 0.5, 1.5 / (1 + math.exp(-1.5))),
        (9.0, 9.0, 3 * 2 / (1 + math.exp(-3))),
        (-9.0, -9.0, -(-9 / (1 + math.exp(13.5)))),
    ):
        assert gated(torch.tensor([[gate, up]]), spec).item() == pytest.approx(made, rel=1e-5)


def mxfp4_weights(number: int) -> tuple[QuantisedWeight, QuantisedWeight, QuantisedWeight]:
    gate, up, down = (
        weight_of(MXFP4, *shape, 32, False, False, seed=3 * number + part)
        for part, shape in enumerate(((32, 64), (32, 64), (64, 32)))
    )
    return gate, up, down


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_experts_in_mxfp4_are_what_their_codes_stand_for(rows: int, dtype: torch.dtype) -> None:
    spec = replace(SPECS["clamped"], intermediate_size=32)
    coded = [
        Expert(
            *mxfp4_weights(number),
            *(randn(width, seed=number, dtype=torch.bfloat16) for width in (32, 32, 64)),
        )
        for number in range(spec.num_experts)
    ]
    plain = [
        replace(each, gate=each.gate.dequantised(), up=each.up.dequantised(), down=each.down.dequantised())  # type: ignore[union-attr]
        for each in coded
    ]
    x, logits = randn(rows, 64, dtype=torch.bfloat16) / 16, logits_of(spec, rows)
    expected = mixed(TorchOps(torch.float32), spec, x, logits, plain)
    assert_close(mixed(CpuOps(dtype), spec, x, logits, coded), expected.to(dtype).float())
    assert_close(mixed(TorchOps(torch.float32), spec, x, logits, coded), expected)


@pytest.mark.parametrize("backend", [CpuOps, TorchOps])
def test_a_row_that_is_not_finite_stays_so(backend: Callable[..., Ops]) -> None:
    spec = SPECS["clamped"]
    x, logits = randn(4, spec.hidden_size), logits_of(spec, 4)
    x[2] = torch.nan
    result = mixed(backend(torch.float32), spec, x, logits)
    assert result[2].isnan().all() and result[[0, 1, 3]].isfinite().all()


def test_one_rank_of_several_has_the_bias_of_the_sum() -> None:
    spec = SPECS["clamped"]
    x, logits = randn(5, spec.hidden_size), logits_of(spec, 5)
    whole = mixed(CpuOps(torch.float32), spec, x, logits)
    halves = []
    for first, end in ((0, 16), (16, 40)):
        part = replace(spec, intermediate_size=end - first)
        experts = [expert(spec, number) for number in range(spec.num_experts)]
        halves.append(
            mixed(
                CpuOps(torch.float32),
                part,
                x,
                logits,
                [
                    Expert(
                        each.gate[first:end],  # type: ignore[index]
                        each.up[first:end],  # type: ignore[index]
                        each.down[:, first:end],  # type: ignore[index]
                        each.gate_bias[first:end],  # type: ignore[index]
                        each.up_bias[first:end],  # type: ignore[index]
                        None if first else each.down_bias,
                    )
                    for each in experts
                ],
            )
        )
    assert_close(halves[0] + halves[1] - x, whole)


def test_equal_logits_choose_the_first_experts() -> None:
    spec = SPECS["two of eight"]
    chosen, weights = choose_experts(torch.zeros(2, 8), spec)
    assert chosen.tolist() == [[0, 1], [0, 1]] and weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    x = randn(9, spec.hidden_size)
    assert_close(
        mixed(CpuOps(torch.float32), spec, x, torch.zeros(9, 8)),
        mixed(TorchOps(torch.float32), spec, x, torch.zeros(9, 8)),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_breaks_no_other(value: float) -> None:
    spec = SPECS["odd sizes"]
    x, logits = randn(6, spec.hidden_size), logits_of(spec, 6)
    whole = mixed(CpuOps(torch.float32), spec, x, logits)
    broken = logits.clone()
    broken[2] = value
    result = mixed(CpuOps(torch.float32), spec, x, broken)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(result[others], whole[others])
    assert not result[2].isfinite().all()


@pytest.mark.parametrize("rows", [1, 4, 13, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [INT8, INT4])
def test_an_experts_rows_are_what_such_a_linear_layer_makes_of_them(
    scheme: str, dtype: torch.dtype, rows: int
) -> None:
    """To the last bit, and those do what the reference says: see test_quantised.py."""
    spec = ExpertsSpec(5, 1, 70, 33, normalises=True)
    x, logits = randn(rows, 70, dtype=torch.bfloat16), logits_of(spec, rows)
    ops = CpuOps(dtype, quantization=scheme)
    result = mixed(ops, spec, x, logits)
    for number in range(5):
        weights = expert(spec, number)
        gate_up = ops.linear_weight([weights.gate, weights.up], activation=Activation.SILU_GATED)
        down = ops.linear_weight([weights.down])

        def dense(value: Value, gate_up: Linear = gate_up, down: Linear = down) -> Value:
            return ops.linear(ops.linear(value, gate_up), down, residual=value)

        chosen = logits.argmax(dim=1) == number
        assert torch.equal(result[chosen], evaluate(ops, x[chosen], dense))


@pytest.mark.parametrize("scheme", [INT8, INT4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_fewer_bits_a_row_does_not_depend_on_the_others(scheme: str, dtype: torch.dtype) -> None:
    spec = SPECS["two of eight"]
    x, logits = randn(200, spec.hidden_size, dtype=torch.bfloat16), logits_of(spec, 200)
    whole = mixed(CpuOps(dtype, quantization=scheme), spec, x, logits)
    for rows in (1, 2, 7, 40):
        some = slice(5 * rows % 150, 5 * rows % 150 + rows)
        part = mixed(CpuOps(dtype, num_threads=3, quantization=scheme), spec, x[some], logits[some])
        assert torch.equal(part, whole[some]), rows


@pytest.mark.parametrize(("scheme", "most"), [(INT8, 0.03), (INT4, 0.2)])
@pytest.mark.parametrize("name", SPECS)
def test_backends_lose_as_little_in_fewer_bits(name: str, scheme: str, most: float) -> None:
    spec = SPECS[name]
    x, logits = randn(40, spec.hidden_size, dtype=torch.bfloat16), logits_of(spec, 40)
    exact = mixed(TorchOps(torch.float32), spec, x, logits) - x
    for ops in (
        CpuOps(torch.float32, quantization=scheme),
        TorchOps(torch.float32, quantization=scheme),
    ):
        error = (mixed(ops, spec, x, logits) - x - exact).norm() / exact.norm()
        assert 1e-4 < error < most


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="top_k must be from 1 to the 4 experts, not 5"):
        ExpertsSpec(4, 5, 8, 8, normalises=True)
    spec = ExpertsSpec(2, 1, 8, 6, normalises=True)
    wrong = Expert(torch.zeros(6, 8), torch.zeros(6, 8), torch.zeros(6, 8))
    for ops in (CpuOps(torch.float32), TorchOps(torch.float32)):
        with pytest.raises(ValueError, match=r"down must have shape \(8, 6\), not \(6, 8\)"):
            ops.expert_weights(spec, lambda number: wrong)
    for bias, message in (
        ({"down_bias": torch.zeros(6)}, r"down_bias must have shape \(8,\), not \(6,\)"),
        ({"up_bias": torch.zeros(6)}, "gate and up must both have a bias, or none"),
    ):
        biased = replace(wrong, down=torch.zeros(8, 6), **bias)
        with pytest.raises(ValueError, match=message):
            CpuOps(torch.float32).expert_weights(spec, lambda number, biased=biased: biased)  # type: ignore[misc]
    plain = Expert(torch.ones(6, 8), torch.ones(6, 8), torch.ones(8, 6))
    mixed_up = [plain, replace(plain, up=quantise_int8(torch.ones(6, 8)))]
    for ops in (CpuOps(torch.float32), TorchOps(torch.float32)):
        with pytest.raises(
            ValueError,
            match=r"up of expert 1 is in int8 \(scales of an output: 1, torch.float32\), that of expert 0 in floats",
        ):
            ops.expert_weights(spec, mixed_up.__getitem__)
    with pytest.raises(ValueError, match="logits must be 8 wide, not 3"):
        mixed(CpuOps(torch.float32), SPECS["two of eight"], torch.zeros(1, 48), torch.zeros(1, 3))
