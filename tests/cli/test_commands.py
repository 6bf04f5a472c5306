"""Commands as a user types them, each in a process of its own."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from alignedserve import demo
from alignedserve.cli.bench import prompt_lengths, random_prompts
from tests.cli.forked import forked
from tests.tiny_adapters import write_adapter


def alignedserve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "alignedserve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_names_every_command_and_option() -> None:
    commands = alignedserve("--help").stdout
    assert "generate" in commands and "bench" in commands
    text = alignedserve("bench", "engine", "--help=all").stdout
    for flag in (
        "--max-num-seqs",
        "--kv-cache-memory-bytes",
        "--attention-backend",
        "[default: 256]",
        "per KV block",
    ):
        assert flag in text


@pytest.mark.slow
@pytest.mark.parametrize("words", [["generate"], ["profile"], ["bench", "engine"], ["serve"]], ids=" ".join)
def test_progress_bars_are_for_commands_that_have_a_terminal(words: list[str]) -> None:
    assert ("use-tqdm" in forked(*words, "--help=all").stdout) == (words != ["serve"])


def test_a_forked_command_has_the_variables_of_who_forks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were set after the first fork."""
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = forked("serve", "--help").stdout.splitlines()
    monkeypatch.setenv("COLUMNS", "50")
    assert 0 < len(wide) < len(forked("serve", "--help").stdout.splitlines())


def test_generate_answers_with_the_demo_model() -> None:
    done = alignedserve("generate", "-p", "List the letters from a to e.")
    assert done.returncode == 0, done.stderr
    assert "a, b, c, d, e" in done.stdout
    # bars are for terminals
    assert "Loading" not in done.stderr and "Processed" not in done.stderr


@pytest.mark.slow
def test_generate_answers_with_an_adapter(tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / name, demo.MODEL_DIR, seed) for seed, name in enumerate("ab")]
    words = ["generate", "-p", "List the letters from a to e.", "--no-use-tqdm", "--max-tokens", "20"]
    words += ["--lora-modules", *(f"{path.name}={path}" for path in paths)]
    answers = [forked(*words, *more).stdout for more in ([], ["--lora-name", "a"], ["--lora-name", "b"])]
    assert len(set(answers)) == 3 and "a, b, c, d, e" in answers[0]
    wrong = forked(*words, "--lora-name", "c")
    assert wrong.returncode == 2
    assert wrong.stderr == "Error: --lora-name c: is not in --lora-modules, which are a, b\n"


@pytest.mark.slow
def test_bench_engine_prints_one_json_line(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, out = str(tiny_model("qwen2")), tmp_path / "out.jsonl"
    sizes = ["--num-prompts", "4", "--input-len", "20", "--output-len", "5", "--runs", "2"]
    done = forked("bench", "engine", model, *sizes, "--out", str(out), "--no-use-tqdm")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line == json.loads(out.read_text())
    assert line["output_tokens_per_s"] > 0 and len(line["rates"]) == 2 and line["num_prompts"] == 4


def test_what_a_user_got_wrong_is_one_line(tmp_path: Path) -> None:
    for run, code, words in (
        (alignedserve, 1, ["generate", str(tmp_path), "-p", "x"]),
        (forked, 2, ["bench", "engine", "no-such-model", "--block-size", "0"]),
        # before the model is loaded
        (forked, 2, ["generate", "no-such-model", "-p", "x", "--temperature", "-1"]),
    ):
        done = run(*words)
        assert done.returncode == code
        assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_model_of_nan_is_an_error_and_no_empty_answer(tmp_path: Path) -> None:
    model = shutil.copytree(demo.MODEL_DIR, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, model / "model.safetensors")
    done = forked("generate", str(model), "-p", "Hello", "--no-use-tqdm")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and "NaN" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--num-prompts=0", "--input-len=0", "--output-len=0", "--runs=0"])
def test_measuring_nothing_is_refused(option: str) -> None:
    done = forked("bench", "engine", "no-such-model", option)
    assert done.returncode == 2 and option.split("=")[0] in done.stderr


@pytest.mark.parametrize("mix", ["long=2:5", "long=-1:5", "long=nan:5", "long=inf:5", "long=half:5", "5"])
def test_a_mix_is_a_share_of_the_prompts(mix: str) -> None:
    with pytest.raises(ValueError, match=mix):
        prompt_lengths(32, 128, mix)


def test_prompts_of_a_mix_are_the_peers() -> None:
    assert sorted(prompt_lengths(32, 128, "long=0.125:2048")) == [128] * 28 + [2048] * 4
    prompts = random_prompts([3, 5], vocab_size=100)
    assert {len(prompt["prompt_token_ids"]) for prompt in prompts} == {3, 5}
    assert prompts == random_prompts([3, 5], vocab_size=100)
