"""`alignedserve bench`: measures the engine, a server, or two servers side by side."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from alignedserve.bench.compare_config import CompareConfig
from alignedserve.bench.config import BenchConfig
from alignedserve.cli.command import Command, Group
from alignedserve.cli.help_groups import BENCH_COMPARE, BENCH_ENGINE, BENCH_SERVE
from alignedserve.cli.options import EngineCommand, engine_options, options_of, writing
from alignedserve.cli.output_file import OutputFile, write_json
from alignedserve.cli.progress import bar, busy, in_terminal

if TYPE_CHECKING:
    from alignedserve import LLM

AT_LEAST_ONE = click.IntRange(min=1)
_GOODPUT = "--goodput"


class GoodputCommand(Command):
    """A command with --goodput, which may be followed by several objectives, as in vLLM."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_one_goodput(args))


def with_one_goodput(args: Sequence[str]) -> list[str]:
    """Returns the arguments with all objectives after --goodput as one. A URL is none."""
    found: list[str] = []
    is_goodput = False
    for arg in args:
        is_objective = is_goodput and not arg.startswith("-") and "//" not in arg
        if is_objective and found[-1] != _GOODPUT:
            found[-1] += f" {arg}"
        else:
            found.append(arg)
            is_goodput = is_objective or arg.partition("=")[0] == _GOODPUT
    return found


class ServerUrl(click.types.StringParamType):
    name = "URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).startswith(("http://", "https://")):
            self.fail(f"{value!r} must begin with http:// or https://", param, ctx)
        return str(value)


@click.group("bench", cls=Group)
def command() -> None:
    """Measure the engine or servers."""


@command.command("engine", cls=EngineCommand, groups=BENCH_ENGINE)
@click.argument("model", required=False)
@click.option("--num-prompts", type=AT_LEAST_ONE, default=32, show_default=True, help="number of prompts")
@click.option("--input-len", type=AT_LEAST_ONE, default=128, show_default=True, help="tokens per prompt")
@click.option("--output-len", type=AT_LEAST_ONE, default=128, show_default=True, help="tokens per answer")
@click.option("--mix", help="a share of longer prompts, as in long=0.125:2048")
@click.option(
    "--runs", type=AT_LEAST_ONE, default=3, show_default=True, help="measured runs after a warm-up run"
)
@click.option("--out", type=OutputFile(), help="file to append the JSON line to")
@engine_options
def engine(
    model: str | None,
    num_prompts: int,
    input_len: int,
    output_len: int,
    mix: str | None,
    runs: int,
    out: Path | None,
    **options: Any,
) -> None:
    """Measure offline generation, without a server.

    Prints the output tokens per second as one JSON line. Prompts are random token ids, and nothing is cached. Without
    MODEL, the demo model is measured.
    """
    from alignedserve import LLM, demo

    lengths = prompt_lengths(num_prompts, input_len, mix)
    model = model or demo.NAME
    with busy("Loading the model"):
        llm = LLM(
            model, **in_terminal(options) | {"skip_tokenizer_init": True, "enable_prefix_caching": False}
        )
    prompts = random_prompts(lengths, llm.engine.vocabulary.size)
    rates = []
    with bar(runs + 1, "Measuring", "run", bool(options["use_tqdm"])) as shown:
        for _ in range(runs + 1):
            rates.append(_rate(llm, prompts, output_len))
            shown.update()
    del rates[0]
    settings = {"model": model, "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    limits = {"max_num_seqs": llm.config.max_num_seqs, "max_model_len": llm.engine.max_model_len}
    rate = {"engine": "alignedserve", "output_tokens_per_s": statistics.median(rates), "rates": rates}
    line = json.dumps({**rate, **settings, **limits, "mix": mix, "runs": runs, "out": out and str(out)})
    click.echo(line)
    if out:
        with writing(out), out.open("a") as file:
            file.write(line + "\n")


@command.command("serve", cls=GoodputCommand, groups=BENCH_SERVE)
@options_of(BenchConfig, without=["plot"])
@click.option("--plot", type=OutputFile(), help="PNG file to draw, with TTFT, TPOT, and attainment over time")
def serve(plot: Path | None, **options: Any) -> None:
    """Measure a server under load.

    Sends requests to an OpenAI-compatible server, and prints times and rates of its answers.
    """
    from alignedserve.bench.figure import figure_class
    from alignedserve.bench.run import run

    if plot:
        figure_class()
    found = run(BenchConfig(**options, plot=str(plot) if plot else None), click.echo)
    if not found["completed"]:
        raise click.ClickException("no request was answered")


@command.command("compare", cls=GoodputCommand, groups=BENCH_COMPARE)
@click.argument("urls", nargs=-1, required=True, metavar="URL URL", type=ServerUrl())
@options_of(CompareConfig)
@click.option("--output", type=OutputFile(), help="JSON file to write, with all settings and figures")
@click.option(
    "--plot", type=OutputFile(), help="PNG file to draw, with chat and batch figures of each server"
)
def compare(urls: tuple[str, ...], output: Path | None, plot: Path | None, **options: Any) -> None:
    """Compare servers at chat alone and at chat beside a batch job.

    Each URL is that of an OpenAI-compatible server. The servers get the same requests, one server after the other, and
    a few before anything is measured. On a server without a batch API, best effort is sent as plain requests.
    """
    from alignedserve.bench.compare import measure, remarks, servers_of, table, verdict, warm_up
    from alignedserve.bench.figure import figure_class

    if len(urls) < 2:
        raise click.UsageError("give the URLs of at least two servers")
    if plot:
        figure_class()
    config = CompareConfig(**options)
    servers = servers_of(config, urls, os.environ.get("OPENAI_API_KEY"))
    models = []
    for server in servers:
        with busy(f"Warming up {server.label}"):
            models.append(asyncio.run(warm_up(config, server)))
    found = []
    for server, model in zip(servers, models, strict=True):
        found.append(
            asyncio.run(measure(config, server, model, lambda total, title: bar(total, title, "req")))
        )
        if not sys.stderr.isatty():
            click.echo(f"{server.label}: measured", err=True)
    for line in (*table(found), "", *remarks(found, config), verdict(found)):
        click.echo(line)
    if output:
        settings = {name: value for name, value in options.items() if name != "api_key"}
        whole = {"settings": settings, "servers": [each.as_dict() for each in found]}
        with writing(output):
            write_json(output, whole)
    if plot:
        from alignedserve.bench.compare_plot import draw

        with writing(plot):
            draw(found, plot)
    if not all(each.alone.completed and each.beside.completed for each in found):
        raise click.ClickException("a server answered no request")


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
