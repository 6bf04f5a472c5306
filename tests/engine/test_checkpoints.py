"""Quantised checkpoints: the output equals that of transformers with the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from alignedserve.engine import build
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.listed_weights import ListingOps, check_files, num_weight_bytes
from alignedserve.models.registry import build_model
from alignedserve.models.safetensors_source import SafetensorsSource
from tests import quantised_checkpoints, tiny_models
from tests.engine.helpers import EvictEveryStep, greedy_params, make_engine, make_instance, run, tokens
from tests.engine.test_quantised import logprobs
from tests.quantised_checkpoints import FORMATS, change_config, change_tensors
from tests.tiny_models import prompts

Built = Callable[[str, str], tuple[Path, Path]]
INT_FORMATS = [name for name, each in FORMATS.items() if each.is_int]
FP8_FORMATS = [name for name, each in FORMATS.items() if not each.is_int]
MODELS = list(quantised_checkpoints.MODELS)
# One of each kernel.
KERNELS = ["w8a8", "awq-64", "gptq-4-128", "w8a16-64-asym", "fp8-block", "float-channel"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The checkpoint of a model in a format, and the same in float32. They are not to be changed."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(model: str, form: str) -> tuple[Path, Path]:
        if (model, form) not in made:
            directory = tmp_path_factory.mktemp("checkpoint")
            made[model, form] = quantised_checkpoints.build(model, FORMATS[form], directory)
        return made[model, form]

    return get


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that may be changed."""
    return lambda form: quantised_checkpoints.build("llama", FORMATS[form], tmp_path)[0]


def expected_logprobs(plain: Path, rounds_rows: bool) -> torch.Tensor:
    """What transformers makes of all prompts' tokens; with `rounds_rows` its linear layers get rows in eight bits."""
    model = tiny_models.oracle(plain)
    hooks = [
        module.register_forward_pre_hook(_in_eight_bits)
        for name, module in model.named_modules()
        if rounds_rows and quantised_checkpoints.is_linear(f"{name}.weight")
    ]
    try:
        found = [
            tiny_models.logprobs(plain, prompt)[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
            for prompt in prompts()
            if len(prompt) > 1
        ]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(found).flatten()


def _in_eight_bits(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    step = args[0].abs().amax(-1, keepdim=True) / 127
    return ((args[0] / step).round() * step,)


def said(directory: Path, **options: Any) -> list[list[int]]:
    return tokens(run(make_instance(directory, **options), prompts(), greedy_params()))


# Every format is among them each time, and so is each backend.
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("form", FP8_FORMATS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_fp8_says_what_its_values_in_float32_say(built: Built, model: str, form: str, backend: str) -> None:
    """Each code is a float32 exactly, and rows stay as they are: all that differs is the order of sums."""
    stored, plain = built(model, form)
    error = logprobs(stored, backend, None) - expected_logprobs(plain, rounds_rows=False)
    assert error.abs().max() < 1e-4
    assert said(stored, attention_backend=backend) == tiny_models.greedy(plain)


@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("form", INT_FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_integers_say_what_rows_of_eight_bits_say(built: Built, model: str, form: str) -> None:
    """A row of 128 values is rounded to 127ths of its largest, some three deviations: to 0.7 % of one, at four places
    of each of two layers. Independent of each other, these make 2 % of the logits' deviation; three times that is too
    much. What differs in the last bit before may be rounded to the next code: that is a small part of it."""
    stored, plain = built(model, form)
    exact, rounded = (expected_logprobs(plain, rounds_rows) for rounds_rows in (False, True))
    lost = (rounded - exact).abs().mean()
    for backend in ("cpu", "torch"):
        found = logprobs(stored, backend, None)
        assert 0 < (found - exact).abs().mean() < 3 * 0.02 * exact.std()
        assert (found - rounded).abs().mean() < 0.3 * lost


@pytest.mark.slow
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_chunk": 7, "block_size": 8},
        {"max_num_seqs": 1},
        {"policy": EvictEveryStep, "max_prefill_chunk": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", KERNELS)
def test_chunks_batches_and_preemption_change_nothing(
    built: Built, form: str, options: dict[str, Any]
) -> None:
    stored, _ = built("qwen2-tied", form)
    assert said(stored, dtype="bfloat16", **options) == said(stored, dtype="bfloat16")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_doctor_counts_what_is_kept_and_reads_nothing(built: Built, model: str, form: str) -> None:
    stored, plain = built(model, form)
    config = load_model_config(stored)
    assert config.quantised is not None

    def source() -> SafetensorsSource:
        return SafetensorsSource(stored, torch.bfloat16, "cpu", False, config.quantised)

    reading, taken = ListingOps(torch.bfloat16, None), source()
    build_model(config, taken, reading, max_model_len=1)
    taken.finish()
    listed = source()
    for file in listed._files:
        # A view of the map would be an error.
        file.tensor = None  # type: ignore[method-assign, assignment]
    found = num_weight_bytes(config, torch.bfloat16, listed)
    assert found == reading.num_bytes
    whole = num_weight_bytes(load_model_config(plain), torch.bfloat16, None)
    values = load_file(plain / "model.safetensors")
    linear = 2 * sum(each.numel() for name, each in values.items() if quantised_checkpoints.is_linear(name))
    assert found < whole - linear + linear * (0.35 if config.quantised.kind == "int4" else 0.55)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "awq-64",
            lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :-1].contiguous()}),
            r"q_proj\.scales has shape \(2, 127\); must be \(2, 128\)",
        ),
        (
            "awq-64",
            lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].long()}),
            r"q_proj\.qweight has dtype I64; must be one of I32",
        ),
        ("gptq-4-128", lambda t: t.pop(f"{Q}.qzeros"), r"tensor .*q_proj\.qzeros is missing"),
        (
            "w4a16-128",
            lambda t: t[f"{Q}.weight_shape"].fill_(64),
            r"q_proj: weight_shape is \(64, 64\); must be \(128, 128\)",
        ),
        (
            "gptq-4-64-asym",
            lambda t: t[f"{Q}.g_idx"].copy_(t[f"{Q}.g_idx"].flip(0)),
            r"q_proj: g_idx reorders the inputs",
        ),
        (
            "gptq-4-128",
            lambda t: t[f"{Q}.qzeros"].fill_(0x66666666),
            r"q_proj: a zero is 7; must be 8, since sym is true",
        ),
        (
            "fp8-block",
            lambda t: t[f"{Q}.weight_scale_inv"].fill_(torch.nan),
            r"q_proj: its scales are not finite",
        ),
        (
            "fp8-block",
            lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(0x7F),
            r"q_proj: its weight has NaN",
        ),
        (
            "fp8-tensor",
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}),
            r"q_proj\.weight has dtype F32; must be one of F8_E4M3",
        ),
        (
            "fp8-tensor",
            lambda t: t.update({f"{Q}.input_scale": torch.ones(1)}),
            r"holds 1 tensors that the model does not have: model\.layers\.0\.self_attn\.q_proj\.input_scale",
        ),
        (
            "gptq-4-128",
            lambda t: t.update({"model.layers.0.mlp.down_proj.bias": torch.ones(128)}),
            r"holds 1 tensors that the model does not have: model\.layers\.0\.mlp\.down_proj\.bias",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    stored: Callable[[str], Path],
    form: str,
    change: Callable[[quantised_checkpoints.Tensors], None],
    message: str,
) -> None:
    directory = stored(form)
    change_tensors(directory, change)
    with pytest.raises(ValueError, match=message) as raised:
        make_engine(directory)
    assert "\n" not in str(raised.value)


Q = "model.layers.0.self_attn.q_proj"


def test_a_checkpoint_of_another_scheme_than_its_config_is_named(stored: Callable[[str], Path]) -> None:
    directory = stored("gptq-4-128")
    change_config(directory, group_size=64)
    with pytest.raises(ValueError, match=r"q_proj\.qzeros has shape \(1, 16\); must be \(2, 16\)"):
        make_engine(directory)
    change_config(directory, group_size=96)
    with pytest.raises(ValueError, match=r"q_proj: its 128 inputs are not whole groups of 96"):
        make_engine(directory)
    change_config(directory, group_size=128, bits=8)
    with pytest.raises(ValueError, match=r"q_proj\.qweight has shape \(16, 128\); must be \(32, 128\)"):
        make_engine(directory)


def test_layers_that_are_computed_as_one_are_quantised_together(stored: Callable[[str], Path]) -> None:
    directory = stored("w8a8")
    change_config(directory, ignore=["lm_head", "re:.*k_proj"])
    change_tensors(
        directory,
        lambda tensors: tensors.update(
            {name: each.float() for name, each in tensors.items() if name.endswith("k_proj.weight")}
        ),
    )
    alone = "model.layers.0.self_attn"
    with pytest.raises(ValueError, match=f"{alone}.q_proj is quantized and {alone}.k_proj is not"):
        make_engine(directory)


def test_what_is_ignored_is_as_it_was(stored: Callable[[str], Path], tmp_path: Path) -> None:
    """A layer in floating point among others in eight bits."""
    directory = stored("fp8-tensor")
    plain = tmp_path / "plain"
    change_config(directory, ignored_layers=["lm_head", "model.layers.1.mlp.down_proj"])

    def unquantise(tensors: quantised_checkpoints.Tensors) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale")

    change_tensors(directory, unquantise)
    assert said(directory) == tiny_models.greedy(plain)


def test_gptq_may_have_biases_of_zeros(stored: Callable[[str], Path]) -> None:
    directory = stored("gptq-4-128")
    expected = said(directory)
    change_tensors(directory, lambda t: t.update({"model.layers.0.mlp.down_proj.bias": torch.zeros(128)}))
    assert said(directory) == expected


@pytest.mark.parametrize("form", ["w8a8", "awq-64", "fp8-block"])
def test_what_does_not_run_is_refused_by_name(built: Built, form: str) -> None:
    directory, _ = built("llama", form)
    with pytest.raises(ValueError, match=r"quantization='int4': .* is quantized \(.*\) already"):
        make_engine(directory, quantization="int4")
    with pytest.raises(ValueError, match=r"load_format='dummy': .* is quantized"):
        make_engine(directory, load_format="dummy")


@pytest.mark.parametrize("form", ["fp8-block", "float-channel"])
def test_fp8_is_refused_on_gpus_that_can_not_convert_it(
    built: Built, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    directory, _ = built("llama", form)
    with pytest.raises(
        ValueError,
        match=r"with FP8 weights: needs a GPU of compute capability 8.9 or newer, this one has \(8, 0\)",
    ) as raised:
        make_engine(directory)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize(("model", "form"), [("qwen3-moe", "fp8-block"), ("mixtral", "float-channel")])
@pytest.mark.parametrize("options", [{}, {"attention_backend": "torch"}, {"max_prefill_chunk": 7}], ids=str)
def test_experts_in_fp8_say_what_their_values_in_float32_say(
    built: Built, model: str, form: str, options: dict[str, Any]
) -> None:
    stored, plain = built(model, form)
    assert said(stored, **options) == tiny_models.greedy(plain)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("form", ["w8a8", "awq-64", "gptq-4-128", "w8a16-64-asym"])
def test_experts_in_integers_say_the_same_with_both_backends(built: Built, form: str) -> None:
    """The bound is that of layers without experts."""
    stored, plain = built("qwen3-moe", form)
    exact = expected_logprobs(plain, rounds_rows=False)
    native, torch_alone = (logprobs(stored, backend, None) for backend in ("cpu", "torch"))
    lost = (torch_alone - exact).abs().mean()
    assert 0 < lost < 3 * 0.02 * exact.std()
    assert (native - torch_alone).abs().mean() < 0.3 * lost


@pytest.mark.slow
# Those of test_ranks.py.
@pytest.mark.drawn(one_in=8, turn=6)
@pytest.mark.parametrize("form", ["float-channel", "w8a8"])
def test_ranks_divide_experts_in_codes(built: Built, form: str) -> None:
    """Ranks round the rows that they have: with eight bits only the bounds of one process hold."""
    stored, plain = built("qwen3-moe", form)
    exact = expected_logprobs(plain, rounds_rows=False)
    divided = logprobs(stored, "cpu", None, tensor_parallel_size=2)
    assert (divided - exact).abs().mean() < (1e-4 if form == "float-channel" else 3 * 0.02 * exact.std())


def test_an_expert_that_is_not_like_the_others_is_named(tmp_path: Path) -> None:
    """Before anything is started: nothing but the files' headers is read."""
    stored, plain = quantised_checkpoints.build("qwen3-moe", FORMATS["fp8-block"], tmp_path)
    name = "model.layers.1.mlp.experts.2.down_proj"
    change_config(stored, ignored_layers=["lm_head", name])
    weight = load_file(plain / "model.safetensors")[f"{name}.weight"]

    def unquantise(tensors: quantised_checkpoints.Tensors) -> None:
        tensors[f"{name}.weight"] = weight
        del tensors[f"{name}.weight_scale_inv"]

    change_tensors(stored, unquantise)
    with pytest.raises(ValueError, match=r"down of expert 2 is in floats, that of expert 0 in fp8 \(scales"):
        check_files(load_model_config(stored), stored, 1)
