"""Makes the requests of a run and their arrival times from the seed, before anything is sent."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.bench.config import BenchConfig
from alignedserve.demo.tasks import TASKS
from alignedserve.demo.words import any_word
from alignedserve.sim.trace import Arrival, Lengths, cut, read_azure_trace
from alignedserve.text.tokenizer import Tokenizer

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Item:
    # Seconds after the start of the run.
    due_s: float
    # "rt" or "be".
    tier: str
    prompt: str | list[int] | Messages
    # Maximum output tokens; None lets the model end the answer.
    max_tokens: int | None
    # Prompt tokens, as far as they are known before the server reports them.
    prompt_len: int
    # The correct answer, if there is one.
    answer: str | None = None


@dataclass(frozen=True)
class _Question:
    prompt: str | list[int] | Messages
    max_tokens: int | None
    prompt_len: int = 0
    answer: str | None = None


def make_workload(config: BenchConfig) -> list[Item]:
    """Returns the requests of a run. Raises ValueError for an unusable file."""
    rng = random.Random(config.seed)
    tokenizer = _read_tokenizer(config.tokenizer) if config.tokenizer else None
    trace = _read_trace(config) if config.dataset_name == "azure" else None
    questions = _questions(config, rng, tokenizer, trace)
    times = _times(config, rng, len(questions), trace)
    tiers = choose_tiers(len(questions), config.be_share, rng)
    return [
        Item(time_s, tier, each.prompt, each.max_tokens, each.prompt_len, each.answer)
        for time_s, tier, each in zip(times, tiers, questions, strict=True)
    ]


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Returns arrival times in seconds, with Gamma-distributed gaps.

    A burstiness of 1 is Poisson, less is burstier, more is steadier. The times are scaled so that the run has exactly
    the requested rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [number / rate for number in range(count)]
    times = list(itertools.accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(count)))
    return [time_s * count / rate / times[-1] for time_s in times]


def choose_tiers(count: int, be_share: float, rng: random.Random) -> list[str]:
    """Returns tiers in random order, with exactly this share of best effort."""
    num_be = round(count * be_share)
    tiers = ["be"] * num_be + ["rt"] * (count - num_be)
    rng.shuffle(tiers)
    return tiers


def _times(config: BenchConfig, rng: random.Random, count: int, trace: list[Arrival] | None) -> list[float]:
    if trace is not None and math.isinf(config.request_rate):
        return [arrival.time_s / config.trace_speed for arrival in trace]
    return arrival_times(count, config.request_rate, config.burstiness, rng)


def _read_tokenizer(directory: str) -> Tokenizer:
    try:
        return Tokenizer.from_directory(directory)
    except ValueError as error:
        raise ValueError(f"tokenizer={directory!r}: {error}") from None


def _read_trace(config: BenchConfig) -> list[Arrival]:
    assert config.dataset_path
    return cut(read_azure_trace(Path(config.dataset_path)), config.num_prompts)


def _questions(
    config: BenchConfig, rng: random.Random, tokenizer: Tokenizer | None, trace: list[Arrival] | None
) -> list[_Question]:
    if config.dataset_name == "custom":
        return _read_jsonl(config)
    if config.dataset_name == "demo":
        return [_task(config, rng) for _ in range(config.num_prompts)]
    lengths = [arrival.lengths for arrival in trace] if trace is not None else _lengths(config, rng)
    return [_random_question(config, rng, tokenizer, each) for each in lengths]


def _lengths(config: BenchConfig, rng: random.Random) -> list[Lengths]:
    def vary(length: int) -> int:
        spread = config.random_range_ratio
        return max(1, rng.randint(math.floor(length * (1 - spread)), math.ceil(length * (1 + spread))))

    return [
        Lengths(vary(config.random_input_len), vary(config.random_output_len))
        for _ in range(config.num_prompts)
    ]


def _random_question(
    config: BenchConfig, rng: random.Random, tokenizer: Tokenizer | None, lengths: Lengths
) -> _Question:
    is_chat = config.kind == "openai-chat"
    if tokenizer is not None and not is_chat:
        return _Question(_random_ids(rng, tokenizer, lengths.prompt), lengths.output, lengths.prompt)
    text = " ".join(any_word(rng) for _ in range(lengths.prompt))
    if tokenizer is not None:
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[: lengths.prompt])
    return _Question(_user_says(text) if is_chat else text, lengths.output, lengths.prompt)


def _random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    special = tokenizer.special_ids
    ids: list[int] = []
    while len(ids) < length:
        token_id = rng.randrange(tokenizer.vocab_size)
        if token_id not in special:
            ids.append(token_id)
    return ids


def _task(config: BenchConfig, rng: random.Random) -> _Question:
    example = TASKS[rng.choice(list(TASKS))].generate(rng, held_out=True)
    prompt: str | Messages = example.prompt if config.kind == "openai" else _user_says(example.prompt)
    return _Question(prompt, None if config.kind == "openai-chat" else 512, answer=example.answer)


def _read_jsonl(config: BenchConfig) -> list[_Question]:
    """Returns the needed number of questions. A file with fewer is repeated."""
    assert config.dataset_path
    path = Path(config.dataset_path)
    read = [_row(line, f"{path}, line {number}", config) for number, line in _rows(path)]
    if not read:
        raise ValueError(f"{path}: holds no prompts")
    end = config.num_skipped + config.num_prompts
    return list(itertools.islice(itertools.cycle(read), config.num_skipped, end))


def count_prompts(path: Path) -> int:
    """Returns the number of prompts in a custom file."""
    return sum(1 for _ in _rows(path))


def _rows(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines that are not empty, with their numbers."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not text: {error}"
        raise ValueError(f"dataset_path={str(path)!r}: {reason}") from None
    yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _row(line: str, where: str, config: BenchConfig) -> _Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt", row.get("messages")), str | list):
        raise ValueError(f'{where}: must be an object with a "prompt" or "messages"')
    max_tokens = row.get("output_tokens", config.custom_output_len)
    if config.kind == "openai-chat":
        return _Question(
            row.get("messages") or _user_says(row["prompt"]), max_tokens, answer=row.get("answer")
        )
    if "prompt" not in row:
        raise ValueError(f"{where}: messages need --backend openai-chat")
    return _Question(row["prompt"], max_tokens, answer=row.get("answer"))


def _user_says(text: str) -> Messages:
    return [{"role": "user", "content": text}]
