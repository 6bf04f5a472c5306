"""Prompts and answers in a file, from which a predictor learns lengths before it serves. ALISE fills its database so.

Each line of the file is a JSON object with a prompt and an answer, under names that common data sets use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.lengths.predictor import Predictor
from alignedserve.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "question", "instruction")
ANSWER_KEYS = ("answer", "completion", "output", "response")
# A longer line is an error: a file without line ends would otherwise be read whole.
MAX_LINE_BYTES = 16 << 20
# A file has neither the length limits nor the classes of its answers.
UNLIMITED = SamplingParams(max_tokens=None)
TIER = "rt"


@dataclass(frozen=True)
class Example:
    prompt: str
    answer: str
    # The file and the line, for errors.
    where: str


def examples(file: Path) -> Iterator[Example]:
    """Yields the examples of a file while it is read. Raises ValueError for the first line that is not an example."""
    number = 0
    try:
        with file.open("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{file}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{where}: more than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield _example(line, where)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error


def learn(predictor: Predictor, prompt: Sequence[int], length: int) -> bool:
    """Learns the length of the answer to this prompt, its last token included.

    Returns False and learns nothing if both together exceed the model's length: the model could not give such an
    answer.
    """
    if len(prompt) + length > predictor.max_model_len:
        return False
    predictor.learn(predictor.predict(prompt, UNLIMITED, TIER), length, "stop")
    return True


def _example(line: bytes, where: str) -> Example:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None
    prompt, answer = (_text(found, keys) for keys in (PROMPT_KEYS, ANSWER_KEYS))
    if prompt is None or answer is None:
        raise ValueError(
            f"{where}: must be an object with a text {' or '.join(PROMPT_KEYS)}, and a text {' or '.join(ANSWER_KEYS)}"
        )
    return Example(prompt, answer, where)


def _text(found: Any, keys: Sequence[str]) -> str | None:
    values = [found[key] for key in keys if key in found] if isinstance(found, dict) else []
    return values[0] if values and isinstance(values[0], str) else None
