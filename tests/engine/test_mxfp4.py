"""gpt-oss with experts in MXFP4: the output equals that of transformers with the weights it decodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.models.hf_config import load_model_config
from alignedserve.models.listed_weights import ListingOps, check_files, num_weight_bytes
from alignedserve.models.quantised import mxfp4
from alignedserve.models.registry import build_model
from alignedserve.models.safetensors_source import SafetensorsSource
from tests import tiny_models
from tests.engine.helpers import EvictEveryStep, greedy_params, make_engine, make_instance, run, tokens
from tests.engine.test_checkpoints import expected_logprobs
from tests.engine.test_quantised import logprobs
from tests.quantised_checkpoints import Tensors, build_mxfp4, change_config, change_tensors
from tests.tiny_models import prompts

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint, and the same in float32. They are not to be changed."""
    return build_mxfp4(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    return build_mxfp4(tmp_path)[0]


def said(directory: Path, **options: Any) -> list[list[int]]:
    return tokens(run(make_instance(directory, **options), prompts(), greedy_params()))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_it_says_what_its_values_in_float32_say(built: tuple[Path, Path], backend: str) -> None:
    """Each code is a float32 exactly, and rows stay as they are: all that differs is the order of sums."""
    directory, plain = built
    error = logprobs(directory, backend, None) - expected_logprobs(plain, rounds_rows=False)
    assert error.abs().max() < 1e-4
    assert said(directory, attention_backend=backend) == tiny_models.greedy(plain)


def test_layers_may_be_left_as_they_were(tmp_path: Path) -> None:
    directory, plain = build_mxfp4(tmp_path, plain_layers=(0,))
    assert said(directory) == tiny_models.greedy(plain)


@pytest.mark.parametrize(
    "options",
    [
        {"max_prefill_chunk": 7, "block_size": 8},
        {"max_num_seqs": 1},
        {"policy": EvictEveryStep, "max_prefill_chunk": 40},
    ],
    ids=str,
)
def test_chunks_batches_and_preemption_change_nothing(
    built: tuple[Path, Path], options: dict[str, Any]
) -> None:
    assert said(built[0], dtype="bfloat16", **options) == said(built[0], dtype="bfloat16")


def test_doctor_counts_what_is_kept_and_reads_nothing(built: tuple[Path, Path]) -> None:
    directory, plain = built
    config = load_model_config(directory)

    def source() -> SafetensorsSource:
        return SafetensorsSource(directory, torch.bfloat16, "cpu", False, config.quantised)

    reading, taken = ListingOps(torch.bfloat16, None), source()
    build_model(config, taken, reading, max_model_len=1)
    taken.finish()
    listed = source()
    for file in listed._files:
        # A view of the map would be an error.
        file.tensor = None  # type: ignore[method-assign, assignment]
    found = num_weight_bytes(config, torch.bfloat16, listed)
    assert found == reading.num_bytes
    # Four bits and a sixteenth of a scale, in place of sixteen bits.
    num_coded = 3 * 8 * 3 * 64 * 64
    whole = num_weight_bytes(load_model_config(plain), torch.bfloat16, None)
    assert whole - found == num_coded * 2 - num_coded * (4 + 16 / 32) / 8


def test_each_scale_is_its_power_of_two() -> None:
    scales = torch.arange(255, dtype=torch.uint8).view(1, -1)
    found = mxfp4.weight(torch.zeros(1, 255, 16, dtype=torch.uint8), scales).scales
    assert torch.equal(found.double(), 2.0 ** (scales.double() - 127))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(
                {f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"][:, :, :1].clone()}
            ),
            r"down_proj_blocks has shape \(8, 64, 1, 16\); must be \(8, 64, 2, 16\)",
        ),
        (
            lambda t: t.update(
                {f"{EXPERTS}.gate_up_proj_scales": t[f"{EXPERTS}.gate_up_proj_scales"][:7].clone()}
            ),
            r"gate_up_proj_scales has shape \(7, 128, 2\); must be \(8, 128, 2\)",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].float()}),
            r"down_proj_scales has dtype F32; must be one of U8, F8_E8M0",
        ),
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), r"tensor .*down_proj_scales is missing"),
        (
            lambda t: t[f"{EXPERTS}.down_proj_scales"][5, 3].fill_(255),
            r"layers\.1\.mlp\.experts\.down_proj of expert 5: its scales are not finite",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(8, 64, 64)}),
            r"holds 1 tensors that the model does not have: model\.layers\.1\.mlp\.experts\.down_proj",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    stored: Path, change: Callable[[Tensors], None], message: str
) -> None:
    change_tensors(stored, change)
    with pytest.raises(ValueError, match=message) as raised:
        make_engine(stored)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_of_another_scheme_than_its_config_is_named(stored: Path) -> None:
    (stored.parent / "plain" / "config.json").write_text((stored / "config.json").read_text())
    with pytest.raises(ValueError, match=r"tensor .*experts\.gate_up_proj_blocks is missing"):
        make_engine(stored.parent / "plain")
    change_config(stored, modules_to_not_convert=["model.layers.1.mlp"])
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.experts\.gate_up_proj is missing"):
        make_engine(stored)


def test_groups_that_do_not_fill_the_inputs_are_named(stored: Path) -> None:
    path = stored / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 64', '"intermediate_size": 72'))
    config = load_model_config(stored)
    with pytest.raises(ValueError, match=r"gate_up_proj_bias has shape \(8, 128\); must be \(8, 144\)"):
        check_files(config, stored, 1)


def test_ranks_do_not_cut_through_a_group(built: tuple[Path, Path]) -> None:
    directory, _ = built
    check_files(load_model_config(directory), directory, 2)
    with pytest.raises(ValueError, match="inputs 0 to 16: must be whole groups of 32"):
        check_files(load_model_config(directory), directory, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, r"quantization='int8': .* is quantized \(mxfp4\) already"),
        ({"load_format": "dummy"}, "load_format='dummy': .* is quantized"),
    ],
)
def test_what_does_not_run_so_is_refused_by_name(
    built: tuple[Path, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(built[0], **options)
