"""The settings of `alignedserve simulate` beyond those of `serve`. The text beside a field is its help."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Annotated, get_args

from alignedserve.kv.format import POOL_KV_DTYPES
from alignedserve.sim.foresight import DEMO_ERROR
from alignedserve.timing.cost import Attention

LENGTH_PREDICTORS = ("none", "rough", "exact")
LINKS = ("host", "ipc", "gloo", "nccl")
_ABOVE_ZERO = (
    "request_rate",
    "burstiness",
    "be_window_s",
    "pool_memory_bytes",
    "max_model_len",
    "host_memory_bandwidth",
    "pace",
)


@dataclass(frozen=True)
class SimConfig:
    cost: Annotated[str, "cost model: its name, its file, or a file of alignedserve profile", "cluster"] = (
        "opt-13b/a100-80gb"
    )
    attention: Annotated[
        str | None, "decode kernel to assume [default: the cost model's]", get_args(Attention)
    ] = None
    policy: Annotated[tuple[str, ...], "scheduling policy; repeat to compare"] = ("aligned",)
    prefill_instances: Annotated[tuple[int, ...], "prefill instances; repeat to compare [default: 1]"] = ()
    decode_instances: Annotated[tuple[int, ...], "decode instances; repeat to compare [default: 1]"] = ()
    colocated_instances: Annotated[
        tuple[int, ...],
        "instances that prefill and decode, in place of both kinds; repeat to compare [default: none]",
    ] = ()
    link: Annotated[str, "transport of KV to decode instances", LINKS] = "host"
    shared_links: Annotated[
        bool, "let copies share the bandwidth of PCIe, NVLink and host memory", "expert"
    ] = True
    gpus_per_pcie_root: Annotated[
        int | None, "GPUs that share one x16 link to the host [default: the cost model's]"
    ] = None
    host_memory_bandwidth: Annotated[
        float | None, "bytes per second of all copies to and from the pool [default: the cost model's]"
    ] = None
    pace: Annotated[float, "factor on the cost model's iteration times"] = 1.0
    outside_ms: Annotated[float, "milliseconds between iterations, without computation"] = 0.0
    pool_memory_bytes: Annotated[
        int | None, "host memory of the KV pool [default: twice that of the decode instances' KV]", "memory"
    ] = None
    pool_kv_dtype: Annotated[
        str, "dtype of KV in the pool; int8 needs a model of two bytes a value", tuple(POOL_KV_DTYPES)
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        "maximum tokens of a request, prompt and output [default: 16384, or what an instance holds]",
    ] = None

    trace: Annotated[
        str | None,
        "trace of arrivals and lengths: CSV like Azure's, or .jsonl like Mooncake's [default: synthetic]",
        "traffic",
    ] = None
    trace_start: Annotated[int, "index of the trace's first request to use"] = 0
    num_prompts: Annotated[int, "number of requests"] = 1000
    request_rate: Annotated[float | None, "requests per second [default: the trace's, or 1]"] = None
    burstiness: Annotated[float, "burstiness of synthetic arrivals: 1 is Poisson, less is burstier"] = 1.0
    input_len: Annotated[float, "median tokens of synthetic prompts"] = 512.0
    output_len: Annotated[float, "median tokens of synthetic answers"] = 128.0
    spread: Annotated[
        float, "spread of synthetic lengths: one in six exceeds the median times this; 1 is none"
    ] = 1.0
    seed: Annotated[int, "seed of arrivals, lengths and classes"] = 0

    be_share: Annotated[
        float | None, "share of requests that are best effort [default: as in a .jsonl]", "batch"
    ] = None
    be_window_s: Annotated[float | None, "completion window of best effort in seconds [default: none]"] = None
    be_backlog: Annotated[int, "best-effort requests that are always waiting, beside the others"] = 0
    be_input_len: Annotated[float | None, "median prompt tokens of the backlog [default: --input-len]"] = None
    be_output_len: Annotated[float | None, "median answer tokens of the backlog [default: --output-len]"] = (
        None
    )
    warmup_s: Annotated[float, "warm-up: seconds of backlog-only load before measuring"] = 30.0
    be_min_share: Annotated[
        float, "minimum share of an instance's time for best effort; --be-share of serve"
    ] = 0.05

    slo_ttft_ms: Annotated[float, "TTFT objective in milliseconds; 0 is none", "latency"] = 1000.0
    slo_tbt_ms: Annotated[float, "TBT objective (time between tokens) in milliseconds; 0 is none"] = 100.0
    slo_mix: Annotated[
        str | None,
        "several TBT objectives instead: SECONDS:SHARE,…, as in 0.036:0.2,0.5:0.8 [default: one for all]",
    ] = None
    length_predictor: Annotated[
        str,
        f"knowledge of answer lengths; rough is wrong by {100 * DEMO_ERROR:.0f} % on average",
        LENGTH_PREDICTORS,
    ] = "rough"
    find_rate: Annotated[bool, "find the highest request rate that meets --attainment"] = False
    attainment: Annotated[float, "share of real-time requests that must be in time"] = 0.9

    def __post_init__(self) -> None:
        for name in ("policy", "prefill_instances", "decode_instances", "colocated_instances"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: names one twice")
        for name in ("prefill_instances", "decode_instances", "colocated_instances"):
            for count in getattr(self, name):
                _in_range(name, count, 1, 1024)
        if self.attention is not None:
            _one_of("attention", self.attention, get_args(Attention))
        _one_of("link", self.link, LINKS)
        _one_of("pool_kv_dtype", self.pool_kv_dtype, tuple(POOL_KV_DTYPES))
        _one_of("length_predictor", self.length_predictor, LENGTH_PREDICTORS)
        _in_range("num_prompts", self.num_prompts, 1, 10_000_000)
        _in_range("trace_start", self.trace_start, 0, 10_000_000)
        if self.trace_start and self.trace is None:
            raise ValueError(f"trace_start={self.trace_start}: needs a trace")
        _in_range("be_backlog", self.be_backlog, 0, 100_000)
        _in_range("spread", self.spread, 1, 100)
        _in_range("warmup_s", self.warmup_s, 0, 86_400)
        for name in ("slo_ttft_ms", "slo_tbt_ms", "outside_ms"):
            _in_range(name, getattr(self, name), 0, 1e9)
        for name in ("input_len", "output_len", "be_input_len", "be_output_len"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), 1, 10_000_000)
        if self.gpus_per_pcie_root is not None:
            _in_range("gpus_per_pcie_root", self.gpus_per_pcie_root, 1, 1024)
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be above 0")
        if self.be_share is not None:
            _in_range("be_share", self.be_share, 0, 1)
        if self.slo_mix is not None:
            parse_mix(self.slo_mix)
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment={self.attainment}: must be above 0, at most 1")

    @property
    def objectives(self) -> list[tuple[float, float]]:
        """The TBT objectives in `slo_mix`, in seconds, each with its share of real time; empty without it."""
        return parse_mix(self.slo_mix) if self.slo_mix is not None else []

    @property
    def islands(self) -> list[tuple[int, int, int]]:
        """Numbers of prefill, decode and colocated instances."""
        colocated = [(0, 0, count) for count in self.colocated_instances]
        if colocated and not (self.prefill_instances or self.decode_instances):
            return colocated
        apart = product(self.prefill_instances or (1,), self.decode_instances or (1,), (0,))
        return [*apart, *colocated]


def parse_mix(text: str) -> list[tuple[float, float]]:
    """Returns the values with their shares. Raises ValueError."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        mix = [(float(value), float(share)) for value, share in pairs]
    except ValueError:
        raise ValueError(f"slo_mix={text!r}: must be like 0.036:0.2,0.5:0.8") from None
    if not all(0 < value < math.inf and 0 < share <= 1 for value, share in mix):
        raise ValueError(f"slo_mix={text!r}: seconds must be above 0, and shares above 0, at most 1")
    if len({value for value, _ in mix}) < len(mix):
        raise ValueError(f"slo_mix={text!r}: names an objective twice")
    total = sum(share for _, share in mix)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"slo_mix={text!r}: the shares add up to {total:g}, must be 1")
    return mix


def _one_of(name: str, value: str, known: Iterable[str]) -> None:
    names = list(known)
    if value not in names:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(names)}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be from {low} to {high}")
