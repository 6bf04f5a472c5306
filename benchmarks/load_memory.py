"""Measures the peak memory of loading a checkpoint, relative to the size of the loaded model.

    python -m benchmarks.load_memory --gigabytes 2 [--mixture [FORM] [--quantization int8]]

The checkpoint is float32 in two shards, with layers of about 16 MB and an embedding of an eighth of the whole. The
model copies each tensor as it takes it. With --mixture the checkpoint is Qwen3-MoE's, with experts of 3 MB, or
gpt-oss's, with one tensor for all experts of a layer, optionally in MXFP4; the model is then the CPU backend's. The
memory that the process held before loading is subtracted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from alignedserve.engine.config import QUANTIZATIONS
from alignedserve.models.config import ModelConfig
from alignedserve.models.hf_config import model_config_from_dict
from alignedserve.models.listed_weights import ListedSource, ListingOps, num_weight_bytes
from alignedserve.models.quantised import mxfp4
from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.registry import build_model
from alignedserve.models.safetensors_source import SafetensorsSource
from alignedserve.models.weights import TakePart
from alignedserve.ops.cpu_ops import CpuOps
from benchmarks.harness import parser_of

ROW = 2048
NUM_SHARDS = 2
ARCHITECTURES = {
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gpt-oss-mxfp4": "GptOssForCausalLM",
}


def shapes(num_bytes: int) -> dict[str, tuple[int, int]]:
    num_rows = num_bytes // (4 * ROW)
    result = {"embed.weight": (num_rows // 8, ROW)}
    left = num_rows - num_rows // 8
    while left > 0:
        result[f"layers.{len(result)}.weight"] = (min(ROW, left), ROW)
        left -= ROW
    return result


def mixture(num_bytes: int, form: str) -> ModelConfig:
    """Layers with 32 experts of 3 * 512 * 512 values each."""
    is_coded = form.endswith("mxfp4")
    bytes_each = 0.5 + 1 / 32 if is_coded else 4
    config = {
        "architectures": [ARCHITECTURES[form]],
        "quantization_config": {"quant_method": "mxfp4"} if is_coded else None,
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": max(1, round(num_bytes / (bytes_each * 32 * 3 * 512 * 512))),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }
    return model_config_from_dict(config, where="benchmarks.load_memory")


class Listed(ListedSource):
    """Records the shapes that a model takes."""

    def __init__(self, quantised: QuantisedConfig | None) -> None:
        super().__init__(torch.float32, None)
        self._quantised = quantised
        self.shapes: dict[str, tuple[int, ...]] = {}

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        of_all = super().of_experts(layer, num_experts, num_out, num_in)
        if self._quantised is not None:
            del self.shapes[layer]
            tensors = mxfp4.tensors((num_experts, num_out, num_in))
            self.shapes |= {layer + name: stored.shapes[0] for name, stored in tensors.items()}
        return of_all

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.shapes[name] = shape
        return super().take(name, shape)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    listed = Listed(config.quantised)
    build_model(config, listed, ListingOps(torch.float32, None), max_model_len=1)
    return listed.shapes


def write_checkpoint(directory: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    names = list(wanted)
    shards = {f"model-{index}.safetensors": names[index::NUM_SHARDS] for index in range(NUM_SHARDS)}
    for shard, members in shards.items():
        tensors = {
            name: torch.ones(
                wanted[name],
                dtype=torch.uint8 if name.endswith((mxfp4.BLOCKS, mxfp4.SCALES)) else torch.float32,
            )
            for name in members
        }
        save_file(tensors, directory / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load_and_report(
    directory: Path, num_bytes: int, dtype: torch.dtype, form: str | None, quantization: str | None
) -> None:
    config = mixture(num_bytes, form) if form else None
    if config:
        # Loads the native library before the measurement.
        CpuOps(dtype, quantization=quantization).linear_weight([torch.ones(64, 64)])
    # Creates threads, allocator and code before the measurement.
    torch.ones(1000, 1000).to(dtype).clone()
    baseline = status_bytes("VmRSS")
    # Resets the peak to the current size.
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    source = SafetensorsSource(directory, dtype, "cpu", False, config.quantised if config else None)
    if config:
        kept: object = build_model(config, source, CpuOps(dtype, quantization=quantization), max_model_len=1)
        listed = SafetensorsSource(directory, dtype, "cpu", False, config.quantised)
        model_bytes = num_weight_bytes(config, dtype, listed, quantization)
    else:
        kept = model = {name: source.take(name, shape).clone() for name, shape in shapes(num_bytes).items()}
        model_bytes = sum(tensor.nbytes for tensor in model.values())
    source.finish()
    seconds = time.perf_counter() - start
    peak = status_bytes("VmHWM") - baseline
    print(
        f"model={model_bytes / 1e9:.3f}GB peak={peak / 1e9:.3f}GB ratio={peak / model_bytes:.3f} "
        f"seconds={seconds:.2f} dtype={dtype}"
    )
    del kept


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--directory", type=Path, help="checkpoint to load; used for the child process")
    parser.add_argument(
        "--mixture",
        nargs="?",
        const="qwen3-moe",
        choices=[*ARCHITECTURES],
        help="measure a mixture of experts of this form",
    )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="quantization of the mixture")
    arguments = parser.parse_args()
    num_bytes = int(arguments.gigabytes * 1e9)
    if arguments.directory:
        dtype = getattr(torch, arguments.dtype)
        load_and_report(arguments.directory, num_bytes, dtype, arguments.mixture, arguments.quantization)
        return
    wanted = shapes_of(mixture(num_bytes, arguments.mixture)) if arguments.mixture else shapes(num_bytes)
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), wanted)
        # A fresh process, because writing the checkpoint raised this one's peak.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.load_memory", *sys.argv[1:], "--directory", directory],
            check=True,
        )


if __name__ == "__main__":
    main()
