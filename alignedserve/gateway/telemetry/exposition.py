"""Prometheus's text: vLLM's names with a prefix of our own, by tier, island and instance. No label has a client's
value.

The routers are asked for the metrics of routers, pools and instances when Prometheus asks the gateway; if none
answers, there are only the gateway's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.telemetry.build_info import build_info
from alignedserve.gateway.telemetry.health import AskClusters
from alignedserve.gateway.telemetry.ignored_parameters import NAMES, OTHER
from alignedserve.gateway.telemetry.metrics import Metrics
from alignedserve.lengths.prediction import SOURCES
from alignedserve.process.usage import usage_of
from alignedserve.protocol.messages import ROLES_THAT_CHANGE, SCHEDULING_S, Cluster, ProcessStatus
from alignedserve.types import GATEWAY, InstanceId, is_island_gateway, without_generation

PREFIX = "alignedserve:"
# The states of requests that an instance computes; all others wait, or are about to leave.
RUNNING_STATES = ("prefilling", "running", "making room")
GONE_STATES = ("leaving",)
# The reasons for which a request ends by itself.
SUCCESSES = ("stop", "length")

# What another gateway has said counts for so many seconds; it says it each second.
HEARD_S = 10.0

# Returns the number of batch jobs by status.
CountJobs = Callable[[], Awaitable[Mapping[str, int]]]


async def no_jobs() -> Mapping[str, int]:
    return {}


def metrics_route(
    metrics: Metrics,
    ask_clusters: AskClusters,
    count_jobs: CountJobs = no_jobs,
    gateways: Gateways | None = None,
    num_wanted: Callable[[], int] = lambda: 0,
    me: InstanceId = GATEWAY,
    models: Sequence[str] = (),
) -> APIRouter:
    """`gateways`: all that listen at this port, if there are several. `num_wanted` returns how many islands the traffic
    would need, or 0. `me` is this gateway, and `models` are the names that clients may ask for, the base model's
    first."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response, include_in_schema=False)
    async def expose(http: Request) -> Response:
        try:
            clusters = await ask_clusters()
        except ApiError:
            clusters = {}
        own = list(_of_gateway(metrics))
        if gateways:
            gateways.complete(own)
        families = _Families(
            [
                *own,
                *_of_islands(clusters),
                *_usage(clusters, me),
                _jobs(await count_jobs()),
                _wanted(num_wanted()),
                *_infos(models),
            ]
        )
        registry = CollectorRegistry()
        registry.register(families)
        encode, content_type = choose_encoder(http.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return routes


# A metric's name, and its samples: name, labels and value.
_Written = list[tuple[str, list[tuple[str, dict[str, str], float]]]]


class Gateways:
    """What gateways that listen at one port have measured, since Prometheus asks any of them: with a label for each,
    so that one that is started again begins series anew, and not all of them."""

    def __init__(self, me: InstanceId) -> None:
        self._me = me
        # When that was, and what it said.
        self._heard: dict[InstanceId, tuple[float, _Written]] = {}

    def hear(self, gateway: InstanceId, written: bytes) -> None:
        """Raises msgspec.MsgspecError."""
        self._heard[gateway] = time.monotonic(), msgspec.msgpack.decode(written, type=_Written)

    def complete(self, families: Iterable[Metric]) -> None:
        """Labels this gateway's samples, and adds those of the others."""
        for family in families:
            family.samples = [
                sample._replace(labels={**sample.labels, "gateway": self._me}) for sample in family.samples
            ]
        by_name = {family.name: family for family in families}
        for gateway, (heard_s, written) in list(self._heard.items()):
            if time.monotonic() - heard_s > HEARD_S:
                del self._heard[gateway]
                continue
            for name, samples in written:
                # While versions change, another one may measure what this one does not know.
                if family_here := by_name.get(name):
                    for sample, labels, value in samples:
                        family_here.add_sample(sample, {**labels, "gateway": gateway}, value)


def written(metrics: Metrics) -> bytes:
    """Returns what this gateway has measured, for the others."""
    return msgspec.msgpack.encode(
        [
            (family.name, [(sample.name, sample.labels, sample.value) for sample in family.samples])
            for family in _of_gateway(metrics)
        ]
    )


@dataclass(eq=False)
class _Families(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


# ---- what the gateway measures --------------------------------------------------------------------------------------


def _of_gateway(metrics: Metrics) -> Iterator[Metric]:
    yield from _histograms(metrics)
    yield _turnarounds(metrics)
    ignored = _counter("ignored_parameters", "Calls with a parameter that is unknown here.", "parameter")
    for name in (*sorted(NAMES), OTHER):
        ignored.add_metric([name], metrics.ignored_parameters.counts[name])
    yield ignored
    prompts = _counter("prompt_tokens", "Tokens of prompts that were prefilled.", "tier")
    outputs = _counter("generation_tokens", "Tokens that were generated.", "tier")
    successes = _counter(
        "request_success", "Requests that ended by themselves, and why.", "tier", "finished_reason"
    )
    failures = _counter(
        "request_failure", "Requests that ended otherwise: abort, error, rejected.", "tier", "finished_reason"
    )
    objectives = _counter(
        "request_slo",
        "Requests with an objective and batch lines given up; whether it was met.",
        "tier",
        "slo",
        "met",
    )
    predictions = _counter(
        "length_predictions", "Requests, and what their length was predicted from.", "tier", "source"
    )
    for tier, of in metrics:
        for source in (*SOURCES, "none"):
            predictions.add_metric([tier, source], of.predicted_by[source])
        prompts.add_metric([tier], of.num_prompt_tokens)
        outputs.add_metric([tier], of.num_output_tokens)
        for reason in sorted({*SUCCESSES, *of.ended} - {"abort", "error", "rejected"}):
            successes.add_metric([tier, reason], of.ended[reason])
        for reason in ("abort", "error", "rejected"):
            failures.add_metric([tier, reason], of.ended[reason])
        for slo in ("ttft", "tbt", "deadline"):
            for is_met in (True, False):
                objectives.add_metric([tier, slo, str(is_met).lower()], of.objectives[slo, is_met])
    yield from (prompts, outputs, successes, failures, objectives, predictions)
    webhooks = _counter(
        "webhook_deliveries", "Webhooks: delivered, failed once, dropped for good.", "outcome"
    )
    for outcome in ("delivered", "failed", "dropped"):
        webhooks.add_metric([outcome], metrics.webhooks[outcome])
    yield webhooks
    again = _counter("requests_resubmitted", "Requests that their router lost by dying, and that went on.")
    again.add_metric([], metrics.num_resubmitted)
    yield again


def _histograms(metrics: Metrics) -> Iterator[Metric]:
    for name, (text, attribute) in HISTOGRAMS.items():
        family = HistogramMetricFamily(PREFIX + name, text, labels=["tier"])
        for tier, of in metrics:
            histogram = getattr(of, attribute)
            family.add_metric([tier], histogram.cumulative(), histogram.sum)
        yield family


def _turnarounds(metrics: Metrics) -> Metric:
    text = "From when a batch job was made until it was completed or had expired, by its window at most."
    family = HistogramMetricFamily(PREFIX + "batch_turnaround_seconds", text, labels=["window"])
    for window, histogram in metrics.turnarounds.items():
        family.add_metric([window], histogram.cumulative(), histogram.sum)
    return family


# The help of each histogram by name, and the field of TierMetrics that has it.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", "time_to_first_token"),
    "inter_token_latency_seconds": ("From one token to the next.", "inter_token_latency"),
    "request_time_per_output_token_seconds": (
        "Mean time from one token to the next, of each request.",
        "time_per_output_token",
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", "e2e_latency"),
    "request_queue_time_seconds": ("From arrival to the prefill instance.", "queue_time"),
    "request_prefill_time_seconds": ("From there to the first token.", "prefill_time"),
    "request_decode_time_seconds": ("From the first token to the last.", "decode_time"),
    "request_prompt_tokens": ("Tokens of each prompt.", "prompt_len"),
    "request_generation_tokens": ("Tokens that each request generated.", "output_len"),
    "length_prediction_relative_error": (
        "Difference of predicted and true length over the true one, of each request.",
        "length_error",
    ),
}


# ---- what routers say -----------------------------------------------------------------------------------------------


def _of_islands(clusters: Mapping[int, Cluster]) -> Iterator[Metric]:
    yield from _requests(clusters)
    yield from _recoveries(clusters)
    yield _sharing(clusters)
    yield _role_changes(clusters)
    processes = [
        (str(island), process) for island, cluster in clusters.items() for process in cluster.processes
    ]
    yield _processes(processes)
    yield _kv_use(processes)
    instances = [(island, process) for island, process in processes if process.role in INSTANCE_ROLES]
    yield from _instances(instances)
    yield from _moves(instances)
    yield _scheduling(instances)


def _requests(clusters: Mapping[int, Cluster]) -> Iterator[Metric]:
    running = _gauge("num_requests_running", "Requests that are being computed.", "island", "tier")
    waiting = _gauge("num_requests_waiting", "Requests that wait, wherever it is.", "island", "tier")
    states = _gauge("num_requests_by_state", "Requests in each of the router's states.", "island", "state")
    for island, cluster in clusters.items():
        for tier in ("rt", "be"):
            counts = cluster.tiers.get(tier, {})
            num_running = sum(counts.get(state, 0) for state in RUNNING_STATES)
            num_gone = sum(counts.get(state, 0) for state in GONE_STATES)
            running.add_metric([str(island), tier], num_running)
            waiting.add_metric([str(island), tier], sum(counts.values()) - num_running - num_gone)
        for state, count in cluster.requests.items():
            states.add_metric([str(island), state], count)
    yield from (running, waiting, states)


def _recoveries(clusters: Mapping[int, Cluster]) -> Iterator[Metric]:
    recoveries = _counter(
        "recoveries", "Requests that went on without a process that had them.", "island", "lost"
    )
    for island, cluster in clusters.items():
        for role in (*INSTANCE_ROLES, "kvpool"):
            recoveries.add_metric([str(island), role], cluster.recoveries.get(role, 0))
    yield recoveries


def _sharing(clusters: Mapping[int, Cluster]) -> Metric:
    sharing = _counter(
        "class_sharing_events",
        "How real time and best effort shared: see messages.Cluster.",
        "island",
        "event",
    )
    for island, cluster in clusters.items():
        for event, count in cluster.sharing.items():
            sharing.add_metric([str(island), event], count)
    return sharing


def _role_changes(clusters: Mapping[int, Cluster]) -> Metric:
    changes = _counter("role_changes", "Instances that took another role while they ran.", "island", "to")
    for island, cluster in clusters.items():
        for role in ROLES_THAT_CHANGE:
            changes.add_metric([str(island), role], cluster.role_changes.get(role, 0))
    return changes


def _processes(processes: Iterable[tuple[str, ProcessStatus]]) -> Metric:
    up = _gauge("process_up", "1 for a process that is there, 0 for one that should be.", *INSTANCE_LABELS)
    for island, process in processes:
        up.add_metric([island, process.role, process.instance_id], process.state == "up")
    return up


def _usage(clusters: Mapping[int, Cluster], me: InstanceId) -> Iterator[Metric]:
    """Processes of islands are measured by their routers, and gateways of this host here. Those have no island."""
    cpu = _counter("process_cpu_seconds", "CPU time of each process.", *INSTANCE_LABELS)
    resident = _gauge("process_resident_memory_bytes", "Memory of each process.", *INSTANCE_LABELS)
    gateways = {me: os.getpid()}
    for island, cluster in clusters.items():
        for process in cluster.processes:
            name = process.instance_id
            if process.role == "gateway":
                if not is_island_gateway(me) and not is_island_gateway(name):
                    gateways.setdefault(without_generation(name), process.pid)
            elif process.resident_bytes:
                labels = [str(island), process.role, name]
                cpu.add_metric(labels, process.cpu_s)
                resident.add_metric(labels, process.resident_bytes)
    for name, pid in gateways.items():
        if usage := usage_of(pid):
            cpu.add_metric(["", "gateway", name], usage.cpu_s)
            resident.add_metric(["", "gateway", name], usage.resident_bytes)
    yield from (cpu, resident)


def _infos(models: Sequence[str]) -> Iterator[Metric]:
    """Their values are always 1: the labels tell something."""
    build = _gauge("build_info", "The version and commit of the gateway.", "version", "commit")
    build.add_metric(build_info(), 1)
    model = _gauge("model_info", "The names of models, and of the base model of an adapter.", *MODEL_LABELS)
    for name in models:
        model.add_metric([name, "" if name == models[0] else models[0]], 1)
    yield from (build, model)


def _kv_use(processes: Iterable[tuple[str, ProcessStatus]]) -> Metric:
    use = _gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all of them.", *INSTANCE_LABELS)
    for island, process in processes:
        if process.num_blocks:
            use.add_metric(
                [island, process.role, process.instance_id], 1 - process.num_free_blocks / process.num_blocks
            )
    return use


INSTANCE_ROLES = ("prefill", "decode", "colocated")
INSTANCE_LABELS = ("island", "role", "instance")
MODEL_LABELS = ("model_name", "parent")

# The help of each counter by name, and the field of InstanceStats that has it.
INSTANCE_COUNTERS = {
    "num_preemptions": ("Requests that had to leave a running batch.", "num_preemptions"),
    "num_evictions": ("Those of them whose KV was kept.", "num_evictions"),
    "num_spills": ("Staged copies that were given up before admission.", "num_spills"),
    "num_batch_switches": ("Candidate batches that became the running one.", "num_batch_switches"),
    "num_batch_iterations": ("Iterations since the first candidate batch ran.", "num_batch_iterations"),
    "num_mixed_iterations": (
        "Those of them that had requests of several batches, or of a batch and of none.",
        "num_mixed_iterations",
    ),
    "computed_tokens": ("Tokens whose KV was computed.", "num_computed_tokens"),
    "computing_seconds": ("Time of the iterations that computed them.", "computing_s"),
    "prefix_cache_queries": ("Tokens whose KV was looked for when a prompt started.", "num_asked_tokens"),
    "prefix_cache_hits": ("Those of them whose KV was there.", "num_found_tokens"),
    "num_failed_pulls": ("Transfers from prefill instances that failed on their way.", "num_failed_pulls"),
    "num_handed_over": (
        "Requests whose KV a decode instance pulled from where it had just been computed.",
        "num_handed_over",
    ),
}


def _instances(instances: list[tuple[str, ProcessStatus]]) -> Iterator[Metric]:
    for name, (text, attribute) in INSTANCE_COUNTERS.items():
        counter = _counter(name, text, *INSTANCE_LABELS)
        for island, process in instances:
            counter.add_metric([island, process.role, process.instance_id], getattr(process.stats, attribute))
        yield counter
    staged = _gauge("staged_bytes", "KV in prefill instances' buffers for candidates.", *INSTANCE_LABELS)
    spread = _gauge(
        "prefix_length_spread", "Longest less shortest sequence of the running batch.", *INSTANCE_LABELS
    )
    over_host = _gauge(
        "links_over_host",
        "Prefill instances whose KV comes through host memory, since pulls from them have failed.",
        *INSTANCE_LABELS,
    )
    for island, process in instances:
        labels = [island, process.role, process.instance_id]
        if process.role == "prefill":
            staged.add_metric(labels, process.stats.staged_bytes)
        else:
            over_host.add_metric(labels, len(process.stats.over_host))
            spread.add_metric(labels, process.stats.max_length - process.stats.min_length)
    yield from (staged, spread, over_host)


def _scheduling(instances: Iterable[tuple[str, ProcessStatus]]) -> Metric:
    text = "Time between two iterations, copies that the second waited for included."
    family = HistogramMetricFamily(PREFIX + "scheduling_time_seconds", text, labels=INSTANCE_LABELS)
    bounds = [*map(str, SCHEDULING_S), "+Inf"]
    for island, process in instances:
        if counts := process.stats.scheduling:
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            labels = [island, process.role, process.instance_id]
            family.add_metric(labels, buckets, process.stats.scheduling_s)
    return family


def _moves(instances: Iterable[tuple[str, ProcessStatus]]) -> Iterator[Metric]:
    """Bandwidth is the rate of the bytes over the rate of the seconds."""
    num_bytes = _counter("kv_transfer_bytes", "KV that was copied.", *INSTANCE_LABELS, "transfer")
    seconds = _counter("kv_transfer_seconds", "Time that copying it took.", *INSTANCE_LABELS, "transfer")
    for island, process in instances:
        for moved in process.stats.moved:
            labels = [island, process.role, process.instance_id, moved.what]
            num_bytes.add_metric(labels, moved.num_bytes)
            seconds.add_metric(labels, moved.seconds)
    yield from (num_bytes, seconds)


def _wanted(num_wanted: int) -> Metric:
    wanted = _gauge("islands_wanted", "Islands that the traffic would need, whatever --max-islands says.")
    if num_wanted:
        wanted.add_metric([], num_wanted)
    return wanted


def _jobs(counts: Mapping[str, int]) -> Metric:
    jobs = _gauge("batch_jobs", "Batch jobs in each state.", "status")
    for status, count in counts.items():
        jobs.add_metric([status], count)
    return jobs
