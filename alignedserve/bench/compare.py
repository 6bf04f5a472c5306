"""Compares servers: chat alone, and chat beside a batch job.

Every server gets the same requests. All of them answer a few requests first: what a first request costs, such as a
compilation, is not measured. Then one server is measured after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from tqdm import tqdm

from alignedserve.bench.best_effort import BestEffortLoad, first_line, start_best_effort
from alignedserve.bench.client import Client, RequestOutcome, first_model
from alignedserve.bench.compare_config import ALONE, BESIDE, WARM_UP, CompareConfig
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.results import Results, evaluate
from alignedserve.bench.run import http_client
from alignedserve.bench.workload import count_prompts, make_workload

PERCENTILES = (50.0, 99.0)
# With this number of requests or fewer, p99 lies between the two slowest.
_FEW = 100
COLUMNS = (
    "server",
    "chat",
    "answered",
    "in time",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "batch lines/s",
)

MakeBar = Callable[[int, str], "tqdm[Any]"]


@dataclass(frozen=True)
class ComparedServer:
    label: str
    url: str
    api_key: str | None


@dataclass(frozen=True)
class MeasuredServer:
    """What was measured on one server."""

    server: ComparedServer
    model: str
    alone: Results
    beside: Results
    # Answered lines of best effort per second, while chat ran; None: all lines had ended before chat did.
    lines_per_s: float | None
    has_batch_api: bool
    # The first error of chat requests; None: there was none.
    error: str | None
    # Why the batch job or its files may still be on the server; None: they are not.
    left_behind: str | None = None

    @property
    def has_job_lasted(self) -> bool:
        return self.lines_per_s is not None

    @property
    def runs(self) -> dict[str, Results]:
        return {"alone": self.alone, "beside batch": self.beside}

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self) | {"has_job_lasted": self.has_job_lasted}
        del found["server"]["api_key"]
        return found


def servers_of(config: CompareConfig, urls: Sequence[str], default_key: str | None) -> list[ComparedServer]:
    """Raises ValueError unless there are labels and keys for all or none of the servers."""
    bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
    for name in ("label", "api_key"):
        count = len(getattr(config, name))
        if count not in (0, len(urls)) and not (name == "api_key" and count == 1):
            raise ValueError(f"{name}: {count} given for {len(urls)} servers")
    labels = config.label or [urlsplit(url).netloc for url in bases]
    keys: list[str | None] = [*config.api_key] or [default_key]
    keys = keys if len(keys) == len(bases) else len(bases) * keys
    return [ComparedServer(*each) for each in zip(labels, bases, keys, strict=True)]


async def warm_up(config: CompareConfig, server: ComparedServer) -> str:
    """Sends a few requests to the server, and returns the name of its model. Raises ValueError if it answers none."""
    async with _connected(config, server) as http:
        model = config.model or await first_model(http, server.url)
        chat = config.chat(server.url, WARM_UP)
        outcomes, _ = await Client(chat, http, model).run(make_workload(chat))
    if all(each.error for each in outcomes):
        raise ValueError(f"{server.url}: answers no chat request: {outcomes[0].error}")
    return model


async def measure(
    config: CompareConfig, server: ComparedServer, model: str, make_bar: MakeBar
) -> MeasuredServer:
    """Measures one server. Raises ValueError if it can't be used."""
    async with _connected(config, server) as http:
        return await _measure(config, server, model, http, make_bar)


@asynccontextmanager
async def _connected(config: CompareConfig, server: ComparedServer) -> AsyncIterator[httpx2.AsyncClient]:
    try:
        async with http_client(config.request_timeout_s, server.api_key) as http:
            yield http
    except httpx2.HTTPError as error:
        raise ValueError(f"{server.url}: {error or type(error).__name__}") from None


async def _measure(
    config: CompareConfig, server: ComparedServer, model: str, http: httpx2.AsyncClient, make_bar: MakeBar
) -> MeasuredServer:
    alone, beside = config.chat(server.url, ALONE), config.chat(server.url, BESIDE)
    first = await _chat(alone, http, model, f"{server.label} alone", make_bar)
    bodies = _bodies(config.job(server.url), model)
    load, has_batch_api = await start_best_effort(http, server.url, bodies, config.job_concurrency)
    try:
        await first_line(load, server.url, config.request_timeout_s)
        await asyncio.sleep(config.job_warmup_s)
        num_before, begun_s = await load.num_done(), time.perf_counter()
        second = await _chat(beside, http, model, f"{server.label} beside batch", make_bar)
        num_done, passed_s = await load.num_done(), time.perf_counter() - begun_s
        has_job_lasted = await load.is_going_on()
    finally:
        # Also after an interruption.
        left_behind = await _stop(load)
    outcomes = [*first[0], *second[0]]
    return MeasuredServer(
        server,
        model,
        evaluate(*first, alone.objectives, PERCENTILES),
        evaluate(*second, beside.objectives, PERCENTILES),
        (num_done - num_before) / passed_s if has_job_lasted else None,
        has_batch_api,
        next((each.error for each in outcomes if each.error), None),
        left_behind,
    )


async def _stop(load: BestEffortLoad) -> str | None:
    """Returns why the load could not be stopped; None if it was. The measurement stands, or another error is on its
    way."""
    try:
        await load.stop()
    except (httpx2.HTTPError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


async def _chat(
    config: BenchConfig, http: httpx2.AsyncClient, model: str, title: str, make_bar: MakeBar
) -> tuple[list[RequestOutcome], float]:
    items = make_workload(config)
    with make_bar(len(items), title) as bar:
        return await Client(config, http, model).run(items, lambda outcome: bar.update())


def _bodies(config: BenchConfig, model: str) -> list[dict[str, Any]]:
    """Returns the bodies of the job's lines."""
    body: dict[str, Any] = {"model": model}
    if config.temperature is not None:
        body["temperature"] = config.temperature
    if config.ignore_eos:
        body["ignore_eos"] = True
    return [
        {**body, "messages": item.prompt, "max_tokens": item.max_tokens} for item in make_workload(config)
    ]


# ---- the report ----


def table(found: Sequence[MeasuredServer]) -> Iterator[str]:
    """Yields the lines of a table, two rows for each server. Times are in milliseconds."""
    rows = [row for each in found for row in _rows(each)]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    yield _line(COLUMNS, widths)
    yield _line(
        ["-" * width if place < 2 else "-" * (width - 1) + ":" for place, width in enumerate(widths)], widths
    )
    for row in rows:
        yield _line(row, widths)


def _rows(found: MeasuredServer) -> Iterator[list[str]]:
    for name, run in found.runs.items():
        ttft, tpot = (dict(run.summaries[each].percentiles) for each in ("ttft", "tpot"))
        yield [
            found.server.label,
            name,
            f"{run.completed}/{run.completed + run.failed}",
            f"{100 * run.attainment['rt']:.1f} %",
            *(f"{times[percent]:.0f}" for times in (ttft, tpot) for percent in PERCENTILES),
            "-" if run is found.alone or found.lines_per_s is None else f"{found.lines_per_s:.2f}",
        ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def remarks(found: Sequence[MeasuredServer], config: CompareConfig) -> Iterator[str]:
    """Yields what a reader of the table has to know."""
    for each in found:
        label = each.server.label
        if not each.has_batch_api:
            yield (
                f"{label} has no batch API: best effort was sent as plain requests, {config.job_concurrency} at a time"
            )
        if not each.has_job_lasted:
            yield f"{label}: all {config.job_lines} lines were answered or refused before chat ended; raise --job-lines"
        if each.error:
            yield f"{label}: chat requests failed, the first with: {each.error}"
        if each.left_behind:
            yield f"{label}: the batch job or its files may still be there: {each.left_behind}"
    fewest = min(run.completed for each in found for run in each.runs.values())
    if fewest <= _FEW:
        yield f"p99 of {fewest} requests is nearly their maximum; raise --num-prompts to measure the tail"
    if config.dataset_name == "custom" and config.dataset_path is not None:
        num_prompts = count_prompts(Path(config.dataset_path))
        if num_prompts < config.num_chats:
            yield (
                f"{config.dataset_path} holds {num_prompts} prompts for {config.num_chats} requests: a prefix cache "
                "may hold those that repeat"
            )


def verdict(found: Sequence[MeasuredServer]) -> str:
    """Returns the result in one sentence, if there is one."""
    if short := [each.server.label for each in found if not each.has_job_lasted]:
        return f"No verdict: chat ran beside no job for some of the time on {' and '.join(short)}."
    in_time = ", ".join(
        f"{100 * each.beside.attainment['rt']:.1f} % on {each.server.label}" for each in found
    )
    lines = ", ".join(f"{each.lines_per_s or 0:.2f} on {each.server.label}" for each in found)
    return f"Beside the batch job, chat is in time for {in_time}; batch lines per second: {lines}."
