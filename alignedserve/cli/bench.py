"""`alignedserve bench`: measures, and prints one JSON line."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from alignedserve.bench.config import BenchConfig
from alignedserve.cli.options import engine_options, options_of, writing
from alignedserve.cli.output_file import OutputFile

if TYPE_CHECKING:
    from alignedserve import LLM

AT_LEAST_ONE = click.IntRange(min=1)


@click.group("bench")
def command() -> None:
    """Measure the engine, or any server."""


@command.command("engine")
@click.argument("model")
@click.option("--num-prompts", type=AT_LEAST_ONE, default=32, show_default=True)
@click.option("--input-len", type=AT_LEAST_ONE, default=128, show_default=True, help="prompt tokens")
@click.option("--output-len", type=AT_LEAST_ONE, default=128, show_default=True, help="output tokens")
@click.option("--mix", help="long=SHARE:TOKENS, e.g. long=0.125:2048: some prompts are longer")
@click.option(
    "--runs", type=AT_LEAST_ONE, default=3, show_default=True, help="measured runs, after one to warm up"
)
@click.option("--out", type=OutputFile(), help="append the JSON line to this file too")
@engine_options
def engine(
    model: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    mix: str | None,
    runs: int,
    out: Path | None,
    **options: Any,
) -> None:
    """Output tokens per second of offline generation on random token ids, the same in each run: nothing is cached."""
    from alignedserve import LLM

    lengths = prompt_lengths(num_prompts, input_len, mix)
    llm = LLM(model, **{**options, "skip_tokenizer_init": True, "enable_prefix_caching": False})
    prompts = random_prompts(lengths, llm.engine.vocabulary.size)
    rates = [_rate(llm, prompts, output_len) for _ in range(runs + 1)][1:]
    settings = {"model": model, "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    limits = {"max_num_seqs": llm.config.max_num_seqs, "max_model_len": llm.engine.max_model_len}
    rate = {"engine": "alignedserve", "output_tokens_per_s": statistics.median(rates), "rates": rates}
    line = json.dumps({**rate, **settings, **limits, "mix": mix, "runs": runs, "out": out and str(out)})
    click.echo(line)
    if out:
        with writing(out), out.open("a") as file:
            file.write(line + "\n")


@command.command("serve")
@click.argument("more_goodput", nargs=-1, metavar="")
@options_of(BenchConfig)
def serve(more_goodput: tuple[str, ...], **options: Any) -> None:
    """Send requests to an OpenAI-compatible server and measure its answers."""
    from alignedserve.bench.run import run

    if more_goodput:
        # For "--goodput ttft:200 tpot:50" click takes only the first value as part of the option.
        if options["goodput"] is None:
            raise click.UsageError(f"unexpected {' '.join(more_goodput)}")
        options["goodput"] = " ".join([options["goodput"], *more_goodput])
    found = run(BenchConfig(**options), click.echo)
    if not found["completed"]:
        raise click.ClickException("no request was answered")


def prompt_lengths(num_prompts: int, input_len: int, mix: str | None) -> list[int]:
    share, length = 0.0, 0
    if mix:
        try:
            parts = mix.removeprefix("long=").split(":")
            share, length = float(parts[0]), int(parts[1])
        except (ValueError, IndexError):
            raise ValueError(f"mix={mix!r}: must look like long=0.125:2048") from None
        if not 0 <= share <= 1:
            raise ValueError(f"mix={mix!r}: the share must be from 0 to 1")
    num_long = round(num_prompts * share)
    return [length] * num_long + [input_len] * (num_prompts - num_long)


def random_prompts(lengths: list[int], vocab_size: int) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    shuffled = list(lengths)
    rng.shuffle(shuffled)
    top = min(30000, vocab_size)
    return [{"prompt_token_ids": [rng.randrange(5, top) for _ in range(length)]} for length in shuffled]


def _rate(llm: LLM, prompts: Sequence[dict[str, list[int]]], output_len: int) -> float:
    from alignedserve import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds
