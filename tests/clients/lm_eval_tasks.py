"""Tasks for lm-evaluation-harness made from the demo model's own: answers that it writes, and answers that it
chooses."""

from __future__ import annotations

import json
import random
from pathlib import Path

from alignedserve.demo.tasks import TASKS

# Those that the model answers without mistakes, so that a wrong answer is the server's fault.
NAMES = ("count", "spell", "days", "alphabet")
NUM_EXAMPLES = 5
NUM_CHOICES = 3
# An answer may be the beginning of another one. Its end distinguishes them.
END = "<|end|>"

# JSON is also YAML.
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
}
WRITTEN = {
    "task": "demo_written",
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 200, "temperature": 0.0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
CHOSEN = {
    "task": "demo_chosen",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{place}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def write_tasks(directory: Path) -> None:
    docs = "\n".join(map(json.dumps, _docs(random.Random(0)))) + "\n"
    data = directory / "docs.jsonl"
    data.write_text(docs)
    files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    for task in (WRITTEN, CHOSEN):
        (directory / f"{task['task']}.yaml").write_text(json.dumps(COMMON | files | task))


def _docs(dice: random.Random) -> list[dict[str, object]]:
    docs: list[dict[str, object]] = []
    for name in NAMES:
        examples = [TASKS[name].generate(dice) for _ in range(NUM_EXAMPLES)]
        for example in examples:
            others = sorted({each.answer for each in examples} - {example.answer})
            answers = [example.answer, *dice.sample(others, NUM_CHOICES - 1)]
            dice.shuffle(answers)
            docs.append(
                {
                    "question": example.prompt,
                    "answer": example.answer,
                    "choices": [each + END for each in answers],
                    "place": answers.index(example.answer),
                }
            )
    return docs
