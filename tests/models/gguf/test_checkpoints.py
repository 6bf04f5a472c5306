"""The model of a GGUF file is the model of the directory that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.models.config import ModelConfig, RopeConfig
from alignedserve.models.listed_weights import check_files, num_weight_bytes
from alignedserve.models.registry import build_model
from alignedserve.models.rope import rope_table
from alignedserve.models.source import ModelSource, open_checkpoint, resolve_model
from alignedserve.models.weights import CheckpointSource, TakePart
from alignedserve.ops.quantise import GgufWeight, Part
from alignedserve.ops.torch_ops import TorchOps
from tests.engine.helpers import greedy_params, make_instance, run, tokens
from tests.models.gguf.files import as_published, write_gguf
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
FAMILIES = [
    *("llama-mha", "llama-gqa-tied", "llama3-rope", "llama-yarn", "mistral-window", "qwen2", "qwen3"),
    *("qwen3-moe", "mixtral", "phi3", "phi3-partial-window", "phi3-longrope", "gemma3", "gpt-oss"),
]


class Recorder:
    """A WeightSource that keeps what a model takes, in float32."""

    def __init__(self, source: CheckpointSource[Any]) -> None:
        self._source = source
        self.taken: dict[str, torch.Tensor] = {}
        self.types: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        taken: torch.Tensor = self._source.take(name, shape)
        self._keep(name, taken)
        return taken

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        part: Part = self._source.linear(layer, num_out, num_in)
        return self._keep(layer, part)

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        take = self._source.of_experts(layer, num_experts, num_out, num_in)
        return lambda number: self._keep(f"{layer} {number}", take(number))

    def finish(self) -> None:
        self._source.finish()

    def _keep(self, name: str, part: Part) -> Part:
        if isinstance(part, GgufWeight):
            self.types.add(part.type)
        values = part.dequantised() if isinstance(part, GgufWeight) else part
        assert isinstance(values, torch.Tensor)
        self.taken[name] = values.clone()
        return part


def recorded(model: ModelSource) -> Recorder:
    assert model.directory is not None
    recorder = Recorder(open_checkpoint(model.directory, torch.float32, "cpu", model.config.quantised))
    build_model(model.config, recorder, TorchOps(torch.float32), max_model_len=64)
    recorder.finish()
    return recorder


def without_ropes(config: ModelConfig) -> ModelConfig:
    """The windows of a model of one length are those of all its layers, whatever its file calls them."""
    return replace(config, rope=None, local_rope=None, dtype="float32", quantised=None, architecture="")


def assert_alike(mine: RopeConfig | None, other: RopeConfig | None, head_dim: int) -> None:
    """Factors may be given, or the numbers that they follow from."""
    assert (mine is None) == (other is None)
    if mine is not None and other is not None:
        for length in 16, 512:
            found, wanted = (rope_table(each, head_dim, length) for each in (mine, other))
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_model_of_its_directory(tiny_model: Directory, family: str, tmp_path: Path) -> None:
    directory = as_published(tiny_model(family), tmp_path / "directory")
    mine = resolve_model(write_gguf(directory, tmp_path / "model.gguf"))
    other = resolve_model(directory)
    assert without_ropes(mine.config) == without_ropes(other.config)
    assert_alike(mine.config.rope, other.config.rope, mine.config.head_dim)
    assert_alike(mine.config.local_rope, other.config.local_rope, mine.config.head_dim)
    found, wanted = recorded(mine).taken, recorded(other).taken
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # (1 + w) - 1 is not always w.
        is_norm = family == "gemma3" and name.endswith("norm.weight")
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6 if is_norm else 0)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "Q8_0") for family in ("llama-gqa-tied", "phi3", "gemma3", "qwen3-moe", "gpt-oss")),
        ("gpt-oss", "MXFP4"),
    ],
)
def test_codes_stay_codes_and_keep_their_order(
    tiny_model: Directory, family: str, kind: str, tmp_path: Path
) -> None:
    directory = as_published(tiny_model(family), tmp_path / "directory")
    mine = resolve_model(write_gguf(directory, tmp_path / "model.gguf", quantise=kind))
    assert mine.config.quantised is not None and mine.config.quantised.kind == kind
    recorder, wanted = recorded(mine), recorded(resolve_model(directory)).taken
    assert recorder.types == {kind}
    assert recorder.taken.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # A step of a block, and the rounding of its scale. The largest codes of MXFP4 are 4 and 6.
        close = tensor.abs().amax() * (0.0042 if kind == "Q8_0" else 0.26)
        torch.testing.assert_close(recorder.taken[name], tensor, rtol=0, atol=float(close) + 1e-6)


@pytest.mark.parametrize("family", ["llama3-rope", "gemma3"])
def test_answers_are_those_of_transformers(tiny_model: Directory, family: str, tmp_path: Path) -> None:
    directory = as_published(tiny_model(family), tmp_path / "directory")
    engine = make_instance(write_gguf(directory, tmp_path / "model.gguf"))
    assert tokens(run(engine, prompts(), greedy_params())) == greedy(directory)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "gpt-oss"])
def test_what_a_model_in_codes_takes_is_known_before(
    tiny_model: Directory, family: str, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model(family), tmp_path / "model.gguf", quantise="Q8_0")
    model = resolve_model(path)
    directory = model.directory
    assert directory is not None
    check_files(model.config, directory, num_ranks=1)

    def num_bytes(dtype: torch.dtype, is_cpu: bool = True) -> int:
        listed = open_checkpoint(directory, dtype, "cpu", model.config.quantised)
        return num_weight_bytes(model.config, dtype, listed, is_cpu=is_cpu)

    # Those of the file, but for embeddings, norms and routers in another dtype. There are none in codes elsewhere.
    assert num_bytes(torch.bfloat16) == pytest.approx(path.stat().st_size, rel=0.3)
    whole = num_weight_bytes(model.config, torch.bfloat16, None)
    assert num_bytes(torch.bfloat16, is_cpu=False) == whole
    assert num_bytes(torch.float32) == 2 * whole


# The last part has the factors.
@pytest.mark.parametrize("family", ["llama-mha", "llama3-rope", "phi3-longrope"])
def test_parts_of_a_model_are_one_model(tiny_model: Directory, family: str, tmp_path: Path) -> None:
    directory = tiny_model(family)
    mine = resolve_model(write_gguf(directory, tmp_path / "model.gguf", num_files=3))
    assert len([*tmp_path.iterdir()]) == 3
    other = resolve_model(directory)
    assert_alike(mine.config.rope, other.config.rope, mine.config.head_dim)
    found, wanted = recorded(mine).taken, recorded(other).taken
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_quantised_file_is_not_quantised_again(tiny_model: Directory, tmp_path: Path) -> None:
    path = write_gguf(tiny_model("qwen2"), tmp_path / "model.gguf", quantise="Q8_0")
    with pytest.raises(ValueError, match=r"quantization='int8': .*model.gguf is quantized \(gguf\) already"):
        make_instance(path, quantization="int8")
    with pytest.raises(ValueError, match=r"load_format='dummy': .*model.gguf is quantized"):
        make_instance(path, load_format="dummy")


def test_a_file_in_floats_may_be_quantised(tiny_model: Directory, tmp_path: Path) -> None:
    make_instance(write_gguf(tiny_model("qwen2"), tmp_path / "model.gguf"), quantization="int8")
