"""Weights in 8 and 4 bits on the CUDA backend: on a GPU if there is one, else in Triton's interpreter.

Rows are not rounded there, so in float32 all that differs from transformers with what the codes stand for is the order
of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignedserve.ops.base import Activation
from alignedserve.ops.experts import Expert, ExpertsSpec
from alignedserve.ops.quantise import INT4, INT8, QUANTISERS, QuantisedWeight
from tests import quantised_checkpoints, tiny_models
from tests.engine.helpers import greedy_params, run, tokens
from tests.ops.test_triton import DEVICE, chosen, triton_engine
from tests.quantised_checkpoints import FORMATS
from tests.tiny_adapters import merge, write_adapter

pytest.importorskip("triton")

from alignedserve.ops import cuda_linear
from alignedserve.ops.cuda_linear import CudaCodedLinear
from alignedserve.ops.cuda_ops import CudaOps

Directory = Callable[[str], Path]
NUM_NEW = 3
# The number of a prompt that takes two chunks.
LONGER = 4
NUM_IN, NUM_OUT = 64, 600
in_turn = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=4)]
rarely = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]


def said(directory: Path, number: int = 1, **options: Any) -> list[list[int]]:
    engine = triton_engine(directory, max_prefill_chunk=16, **options)
    return tokens(run(engine, chosen([number]), greedy_params(NUM_NEW)))


def expected(plain: Path, number: int = 1) -> list[list[int]]:
    return [tiny_models.greedy(plain)[number][:NUM_NEW]]


@pytest.mark.parametrize(
    "form",
    [
        # One of these each time.
        *(pytest.param(each, marks=rarely) for each in ("w8a8", "awq-64", "fp8-block")),
        *(
            pytest.param(each, marks=in_turn)
            for each in ("gptq-4-128", "w4a16-32-asym", "w8a16-64-asym", "float-channel", "fp8-tensor-static")
        ),
    ],
)
def test_a_quantised_checkpoint_says_what_its_values_in_float32_say(form: str, tmp_path: Path) -> None:
    stored, plain = quantised_checkpoints.build("llama", FORMATS[form], tmp_path)
    assert said(stored) == expected(plain)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [INT8, *(pytest.param(each, marks=in_turn) for each in (INT4, "fp8"))])
def test_what_is_made_of_a_checkpoint_says_what_its_values_say(scheme: str, tmp_path: Path) -> None:
    model = tmp_path / "random"
    quantised_checkpoints.build("llama", FORMATS["w8a8"], tmp_path)
    assert said(model, quantization=scheme) == expected(values_of(model, scheme, tmp_path / "values"))


def values_of(model: Path, scheme: str, directory: Path) -> Path:
    """A copy with what the codes stand for. The output layer has 8 bits at least."""
    plain = Path(copytree(model, directory))
    values = load_file(model / "model.safetensors")
    for name, weight in values.items():
        if quantised_checkpoints.is_linear(name):
            values[name] = QUANTISERS[scheme](weight).dequantised()
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            each = [QUANTISERS[scheme](expert.T.contiguous()).dequantised().T for expert in weight]
            values[name] = torch.stack(each).contiguous()
        elif name == "lm_head.weight":
            values[name] = QUANTISERS[INT8 if scheme == INT4 else scheme](weight).dequantised()
    save_file(values, plain / "model.safetensors")
    return plain


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param("qwen3-moe", INT4, marks=rarely),
        pytest.param("qwen3-moe", "fp8", marks=in_turn),
        pytest.param("mixtral", INT8, marks=in_turn),
        pytest.param("gpt-oss", INT4, marks=in_turn),
    ],
)
def test_experts_made_of_a_checkpoint_say_what_their_values_say(
    tiny_model: Directory, family: str, scheme: str, tmp_path: Path
) -> None:
    model = tiny_model(family)
    plain = values_of(model, scheme, tmp_path / "values")
    assert said(model, LONGER, quantization=scheme) == expected(plain, LONGER)


@pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param("qwen3-moe", "awq-64", marks=rarely),
        *(
            pytest.param(*each, marks=in_turn)
            for each in (
                ("qwen3-moe", "w8a8"),
                ("qwen3-moe", "fp8-block"),
                ("mixtral", "gptq-4-128"),
                ("mixtral", "fp8-tensor"),
                ("mixtral", "w8a16-64-asym"),
            )
        ),
    ],
)
def test_experts_of_a_quantised_checkpoint_say_what_their_values_say(
    model: str, form: str, tmp_path: Path
) -> None:
    stored, plain = quantised_checkpoints.build(model, FORMATS[form], tmp_path)
    assert said(stored, LONGER) == expected(plain, LONGER)


@pytest.mark.parametrize(
    "plain_layers", [pytest.param((), marks=rarely), pytest.param((0,), marks=in_turn)], ids=str
)
def test_gpt_oss_in_mxfp4_says_what_its_values_say(plain_layers: tuple[int, ...], tmp_path: Path) -> None:
    stored, plain = quantised_checkpoints.build_mxfp4(tmp_path, plain_layers)
    assert said(stored, LONGER) == expected(plain, LONGER)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_adapters_are_added_to_weights_in_codes(tmp_path: Path) -> None:
    stored, plain = quantised_checkpoints.build("llama", FORMATS["awq-64"], tmp_path)
    adapter = write_adapter(tmp_path / "a", plain, seed=1)
    merged = merge(tmp_path / "merged", plain, adapter)
    engine = triton_engine(stored, max_prefill_chunk=16, lora_modules=(f"a={adapter}",))
    found = tokens(run(engine, chosen([1, 1]), greedy_params(NUM_NEW), ["a", ""]))
    assert found == [*expected(merged), *expected(plain)]


def test_a_rank_without_the_bias_of_the_sum_has_those_of_gate_and_up() -> None:
    spec = ExpertsSpec(2, 1, 8, 6, normalises=True)
    weights, biases = (torch.ones(6, 8), torch.ones(6, 8), torch.ones(8, 6)), torch.randn(2, 2, 6)
    experts = [Expert(*weights, *each) for each in biases]
    found = CudaOps(torch.float32, DEVICE).expert_weights(spec, experts.__getitem__).biases
    assert found is not None
    assert torch.equal(found[0].cpu(), biases.flatten(1)) and torch.equal(found[1].cpu(), torch.zeros(2, 8))


class Layers:
    """One layer in codes, and the same in floating point, each of a backend's own making."""

    def __init__(
        self, scheme: str, dtype: torch.dtype, activation: Activation = Activation.NONE, num_in: int = NUM_IN
    ) -> None:
        weight = QUANTISERS[scheme](torch.randn(NUM_OUT, num_in).to(dtype))
        bias = None if activation.is_gated else [torch.randn(NUM_OUT)]
        self.x = torch.randn(200, num_in).to(DEVICE, dtype)
        self.ops = CudaOps(dtype, DEVICE)
        self.coded = self.ops.linear_weight(self.halves(weight), bias, activation)
        self.plain = self.ops.linear_weight([weight.dequantised()], bias, activation)
        assert isinstance(self.coded, CudaCodedLinear) and not isinstance(self.plain, CudaCodedLinear)

    @staticmethod
    def halves(weight: QuantisedWeight) -> list[QuantisedWeight]:
        return [weight.rows(0, NUM_OUT // 2), weight.rows(NUM_OUT // 2, NUM_OUT)]


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    most = 1e-5 if found.dtype == torch.float32 else 4e-3
    assert (found.double() - wanted.double()).norm() < most * wanted.double().norm()


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", QUANTISERS)
def test_any_number_of_rows(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of many rows is made in three pieces here."""
    monkeypatch.setattr(cuda_linear, "DEQUANTISED_BYTES", 1)
    torch.manual_seed(0)
    layers = Layers(scheme, dtype)
    bias = layers.plain.bias
    assert bias is not None
    for num_rows in (1, 2, 64, 65, 200):
        x = layers.x[:num_rows]
        wanted = x.float() @ layers.plain.weight.float().T + bias.float()
        assert_close(layers.ops.linear(x, layers.coded), wanted.to(dtype))
        stream = torch.randn(num_rows, NUM_OUT).to(DEVICE, dtype)
        wanted = (wanted + stream.float()).to(dtype)
        assert_close(layers.ops.linear(x, layers.coded, stream), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", [Activation.RELU, Activation.GELU, Activation.SILU_GATED, Activation.GELU_TANH_GATED]
)
def test_activations_come_after_it(activation: Activation) -> None:
    torch.manual_seed(0)
    layers = Layers(INT4, torch.float32, activation)
    for num_rows in (1, 3):
        x = layers.x[:num_rows]
        assert_close(layers.ops.linear(x, layers.coded), layers.ops.linear(x, layers.plain))


def test_rows_that_tiles_can_not_be_loaded_of_take_the_other_way() -> None:
    """36 inputs: a row of codes begins at no multiple of 16 bytes."""
    torch.manual_seed(0)
    layers = Layers(INT4, torch.float16, num_in=36)
    assert_close(layers.ops.linear(layers.x[:5], layers.coded), layers.ops.linear(layers.x[:5], layers.plain))


def test_some_of_the_outputs() -> None:
    torch.manual_seed(0)
    layers = Layers(INT8, torch.float32)
    some = layers.coded.outputs_from(500)
    assert_close(some.project(layers.x[:3]), layers.coded.project(layers.x[:3])[:, 500:])


def test_a_table_in_codes_can_not_be_looked_up() -> None:
    layers = Layers(INT8, torch.float32)
    with pytest.raises(ValueError, match="a table in int8 can't be looked up"):
        layers.ops.embed(layers.coded, torch.zeros(1))
