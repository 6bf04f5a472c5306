"""Compares offline generation on a CPU with vLLM for CPU: same model, prompts and cores, in turn (A B A B ...).

    python -m benchmarks.cpu_vs_vllm --vllm-python VENV/bin/python [--rounds 3] [--cases abc]
    python -m benchmarks.cpu_vs_vllm --vllm-python VENV/bin/python --cpu x86-64-v3 --dtype float32 --cases d

The model is a random-weight Llama with 125M parameters, by default in bfloat16. With `--cpu x86-64-v3` neither side
uses more than AVX2. Ours is built for it, vLLM uses its library for such processors, and torch's libraries are limited
by environment variables. vLLM is measured with its defaults, which reserve one core for itself, and with all cores for
its computation (VLLM_CPU_OMP_THREADS_BIND), which is how ours runs. Ratios are computed per round.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.cli.bench import prompt_lengths
from benchmarks.harness import JSON_FILE, facts, in_turn, median_ratio, parser_of, progress, say, write_json

# case: (prompts, prompt tokens, mix, output tokens, target ratio)
CASES: dict[str, tuple[int, int, str | None, int, float]] = {
    "a": (32, 128, None, 128, 1.7),
    "b": (1, 128, None, 128, 2.2),
    "c": (32, 128, "long=0.125:2048", 128, 1.7),
    "d": (16, 64, None, 48, 1.3),
}
LIMITS = ["--max-num-seqs", "64", "--max-model-len", "4096"]
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def make_model(directory: Path) -> None:
    """Writes the model with transformers, as for any checkpoint."""
    code = (
        "import sys, torch; from transformers import LlamaConfig, LlamaForCausalLM; torch.manual_seed(0);"
        f"LlamaForCausalLM(LlamaConfig.from_dict({MODEL_CONFIG!r})).to(torch.bfloat16).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)


def run(command: list[str], environment: dict[str, str], out: Path) -> float:
    log = out.with_suffix(".log")
    with log.open("w") as file:
        done = subprocess.run(command, env=os.environ | environment, stdout=file, stderr=file, timeout=900)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{log.read_text()[-2000:]}")
    line: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return float(line["output_tokens_per_s"])


# Limits vLLM to AVX2, in addition to our --avx2: the engine must run in the process that sets it; torch needs
# variables.
VLLM_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHINDUCTOR_CPP_SIMDLEN": "256",
}


def ours(case: str, model: Path, out: Path, cpu: str, dtype: str) -> float:
    num_prompts, input_len, mix, output_len, _ = CASES[case]
    command = [
        sys.executable,
        "-m",
        "alignedserve",
        "bench",
        "engine",
        str(model),
        *LIMITS,
        "--dtype",
        dtype,
        "--out",
        str(out),
    ]
    command += [
        "--num-prompts",
        str(num_prompts),
        "--input-len",
        str(input_len),
        "--output-len",
        str(output_len),
    ]
    return run(command + (["--mix", mix] if mix else []), {"ALIGNEDSERVE_CPU": cpu}, out)


def vllm(case: str, model: Path, out: Path, cpu: str, dtype: str, python: str, has_all_cores: bool) -> float:
    num_prompts, input_len, mix, output_len, _ = CASES[case]
    lengths = prompt_lengths(num_prompts, input_len, mix)
    random.Random(0).shuffle(lengths)
    script = str(Path(__file__).parent / "vllm_offline.py")
    command = [python, script, str(model), *LIMITS, "--output-len", str(output_len), "--out", str(out)]
    command += ["--lengths", ",".join(map(str, lengths))]
    command += ["--dtype", dtype]
    environment: dict[str, str] = {}
    if cpu == "x86-64-v3":
        command.append("--avx2")
        environment |= VLLM_AVX2
    if has_all_cores:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
    return run(command, environment, out)


def main() -> None:
    parser = parser_of(__doc__, rounds=3, out=JSON_FILE)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--cases", default="abc")
    parser.add_argument("--cpu", default="native", choices=["native", "x86-64-v3"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    cases: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        progress(3 * args.rounds * len(args.cases), "run") as bar,
    ):
        model = Path(directory, "model")
        bar.set_description("making the model")
        make_model(model)
        for case in args.cases:
            given = (case, model, Path(directory, "out.jsonl"), args.cpu, args.dtype)
            peer = partial(vllm, *given, args.vllm_python)
            engines = {
                "alignedserve": partial(ours, *given),
                "vllm": partial(peer, has_all_cores=False),
                "vllm_all_cores": partial(peer, has_all_cores=True),
            }
            say(f"({case})")
            rounds = in_turn(
                engines, args.rounds, bar=bar, told=lambda name, rate: say(f"{name}: {rate:.1f} tokens/s")
            )
            ratios = {
                name: median_ratio(rounds["alignedserve"], rounds[name])
                for name in ("vllm", "vllm_all_cores")
            }
            cases[case] = {"rounds": rounds, "median_ratio_to": ratios, "target": CASES[case][4]}
            shown = {name: round(ratio, 2) for name, ratio in ratios.items()}
            say(f"({case}) median ratio to {shown}")
    write_json(args.out, facts({args.vllm_python: "VENV/bin/python"}) | {"cases": cases})


if __name__ == "__main__":
    main()
