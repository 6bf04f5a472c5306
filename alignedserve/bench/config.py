"""The settings of `alignedserve bench serve`, with vLLM's names. The text beside a field is its help."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "custom", "demo", "azure")
METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class BenchConfig:
    base_url: Annotated[str | None, "of the server [default: http://HOST:PORT]"] = None
    host: Annotated[str, "of the server"] = "127.0.0.1"
    port: Annotated[int, "of the server"] = 8000
    backend: Annotated[
        str | None, "openai (completions) or openai-chat [default: openai; for demo tasks, chat]"
    ] = None
    endpoint: Annotated[str | None, "path on the server [default: the backend's]"] = None
    model: Annotated[str | None, "its name to the server [default: the first that it lists]"] = None
    tokenizer: Annotated[
        str | None, "directory of the model's tokenizer: random prompts then have exactly so many tokens"
    ] = None
    api_key: Annotated[str | None, "[default: OPENAI_API_KEY of the environment]"] = None

    dataset_name: Annotated[
        str, "random, custom (a JSONL of prompts), demo (tasks; answers are checked) or azure"
    ] = "random"
    dataset_path: Annotated[str | None, "of custom and azure"] = None
    num_prompts: Annotated[int, "requests to send"] = 1000
    random_input_len: Annotated[int, "tokens of a random prompt"] = 1024
    random_output_len: Annotated[int, "tokens of the answer to one"] = 128
    random_range_ratio: Annotated[
        float, "both vary by so much, evenly: from len*(1-ratio) to len*(1+ratio)"
    ] = 0.0
    custom_output_len: Annotated[int, "tokens of an answer where the JSONL has no output_tokens"] = 256
    be_share: Annotated[float, "of the requests that are best effort (service_tier=flex)"] = 0.0

    request_rate: Annotated[float, "requests per second; inf: all at once"] = math.inf
    burstiness: Annotated[
        float, "of arrivals: 1 is Poisson, below it comes in bursts, inf is a steady beat"
    ] = 1.0
    trace_speed: Annotated[float, "of an azure trace's own arrivals, where no request rate is given"] = 1.0
    max_concurrency: Annotated[int | None, "more than so many wait here [default: none do]"] = None

    temperature: Annotated[float | None, "[default: the server's]"] = None
    ignore_eos: Annotated[bool, "answers go on to their full length; not every server knows it"] = False
    request_timeout_s: Annotated[float, "an answer that is not complete after so long is a failure"] = 600.0
    seed: Annotated[int, "of lengths, arrivals and prompts"] = 0

    goodput: Annotated[
        str | None,
        'objectives in ms, e.g. "ttft:200 tpot:50 e2el:5000"; best effort has none but to be answered',
    ] = None
    percentile_metrics: Annotated[str, "metrics to report"] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, "of each of them"] = "99"
    save_result: Annotated[bool, "write a JSON file"] = False
    save_detailed: Annotated[bool, "with every request's figures, text and error"] = False
    result_dir: Annotated[str | None, "where to [default: here]"] = None
    result_filename: Annotated[str | None, "[default: made of label, rate, model and date]"] = None
    label: Annotated[str | None, "kept with the result [default: the backend]"] = None
    plot: Annotated[str | None, "PNG to draw: TTFT, TPOT, and attainment over time"] = None
    disable_tqdm: Annotated[bool, "no progress bar"] = False

    def __post_init__(self) -> None:
        if self.backend is not None:
            _one_of("backend", self.backend, BACKENDS)
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={self.base_url!r}: must begin with http:// or https://")
        _one_of("dataset_name", self.dataset_name, DATASETS)
        if self.dataset_name in ("custom", "azure") and self.dataset_path is None:
            raise ValueError(f"dataset_path: {self.dataset_name} needs one")
        for name in ("num_prompts", "random_input_len", "random_output_len", "custom_output_len"):
            _above_zero(name, getattr(self, name))
        for name in ("request_rate", "burstiness", "trace_speed", "request_timeout_s"):
            _above_zero(name, getattr(self, name))
        if self.max_concurrency is not None:
            _above_zero("max_concurrency", self.max_concurrency)
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"random_range_ratio={self.random_range_ratio}: must be from 0 to below 1")
        if not 0 <= self.be_share <= 1:
            raise ValueError(f"be_share={self.be_share}: must be from 0 to 1")
        for name in self.metrics:
            _one_of("percentile_metrics", name, METRICS)
        if not all(0 <= each <= 100 for each in self.percentiles):
            raise ValueError(f"metric_percentiles={self.metric_percentiles!r}: must be from 0 to 100")
        _ = self.objectives

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def kind(self) -> str:
        """The backend, also if none was named."""
        return self.backend or ("openai-chat" if self.dataset_name == "demo" else "openai")

    @property
    def path(self) -> str:
        return self.endpoint or BACKENDS[self.kind]

    @property
    def metrics(self) -> list[str]:
        return self.percentile_metrics.split(",")

    @property
    def percentiles(self) -> list[float]:
        try:
            return [float(each) for each in self.metric_percentiles.split(",")]
        except ValueError:
            raise ValueError(
                f"metric_percentiles={self.metric_percentiles!r}: must be numbers with commas between them"
            ) from None

    @property
    def objectives(self) -> dict[str, float]:
        """The objectives in milliseconds by name."""
        found = {}
        for pair in (self.goodput or "").split():
            name, _, value = pair.partition(":")
            _one_of("goodput", name, OBJECTIVES)
            try:
                found[name] = float(value)
            except ValueError:
                raise ValueError(f"goodput={pair!r}: must look like ttft:200") from None
            _above_zero(f"goodput {name}", found[name])
        return found


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    names = list(known)
    if value not in names:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(names)}")


def _above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value}: must be above 0")
