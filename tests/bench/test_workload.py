"""What is asked, and when."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from alignedserve import demo
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.workload import arrival_times, choose_tiers, make_workload
from alignedserve.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)


def config(**options: Any) -> BenchConfig:
    return BenchConfig(**{"num_prompts": 20} | options)


def variation(burstiness: float) -> float:
    """Of the gaps: standard deviation over mean."""
    times = arrival_times(4000, 50.0, burstiness, random.Random(1))
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.stdev(gaps) / statistics.mean(gaps)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_the_burstiness_says(burstiness: float) -> None:
    assert variation(burstiness) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_the_rate_is_the_one_that_was_asked_for(burstiness: float) -> None:
    times = arrival_times(100, 20.0, burstiness, random.Random(3))
    assert times == sorted(times) and times[-1] == pytest.approx(5.0)


def test_a_steady_beat_and_all_at_once() -> None:
    rng = random.Random(0)
    assert arrival_times(4, 2.0, math.inf, rng) == [0.0, 0.5, 1.0, 1.5]
    assert arrival_times(3, math.inf, 1.0, rng) == [0.0, 0.0, 0.0]


def test_a_share_is_exact_and_mixed() -> None:
    tiers = choose_tiers(100, 0.3, random.Random(0))
    assert tiers.count("be") == 30 and tiers.index("be") < 20 < 80 < len(tiers) - tiers[::-1].index("be")


def test_the_seed_decides_everything() -> None:
    one, same, other = (make_workload(config(request_rate=5.0, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_random_prompts_have_as_many_tokens_as_they_should() -> None:
    items = make_workload(config(tokenizer=str(demo.MODEL_DIR), random_input_len=100, random_range_ratio=0.5))
    assert all(len(item.prompt) == item.prompt_len and 50 <= item.prompt_len <= 150 for item in items)
    assert len({item.prompt_len for item in items}) > 5
    assert all(item.max_tokens and 64 <= item.max_tokens <= 192 for item in items)
    (chat, *_) = make_workload(
        config(tokenizer=str(demo.MODEL_DIR), random_input_len=50, backend="openai-chat")
    )
    assert isinstance(chat.prompt, list) and isinstance(chat.prompt[0], dict)
    assert len(TOKENIZER.encode(chat.prompt[0]["content"])) == 50


def test_prompts_of_a_file_come_again_when_they_are_few(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 7}\n\n{"prompt": "b", "answer": "B"}\n')
    items = make_workload(config(dataset_name="custom", dataset_path=str(path), num_prompts=3))
    assert [(item.prompt, item.max_tokens, item.answer) for item in items] == [
        ("a", 7, None),
        ("b", 256, "B"),
        ("a", 7, None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no prompts"), ("{\n", "line 1: is not JSON"), ('{"prompt": "a"}\n{}\n', "line 2: must be")],
)
def test_a_file_without_prompts_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        make_workload(config(dataset_name="custom", dataset_path=str(path)))


def test_demo_tasks_have_answers_and_are_chats() -> None:
    items = make_workload(config(dataset_name="demo"))
    assert all(item.answer for item in items)
    assert all(isinstance(item.prompt[0], dict) for item in items)


def test_a_trace_keeps_its_own_time_at_its_own_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2024-05-10 00:00:0{second}.0,{10 + second},{second + 1}" for second in (0, 2, 6)]
    path.write_text("\n".join(rows))
    items = make_workload(config(dataset_name="azure", dataset_path=str(path), trace_speed=2.0))
    assert [(item.due_s, item.prompt_len, item.max_tokens) for item in items] == [
        (0.0, 10, 1),
        (1.0, 12, 3),
        (3.0, 16, 7),
    ]
    steady = make_workload(
        config(dataset_name="azure", dataset_path=str(path), request_rate=4.0, burstiness=math.inf)
    )
    assert [item.due_s for item in steady] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "sharegpt"}, "dataset_name='sharegpt': must be one of random, custom, demo, azure"),
        ({"dataset_name": "azure"}, "dataset_path: azure needs one"),
        ({"goodput": "ttft:x"}, "goodput='ttft:x': must look like ttft:200"),
        ({"goodput": "tbt:5"}, "goodput='tbt': must be one of ttft, tpot, e2el"),
        ({"num_prompts": 0}, "num_prompts=0: must be above 0"),
        ({"request_rate": 0.0}, "request_rate=0.0: must be above 0"),
        ({"be_share": 1.5}, "be_share=1.5: must be in \\[0, 1\\]"),
        ({"metric_percentiles": "50,x"}, "metric_percentiles='50,x': must be numbers"),
    ],
)
def test_what_can_not_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


@pytest.mark.parametrize(
    ("options", "model", "expected"),
    [
        ({}, "demo", "demo"),
        ({}, "other", "random"),
        ({"dataset_name": "random"}, "demo", "random"),
        ({"random_input_len": 10}, "demo", "random"),
        ({"tokenizer": "DIR"}, "demo", "random"),
        ({"dataset_name": "demo"}, "other", "demo"),
    ],
)
def test_the_demo_model_gets_its_tasks_unless_other_prompts_were_chosen(
    options: dict[str, Any], model: str, expected: str
) -> None:
    assert config(**options).dataset_for(model) == expected
