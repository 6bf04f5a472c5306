"""`alignedserve predict-lengths`: measures how well the length predictor works on some data."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from alignedserve.cli.command import Command, OneOf
from alignedserve.cli.progress import busy

if TYPE_CHECKING:
    from alignedserve.lengths.evaluate import AnsweredPrompt, Evaluation
    from alignedserve.text.tokenizer import Tokenizer

WORDS = "words"
_WORD = re.compile(r"\w+|[^\w\s]")


@click.command("predict-lengths", cls=Command)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--encoder",
    type=OneOf(("hash", "sentence")),
    default="hash",
    show_default=True,
    help="encoder of prompts; sentence uses embeddings",
)
@click.option(
    "--encoder-model", help="model for --encoder sentence, a directory or a name [default: all-MiniLM-L6-v2]"
)
@click.option(
    "--tokenizer",
    default=WORDS,
    show_default=True,
    help="a model's directory, or words to count words and punctuation marks",
)
@click.option(
    "--train-share",
    type=click.FloatRange(0, 1),
    default=0.8,
    show_default=True,
    help="share of the answers to learn from; the others are predicted",
)
@click.option("--limit", type=click.IntRange(min=1), help="maximum number of answers to use [default: all]")
@click.option("--seed", default=0, show_default=True, help="seed of the order")
def command(
    file: Path | None,
    encoder: str,
    encoder_model: str | None,
    tokenizer: str,
    train_share: float,
    limit: int | None,
    seed: int,
) -> None:
    """Learn answer lengths from a part of FILE, and predict those of the rest.

    Each line of FILE is a JSON object with a prompt and an answer. Without FILE, the demo model's tasks are used, with
    its tokenizer.
    """
    from alignedserve.lengths.evaluate import evaluate
    from alignedserve.lengths.predictor import Predictor, make_encoder

    if file is None:
        data, decode, counted = _demo_tasks(limit or 5000, seed)
    else:
        data, decode, counted = _read(file, tokenizer)
        random.Random(seed).shuffle(data)
    longest = max((len(each.prompt) + each.length for each in data), default=0)
    predictor = Predictor(make_encoder(encoder, encoder_model, decode), longest + 1)
    with busy("Learning and predicting"):
        found = evaluate(predictor, data[:limit], train_share)
    _print(found, counted, predictor.encoder.name)


Data = tuple[list["AnsweredPrompt"], Callable[[Sequence[int]], str], str]


def _demo_tasks(count: int, seed: int) -> Data:
    from alignedserve import demo
    from alignedserve.demo.tasks import TASKS, expected_output_len
    from alignedserve.lengths.evaluate import AnsweredPrompt
    from alignedserve.text.tokenizer import Tokenizer

    tokenizer, rng = Tokenizer.from_directory(demo.MODEL_DIR), random.Random(seed)
    examples = [rng.choice(list(TASKS.values())).generate(rng) for _ in range(count)]
    data = [
        AnsweredPrompt(
            tokenizer.chat_ids([{"role": "user", "content": each.prompt}]), expected_output_len(each)
        )
        for each in examples
    ]
    return data, tokenizer.decode, "the demo model's tokens"


def _read(file: Path, name: str) -> Data:
    from alignedserve.lengths.corpus import examples
    from alignedserve.lengths.evaluate import AnsweredPrompt
    from alignedserve.text.tokenizer import Tokenizer

    found = list(examples(file))
    if name == WORDS:
        words = _Words()
        encode: Callable[[str], list[int]] = words.encode
        decode: Callable[[Sequence[int]], str] = words.decode
    else:
        tokenizer = Tokenizer.from_directory(name)
        encode, decode = _plain(tokenizer), tokenizer.decode
    data = [AnsweredPrompt(encode(each.prompt), len(encode(each.answer)) + 1) for each in found]
    return data, decode, f"tokens of {name}" if name != WORDS else "words and punctuation marks"


def _plain(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


class _Words:
    """A tokenizer with one token per word, for use without a model."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        words = _WORD.findall(text)
        ids = [zlib.crc32(word.lower().encode()) for word in words]
        self._texts.update(zip(ids, words, strict=True))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._texts[each] for each in ids)


def _print(found: Evaluation, counted: str, encoder: str) -> None:
    click.echo(
        f"{found.num_learned} answers learned, {found.num_predicted} predicted; "
        f"lengths in {counted}, encoder {encoder}\n"
    )
    click.echo("| predicted by | accuracy in 10 bins | mean relative error | median relative error |")
    click.echo("| --- | ---: | ---: | ---: |")
    for name, score in found.scores.items():
        click.echo(
            f"| {name} | {100 * score.accuracy:.1f} % | {score.mean_error:.3f} | {score.median_error:.3f} |"
        )
    sources = ", ".join(f"{count} by {source}" for source, count in sorted(found.sources.items()))
    click.echo(f"\nThe predictor's sources: {sources}")
    for what, (median, p99) in (("prediction", found.predict_us), ("learning", found.learn_us)):
        click.echo(f"Microseconds per {what}: {median:.0f} (median), {p99:.0f} (p99)")
    best = min(found.scores, key=lambda name: found.scores[name].mean_error)
    click.echo(f"\nThe smallest mean error is that of: {best}")
