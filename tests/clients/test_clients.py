"""Real clients, each in an environment of its own, against one server: docs/clients.md has a row for each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve.kernels.cpu.build import cache_dir
from tests.clients.environments import command_of, modules_of, python_of, variables_of
from tests.clients.lm_eval_tasks import write_tasks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
# Far more than any takes: some load for half a minute on a busy machine.
TIMEOUT_S = 300.0
# no client looks for anything on other machines
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# What takes ten seconds of a core or more, most of it to load: always some of them.
SOMETIMES = pytest.mark.drawn(one_in=4)
# script, environment; always one of the two that are one of two
PYTHON_SCRIPTS = [
    ("openai_python", "openai"),
    ("anthropic_python", "anthropic"),
    pytest.param("litellm_python", "litellm", marks=pytest.mark.drawn(one_in=2)),
    pytest.param("langchain_python", "langchain", marks=pytest.mark.drawn(one_in=2)),
    pytest.param("autobatcher_python", "autobatcher", marks=SOMETIMES),
    pytest.param("ray_data", "ray-data", marks=SOMETIMES),
]
# example -> what it says, among other things
EXAMPLES = {
    "chat": "7, 8, 9, 10, 11, 12",
    "streaming": "7, 8, 9, 10, 11, 12",
    "tools": 'weather {"city": "',
    "structured_output": "is_capital=",
    "batch_job": "9, 10, 11, 12",
    "background_response": "7, 8, 9, 10, 11, 12",
    "best_effort": "flex 7, 8, 9, 10, 11, 12",
    "anthropic_messages": "7, 8, 9, 10, 11, 12",
    "embeddings": "is nearer",
    "offline": "7, 8, 9, 10, 11, 12",
}
QUESTIONS = [f"Count from {first} to {first + 20}." for first in (7, 100, 730)]


def run(url: str, home: Path, *command: str | Path, **environment: str) -> str:
    """What it wrote, which is nothing that matters to most tests: scripts check their answers themselves."""
    done = subprocess.run(
        [str(part) for part in command],
        env=variables_of(url, home) | environment,
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.parametrize(("script", "environment"), PYTHON_SCRIPTS)
def test_a_script_of_python(script: str, environment: str, url: str, tmp_path: Path) -> None:
    run(url, tmp_path, python_of(environment), SCRIPTS / f"{script}.py", **OFFLINE)


@pytest.mark.parametrize("script", ["openai_node", "ai_sdk"])
def test_a_script_of_node(script: str, url: str, tmp_path: Path) -> None:
    """A module's imports are looked for beside it."""
    (tmp_path / "node_modules").symlink_to(modules_of("node"))
    shutil.copy(SCRIPTS / f"{script}.mjs", tmp_path)
    run(url, tmp_path, "node", tmp_path / f"{script}.mjs")


def test_what_vllm_bench_serve_sends(url: str, tmp_path: Path) -> None:
    run(url, tmp_path, sys.executable, SCRIPTS / "vllm_bench.py")


@SOMETIMES
@pytest.mark.parametrize(
    ("kind", "path", "scores"),
    [
        ("local-chat-completions", "chat/completions", {"demo_written": "exact_match"}),
        ("local-completions", "completions", {"demo_written": "exact_match", "demo_chosen": "acc"}),
    ],
)
def test_lm_evaluation_harness(
    kind: str, path: str, scores: dict[str, str], url: str, model: Path, tmp_path: Path
) -> None:
    """The harness counts a prompt's tokens by the model's tokenizer, and reads choices' log-probabilities."""
    write_tasks(tmp_path)
    arguments = f"model=demo,base_url={url}/v1/{path},num_concurrent=4"
    if path == "completions":
        # With its default, `auto`, the harness would find /tokenizer_info here, and mix both tokenizers up.
        arguments += f",tokenizer={model},tokenizer_backend=huggingface"
    tasks = ("--tasks", ",".join(scores), "--include_path", tmp_path, "--apply_chat_template")
    command = (command_of("lm-eval", "lm_eval"), "run", "--model", kind, "--model_args", arguments)
    run(url, tmp_path, *command, *tasks, "--output_path", tmp_path / "out", **OFFLINE)
    results = only_json(tmp_path / "out")["results"]
    assert {task: results[task][f"{name},none"] for task, name in scores.items()} == dict.fromkeys(scores, 1)


@SOMETIMES
def test_guidellm(url: str, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": question, "output_tokens_count": 16}) for question in QUESTIONS * 2]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = {
        "--backend": f"kind=openai_http,target={url},model=demo",
        "--profile": "kind=constant,rate=4",
        "--constraint": "kind=max_requests,count=6",
        "--data": f"kind=json_file,path={tmp_path}/data.jsonl",
        "--output": f"kind=json,path={tmp_path}/out/report.json",
    }
    words = [word for option in options.items() for word in option]
    run(url, tmp_path, command_of("guidellm", "guidellm"), "run", *words, "--disable-console", **OFFLINE)
    requests = only_json(tmp_path / "out")["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"]
    assert {each["output_metrics"]["text_tokens"] for each in requests["successful"]} == {16}


@SOMETIMES
def test_aiperf(url: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in QUESTIONS))
    data = ("--input-file", tmp_path / "data.jsonl", "--custom-dataset-type", "single_turn")
    counts = ("--tokenizer", model, "--use-server-token-count", "--per-chunk-usage")
    load = ("--concurrency", "2", "--request-count", "6", "--extra-inputs", "temperature:0")
    command = (command_of("aiperf", "aiperf"), "profile", "-m", "demo", "-u", url, "--streaming")
    out = tmp_path / "out"
    run(url, tmp_path, *command, *data, *counts, *load, "--ui", "none", "--artifact-dir", out)
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 6 and report["error_summary"] == []
    assert report["usage_completion_tokens"]["min"] > 20


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, url: str, tmp_path: Path) -> None:
    """As it stands in examples, but for the port."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    (tmp_path / "example.py").write_text(text.replace("http://127.0.0.1:8000", url))
    python = python_of("anthropic") if name == "anthropic_messages" else sys.executable
    # one that runs the engine itself finds the kernels which the server has built
    settings = {"PYTHONPATH": str(ROOT), "ALIGNEDSERVE_CACHE_DIR": str(cache_dir())}
    assert EXAMPLES[name] in run(url, tmp_path, python, tmp_path / "example.py", **settings)


def test_each_example_is_tried_and_listed() -> None:
    files = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert files == EXAMPLES.keys()
    listed = (ROOT / "examples/README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in listed for name in files)


def only_json(directory: Path) -> Any:
    (file,) = directory.rglob("*.json")
    return json.loads(file.read_text())
