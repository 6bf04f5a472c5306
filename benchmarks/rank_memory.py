"""Measures each rank's peak memory while a model is loaded, relative to its share of the weights.

    python -m benchmarks.rank_memory

There are two ranks. It loads a small and a large model, which differ only in their weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alignedserve import LLM
from benchmarks.harness import parser_of

NUM_RANKS = 2
SMALL, LARGE = 1, 21


def write(directory: Path, num_layers: int) -> int:
    """Writes a model, and returns the bytes of its weights."""
    config = LlamaConfig(
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=1000,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(directory, max_shard_size="400MB")
    return sum(each.nbytes for each in model.parameters())


def load(directory: Path) -> list[int]:
    """Returns the peak bytes of each rank, the leading one first."""
    llm = LLM(
        str(directory),
        dtype="bfloat16",
        device="cpu",
        tensor_parallel_size=NUM_RANKS,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=16 << 20,
        skip_tokenizer_init=True,
        use_tqdm=False,
    )
    me = os.getpid()
    followers = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    peaks = [_peak(pid) for pid in (str(me), *followers) if pid == str(me) or "follower" in _command(pid)]
    del llm
    return peaks


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _peak(pid: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def measure(num_layers: int) -> tuple[int, list[int]]:
    with tempfile.TemporaryDirectory() as directory:
        num_bytes = write(Path(directory), num_layers)
        command = [sys.executable, "-m", "benchmarks.rank_memory", "--directory", directory]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        return num_bytes, [int(peak) for peak in said.split()]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path, help="model to load; used for the child process")
    directory = parser.parse_args().directory
    if directory:
        print(*load(directory))
        return
    (small_bytes, small), (large_bytes, large) = measure(SMALL), measure(LARGE)
    share = (large_bytes - small_bytes) / NUM_RANKS
    for rank, (before, peak) in enumerate(zip(small, large, strict=True)):
        more = peak - before
        print(f"rank {rank}: {more / 1e6:.1f} MB for a share of {share / 1e6:.1f} MB, {more / share:.3f}")


if __name__ == "__main__":
    main()
