"""Prometheus's text: vLLM's metric names with our prefix, by tier, island and instance. No label has a client's text.

A scrape asks the routers for the metrics of routers, pools and instances. If none answers, only the gateway's own
metrics are exposed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from alignedserve.gateway.http.access import require_counters
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.telemetry.build_info import build_info
from alignedserve.gateway.telemetry.health import AskClusters
from alignedserve.gateway.telemetry.metrics import IGNORED_NAMES, OBJECTIVES, OTHER, TOKEN_OBJECTIVES, Metrics
from alignedserve.lengths.prediction import SOURCES
from alignedserve.process.usage import UsageMeter
from alignedserve.protocol.messages import ROLES_THAT_CHANGE, SCHEDULING_S, Cluster, ProcessStatus
from alignedserve.types import GATEWAY, InstanceId, is_island_gateway, without_generation

PREFIX = "alignedserve:"
# States of requests that an instance computes. All others wait, or are about to leave.
RUNNING_STATES = ("prefilling", "running", "making room")
GONE_STATES = ("leaving",)
# Finish reasons of requests that ended normally.
SUCCESSES = ("stop", "length")

# Seconds after which another gateway's last report expires. It reports once per second.
HEARD_S = 10.0

# Returns the number of batch jobs by status.
CountJobs = Callable[[], Mapping[str, int]]


def metrics_route(
    metrics: Metrics,
    ask_clusters: AskClusters,
    count_jobs: CountJobs = dict,
    gateways: Gateways | None = None,
    num_wanted: Callable[[], int] = lambda: 0,
    me: InstanceId = GATEWAY,
    models: Sequence[str] = (),
) -> APIRouter:
    """`gateways` are the gateways at this port, if there are several. `num_wanted` returns the number of islands that
    the traffic needs, or 0. `me` is this gateway, and `models` are the names that clients may ask for, the base model's
    first."""
    routes, meter = APIRouter(), UsageMeter()

    @routes.get("/metrics", response_class=Response, include_in_schema=False)
    async def expose(http: Request) -> Response:
        require_counters(http)
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
                *await asyncio.to_thread(lambda: [*_usage(clusters, me, meter)]),
                _jobs(count_jobs()),
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
    """Metrics of all gateways at one port, because a scrape reaches any of them. Each gateway has its own label, so
    that a restart begins only that gateway's series anew."""

    def __init__(self, me: InstanceId) -> None:
        self._me = me
        # When each last reported, and what.
        self._heard: dict[InstanceId, tuple[float, _Written]] = {}

    def hear(self, gateway: InstanceId, written: bytes) -> None:
        """Stores another gateway's report. Raises msgspec.MsgspecError."""
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
                # During an upgrade, another gateway may have metrics that this version lacks.
                if family_here := by_name.get(name):
                    for sample, labels, value in samples:
                        family_here.add_sample(sample, {**labels, "gateway": gateway}, value)


def written(metrics: Metrics) -> bytes:
    """Returns this gateway's own metrics, for the other gateways."""
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


# ---- the gateway's own metrics ---------------------------------------------------------------------------------------


def _of_gateway(metrics: Metrics) -> Iterator[Metric]:
    yield from _histograms(metrics)
    yield _turnarounds(metrics)
    ignored = _counter("ignored_parameters", "Calls with an ignored parameter.", "parameter")
    for name in (*sorted(IGNORED_NAMES), OTHER):
        ignored.add_metric([name], metrics.ignored_parameters.counts[name])
    yield ignored
    prompts = _counter("prompt_tokens", "Tokens of prefilled prompts.", "tier")
    outputs = _counter("generation_tokens", "Generated tokens.", "tier")
    successes = _counter(
        "request_success", "Requests that ended normally, by finish reason.", "tier", "finished_reason"
    )
    failures = _counter(
        "request_failure",
        "Requests that did not end normally: abort, error, rejected.",
        "tier",
        "finished_reason",
    )
    objectives = _counter(
        "request_slo",
        "Ended requests with an objective, and expired batch lines, by whether it was met.",
        "tier",
        "slo",
        "met",
    )
    so_far = _gauge(
        "open_request_slo",
        "Open requests with an objective, by whether they meet it so far. A token that is due counts.",
        "tier",
        "slo",
        "met",
    )
    silence = _gauge(
        "longest_silence_seconds", "The longest time of the last minute without a token of a stream.", "tier"
    )
    now = time.monotonic()
    predictions = _counter(
        "length_predictions", "Requests by the source of their predicted length.", "tier", "source"
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
        open_now = of.open_now(now)
        silence.add_metric([tier], open_now.longest_silence_s)
        for slo in OBJECTIVES:
            for is_met in (True, False):
                objectives.add_metric([tier, slo, str(is_met).lower()], of.objectives[slo, is_met])
                if slo in TOKEN_OBJECTIVES:
                    so_far.add_metric([tier, slo, str(is_met).lower()], open_now.kept_so_far[slo, is_met])
    yield from (prompts, outputs, successes, failures, objectives, so_far, silence, predictions)
    webhooks = _counter(
        "webhook_deliveries",
        "Webhook attempts that were delivered or failed, and dropped webhooks.",
        "outcome",
    )
    for outcome in ("delivered", "failed", "dropped"):
        webhooks.add_metric([outcome], metrics.webhooks[outcome])
    yield webhooks
    again = _counter("requests_resubmitted", "Requests that were submitted again after their router died.")
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
    text = "From the creation of a batch job until it was completed or had expired, by the upper bound of its window."
    family = HistogramMetricFamily(PREFIX + "batch_turnaround_seconds", text, labels=["window"])
    for window, histogram in metrics.turnarounds.items():
        family.add_metric([window], histogram.cumulative(), histogram.sum)
    return family


# The help of each histogram by name, and its field of TierMetrics.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", "time_to_first_token"),
    "inter_token_latency_seconds": ("From one token to the next.", "inter_token_latency"),
    "request_time_per_output_token_seconds": (
        "Mean time from one token to the next within each request.",
        "time_per_output_token",
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", "e2e_latency"),
    "request_queue_time_seconds": ("From arrival to the prefill instance.", "queue_time"),
    "request_prefill_time_seconds": ("From the prefill instance to the first token.", "prefill_time"),
    "request_decode_time_seconds": ("From the first token to the last.", "decode_time"),
    "request_prompt_tokens": ("Tokens of each prompt.", "prompt_len"),
    "request_generation_tokens": ("Tokens that each request generated.", "output_len"),
    "length_prediction_relative_error": (
        "Difference of predicted and true length of each request, relative to the true one.",
        "length_error",
    ),
}


# ---- metrics from routers --------------------------------------------------------------------------------------------


def _of_islands(clusters: Mapping[int, Cluster]) -> Iterator[Metric]:
    yield from _requests(clusters)
    yield from _recoveries(clusters)
    yield _sharing(clusters)
    yield _role_changes(clusters)
    yield _cache_resets(clusters)
    processes = [
        (str(island), process) for island, cluster in clusters.items() for process in cluster.processes
    ]
    yield _processes(processes)
    yield _kv_use(processes)
    yield from _pools([each for each in processes if each[1].role == "kvpool"])
    instances = [(island, process) for island, process in processes if process.role in INSTANCE_ROLES]
    yield from _instances(instances)
    yield from _moves(instances)
    yield _scheduling(instances)


def _requests(clusters: Mapping[int, Cluster]) -> Iterator[Metric]:
    running = _gauge("num_requests_running", "Requests that are being computed.", "island", "tier")
    waiting = _gauge("num_requests_waiting", "Requests that wait, in any place.", "island", "tier")
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
        "recoveries", "Requests that continued after a process with them died, by its role.", "island", "lost"
    )
    for island, cluster in clusters.items():
        for role in (*INSTANCE_ROLES, "kvpool"):
            recoveries.add_metric([str(island), role], cluster.recoveries.get(role, 0))
    yield recoveries


def _sharing(clusters: Mapping[int, Cluster]) -> Metric:
    sharing = _counter(
        "class_sharing_events",
        "Events where real time and best effort share instances: see messages.Cluster.",
        "island",
        "event",
    )
    for island, cluster in clusters.items():
        for event, count in cluster.sharing.items():
            sharing.add_metric([str(island), event], count)
    return sharing


def _cache_resets(clusters: Mapping[int, Cluster]) -> Metric:
    resets = _counter("prefix_cache_resets", "How often the prefix cache was reset by a call.", "island")
    for island, cluster in clusters.items():
        resets.add_metric([str(island)], cluster.num_cache_resets)
    return resets


def _role_changes(clusters: Mapping[int, Cluster]) -> Metric:
    changes = _counter("role_changes", "Instances that changed their role, by the new role.", "island", "to")
    for island, cluster in clusters.items():
        for role in ROLES_THAT_CHANGE:
            changes.add_metric([str(island), role], cluster.role_changes.get(role, 0))
    return changes


def _processes(processes: Iterable[tuple[str, ProcessStatus]]) -> Metric:
    up = _gauge("process_up", "1 for a process that is up, 0 for one that is missing.", *INSTANCE_LABELS)
    for island, process in processes:
        up.add_metric([island, process.role, process.instance_id], process.state == "up")
    return up


def _usage(clusters: Mapping[int, Cluster], me: InstanceId, meter: UsageMeter) -> Iterator[Metric]:
    """Processes of islands are measured by their routers, and gateways of this host here. Those have no island."""
    cpu = _counter(
        "process_cpu_seconds", "CPU time of each process and its child processes.", *INSTANCE_LABELS
    )
    resident = _gauge(
        "process_resident_memory_bytes",
        "Memory of each process, and what its child processes do not share with it.",
        *INSTANCE_LABELS,
    )
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
        if usage := meter.usage_of(pid):
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


def _pools(pools: Sequence[tuple[str, ProcessStatus]]) -> Iterator[Metric]:
    """What prompts that begin alike have in common in the pool."""
    blocks = _gauge(
        "pool_blocks",
        "Blocks that several requests list (shared), those that none lists and prompts may find (kept), and those of "
        "the latter that are promised to the next turns of chats (promised).",
        *INSTANCE_LABELS,
        "state",
    )
    queries = _counter("pool_content_queries", "Tokens that were looked up in the pool.", *INSTANCE_LABELS)
    hits = _counter("pool_content_hits", "Tokens that were found in the pool.", *INSTANCE_LABELS)
    promises = _counter(
        "pool_promises", "Answers that were promised to next turns.", *INSTANCE_LABELS, "outcome"
    )
    for island, process in pools:
        labels = [island, process.role, process.instance_id]
        blocks.add_metric([*labels, "shared"], process.num_shared_blocks)
        blocks.add_metric([*labels, "kept"], process.num_kept_blocks)
        blocks.add_metric([*labels, "promised"], process.num_promised_blocks)
        for outcome in ("kept", "broken", "expired", "refused"):
            promises.add_metric([*labels, outcome], process.promises.get(outcome, 0))
        queries.add_metric(labels, process.stats.num_asked_tokens)
        hits.add_metric(labels, process.stats.num_found_tokens)
    yield from (blocks, queries, hits, promises)


INSTANCE_ROLES = ("prefill", "decode", "colocated")
INSTANCE_LABELS = ("island", "role", "instance")
MODEL_LABELS = ("model_name", "parent")

# The help of each counter by name, and its field of InstanceStats.
INSTANCE_COUNTERS = {
    "num_preemptions": ("Requests that were preempted from a running batch.", "num_preemptions"),
    "num_evictions": ("Preempted requests with KV that was kept.", "num_evictions"),
    "num_spills": ("Staged copies that were dropped before admission.", "num_spills"),
    "num_batch_switches": ("Candidate batches that became the running one.", "num_batch_switches"),
    "num_batch_iterations": ("Iterations since the first candidate batch ran.", "num_batch_iterations"),
    "num_mixed_iterations": (
        "Iterations with requests of several batches, or of a batch and of none.",
        "num_mixed_iterations",
    ),
    "computed_tokens": ("Tokens with KV that was computed.", "num_computed_tokens"),
    "computing_seconds": ("Time of the iterations that computed tokens.", "computing_s"),
    "prefix_cache_queries": ("Prompt tokens that were looked up in the prefix cache.", "num_asked_tokens"),
    "prefix_cache_hits": ("Prompt tokens that were found in the prefix cache.", "num_found_tokens"),
    "admitted_kv_tokens": (
        "Tokens with KV elsewhere, of requests that an instance admitted.",
        "num_arriving_tokens",
    ),
    "uncopied_kv_tokens": (
        "Those of admitted_kv_tokens that were not copied, because the instance had their KV.",
        "num_not_copied_tokens",
    ),
    "checked_blocks": (
        "KV blocks from the pool that were compared with their checksums.",
        "num_checked_blocks",
    ),
    "changed_blocks": (
        "KV blocks from the pool that had changed since they were saved.",
        "num_changed_blocks",
    ),
    "num_failed_pulls": ("Transfers from prefill instances that failed on their way.", "num_failed_pulls"),
    "num_handed_over": (
        "Requests with KV that a decode instance pulled directly from a prefill instance.",
        "num_handed_over",
    ),
}


def _instances(instances: list[tuple[str, ProcessStatus]]) -> Iterator[Metric]:
    for name, (text, attribute) in INSTANCE_COUNTERS.items():
        counter = _counter(name, text, *INSTANCE_LABELS)
        for island, process in instances:
            counter.add_metric([island, process.role, process.instance_id], getattr(process.stats, attribute))
        yield counter
    staged = _gauge("staged_bytes", "Bytes of KV in prefill instances' staging buffers.", *INSTANCE_LABELS)
    spread = _gauge(
        "prefix_length_spread", "Longest minus shortest sequence of the running batch.", *INSTANCE_LABELS
    )
    over_host = _gauge(
        "links_over_host",
        "Prefill instances with KV that arrives through host memory, because pulls from them failed.",
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
    text = "Time between two iterations, including copies for which the second waited."
    family = HistogramMetricFamily(PREFIX + "scheduling_time_seconds", text, labels=INSTANCE_LABELS)
    bounds = [*map(str, SCHEDULING_S), "+Inf"]
    for island, process in instances:
        if counts := process.stats.scheduling:
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            labels = [island, process.role, process.instance_id]
            family.add_metric(labels, buckets, process.stats.scheduling_s)
    return family


def _moves(instances: Iterable[tuple[str, ProcessStatus]]) -> Iterator[Metric]:
    """Bandwidth is the rate of the bytes divided by the rate of the seconds."""
    num_bytes = _counter("kv_transfer_bytes", "Bytes of copied KV.", *INSTANCE_LABELS, "transfer")
    seconds = _counter("kv_transfer_seconds", "Time of copies of KV.", *INSTANCE_LABELS, "transfer")
    for island, process in instances:
        for moved in process.stats.moved:
            labels = [island, process.role, process.instance_id, moved.what]
            num_bytes.add_metric(labels, moved.num_bytes)
            seconds.add_metric(labels, moved.seconds)
    yield from (num_bytes, seconds)


def _wanted(num_wanted: int) -> Metric:
    wanted = _gauge("islands_wanted", "Islands that the traffic needs, regardless of --max-islands.")
    if num_wanted:
        wanted.add_metric([], num_wanted)
    return wanted


def _jobs(counts: Mapping[str, int]) -> Metric:
    jobs = _gauge("batch_jobs", "Batch jobs in each state.", "status")
    for status, count in counts.items():
        jobs.add_metric([status], count)
    return jobs
