from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from alignedserve import demo
from alignedserve.cli.predict_lengths import command
from alignedserve.demo.tasks import TASKS


def predict_lengths(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def errors_of(output: str) -> dict[str, float]:
    """Way of predicting -> mean relative error."""
    rows = [line.split("|") for line in output.splitlines() if line.startswith("|")][2:]
    return {row[1].strip(): float(row[3]) for row in rows}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = random.Random(0)
    examples = [TASKS[rng.choice(("count", "add"))].generate(rng) for _ in range(400)]
    path = tmp_path / "asked.jsonl"
    path.write_text(
        "\n".join(json.dumps({"question": each.prompt, "answer": each.answer}) for each in examples) + "\n\n"
    )
    return path


def test_the_demo_tasks_need_no_file() -> None:
    done = predict_lengths("--limit", "600")
    assert done.exit_code == 0, done.output
    assert "480 answers learned, 120 predicted" in done.output and "the demo model's tokens" in done.output
    errors = errors_of(done.output)
    assert errors["predictor"] < 0.7 * errors["class mean"]
    assert "Microseconds per prediction" in done.output


@pytest.mark.parametrize(("tokenizer", "share"), [("words", 0.9), (str(demo.MODEL_DIR), 0.7)])
def test_a_file_of_prompts_and_answers(file: Path, tokenizer: str, share: float) -> None:
    done = predict_lengths(str(file), "--tokenizer", tokenizer, "--train-share", "0.5")
    assert done.exit_code == 0, done.output
    assert "200 answers learned, 200 predicted" in done.output
    errors = errors_of(done.output)
    assert errors["predictor"] < share * errors["class mean"]
    assert {"regression alone", "neighbours, else regression", "class, geometric mean"} < errors.keys()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: must be an object with a text prompt"),
        ('{"prompt": "x"}', "and a text answer"),
        ('{"prompt": 1, "answer": "y"}', "must be an object"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x", "answer": "y"}\n' + line)
    done = predict_lengths(str(path))
    assert done.exit_code == 1 and message in done.stderr


@pytest.mark.parametrize("share", ["0", "1"])
def test_a_share_that_leaves_nothing_is_refused(file: Path, share: str) -> None:
    done = predict_lengths(str(file), "--train-share", share)
    assert done.exit_code == 2 and "--train-share" in done.stderr
