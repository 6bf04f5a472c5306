"""AccelGen: orders requests by how long they can still wait, in iterations as long as the tightest objective allows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.accelgen import Accelgen, AccelgenColocated, Prompts
from alignedserve.scheduling.policies.base import DecodePart, RouterPart
from alignedserve.scheduling.remaining_time import RemainingTime
from alignedserve.sim.gateway import Stream
from alignedserve.sim.report import Slo, latency_of
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival
from alignedserve.timing.estimate import Estimate
from benchmarks.papers import timed
from benchmarks.papers.claim import Claim, Experiment, Numbers, Paper, Size, short_of
from benchmarks.papers.datasets import ACCELGEN_MIX, Dataset, Lognormal
from benchmarks.papers.figures import iterations, kv_in_use, ttft_s
from benchmarks.papers.machines import FITS, ONE_GPU, colocated, scheduling, with_kv
from benchmarks.papers.verdict import amount, at_most, gain, together

KV_BYTES = 12e9
MAX_MODEL_LEN = 10_240
# The tokens in an iteration for the other policies: the paper's pivot. AccelGen's budget may be larger.
CHUNK = 768
# Requests per second, far beyond the capacity as in the paper, and the seconds in which they arrive and are measured.
RATE, WINDOW_S = 8.0, 300
# Three quarters of the capacity, where objectives can be met. It runs longer, because fewer requests arrive.
NEAR_RATE, NEAR_WINDOW_S = 0.25, 900
TBT_S, TBT_SCALES, TTFT_SCALES = 0.1875, (0.75, 1.25), (0.5, 1.5)
# The range of lengths in a group of prompts.
GROUP = 512
HOW = (
    f"Simulated, with {FITS}. KV of 12 GB (14,600 tokens), one colocated instance. 8 requests/s for 300 s, which is "
    f"far above capacity, as in the paper; and {NEAR_RATE}/s for {NEAR_WINDOW_S} s. vLLM is `fcfs`; FastGen and "
    f"Sarathi-Serve are `sarathi` with iterations of {CHUNK} tokens"
)
SETUP = "OPT-13B, A100 80 GB with 12 GB for KV, Alpaca + ShareGPT + BookCorpus"
# The same prompts with answers as short as Alpaca's, at a rate that exceeds the capacity as much.
SHORT_ANSWERS = replace(ACCELGEN_MIX, name="short answers", output=Lognormal(58.45, 58.45))
NEVER = Slo(1e9, 1e9)


# ---- without one of the three methods -------------------------------------------------------------------------------


class Unordered(RemainingTime):
    """All requests can wait equally long, so they go in order of arrival."""

    def of(self, request: DecodeRequest, now: float) -> float:
        return math.inf

    def in_order(self, requests: Iterable[AnyDecode], now: float) -> list[AnyDecode]:
        return [*requests]

    def in_time(
        self, decodes: Iterable[AnyDecode], now: float, num_urgent_tokens: int = 0
    ) -> tuple[list[AnyDecode], float]:
        """No request sits out. If none had to run, a tight objective would leave an iteration empty."""
        requests = [*decodes]
        return requests, self._bound_s(requests, [each.num_tokens for each in requests], now)


class WithoutOrderPart(AccelgenColocated):
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config, estimate)
        self._time = Unordered(limits, estimate)


class WithoutChunkPart(AccelgenColocated):
    """No objective limits an iteration's tokens."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config, estimate)
        self._estimate = None
        self._time.pivot.num_tokens = limits.max_num_batched_tokens


class WithoutBatchPart(AccelgenColocated):
    """Prompts begin in order, not by what fits best."""

    def _begin(self, at: DecodeBoundary, waiting: list[DecodeRequest], prompts: Prompts) -> None:
        for request in waiting:
            is_prompt = not request.num_pooled
            if (is_prompt and prompts.num_left <= 0) or not decoding.has_room(at, request, self.config):
                return
            at.admit(request)
            if is_prompt:
                prompts.compute(request)


class WithoutOrder(Accelgen):
    def router(self) -> RouterPart:
        return RouterPart(self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return WithoutOrderPart(limits, self.config, estimate)


class WithoutChunk(Accelgen):
    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return WithoutChunkPart(limits, self.config, estimate)


class WithoutBatch(Accelgen):
    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return WithoutBatchPart(limits, self.config, estimate)


POLICIES = {
    "vllm": "fcfs",
    "sarathi": "sarathi",
    "accelgen": "accelgen",
    "order": f"{__name__}:WithoutOrder",
    "chunk": f"{__name__}:WithoutChunk",
    "batch": f"{__name__}:WithoutBatch",
}


def scenario(policy: str) -> Scenario:
    base = colocated(with_kv(ONE_GPU, KV_BYTES), NEVER, max_model_len=MAX_MODEL_LEN)
    num_tokens = CHUNK if policy in ("fcfs", "sarathi") else base.max_num_batched_tokens
    return replace(base, scheduling=scheduling(policy), max_num_batched_tokens=num_tokens)


def with_objectives(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Sets each request's TTFT objective to the time that prompts of about its length take alone, times a random
    scale."""
    dice, cost = random.Random(f"objectives {seed}"), with_kv(ONE_GPU, KV_BYTES)
    return [
        replace(
            each,
            tbt_s=TBT_S * dice.uniform(*TBT_SCALES),
            ttft_s=cost.fastest_ttft_s(middle_of_group(each.lengths.prompt), 2048)
            * dice.uniform(*TTFT_SCALES),
        )
        for each in arrivals
    ]


def middle_of_group(prompt_len: int) -> int:
    """All prompts in a group of lengths have the same objective before scaling: the time of the group's middle
    length."""
    return (prompt_len - 1) // GROUP * GROUP + GROUP // 2


# ---- figures --------------------------------------------------------------------------------------------------------


def num_in_time(stream: Stream) -> int:
    """Returns the number of tokens within the request's own objectives."""
    request = stream.request
    if not stream.times_s or request.ttft_s is None or request.tbt_s is None:
        return 0
    gaps = (later - sooner for sooner, later in pairwise(stream.times_s))
    return (ttft_s(stream, 0.0) <= request.ttft_s) + sum(gap <= request.tbt_s for gap in gaps)


def is_job_in_time(stream: Stream) -> bool:
    """Returns whether it ends when its last token is due, if the first token and each further one take their
    objectives."""
    request = stream.request
    if not stream.is_complete or request.ttft_s is None or request.tbt_s is None:
        return False
    return latency_of(stream).jct_s <= request.ttft_s + (len(stream.times_s) - 1) * request.tbt_s


@dataclass(frozen=True)
class Load:
    dataset: Dataset
    rate: float
    window_s: int

    def arrivals(self, seed: int) -> list[Arrival]:
        number = int(self.rate * self.window_s)
        return with_objectives(self.dataset.arrivals(number, self.rate, seed), seed)


def worth(policy: str, load: Load, seed: int) -> dict[str, float]:
    window_s, made = load.window_s, scenario(policy)
    simulated = made.simulate(load.arrivals(seed), until_s=window_s)
    streams = simulated.streams
    complete = [stream for stream in streams if stream.is_complete]
    num_tokens, num_good = sum(len(each.tokens) for each in streams), sum(map(num_in_time, streams))
    ran = iterations(simulated.lifetimes)
    return {
        "batch": fmean(each.num_tokens for each in ran),
        "iteration_ms": 1e3 * fmean(each.duration_s for each in ran),
        "kv_used": kv_in_use(ran) / made.cost.num_kv_tokens,
        "evicted": simulated.lifetimes.count("evicted"),
        "tokens_per_s": num_tokens / window_s,
        "requests_per_s": len(complete) / window_s,
        "good_per_s": num_good / window_s,
        "kept": num_good / num_tokens,
        "jobs_kept": sum(map(is_job_in_time, complete)) / len(streams),
        "jct_s": fmean(latency_of(stream).jct_s for stream in complete),
    }


OTHERS = ("vllm", "sarathi")
Worths = Mapping[str, Mapping[str, float]]


def more(worths: Worths, what: str, suffix: str = "") -> dict[str, float]:
    return {f"{each}{suffix}": worths["accelgen"][what] / max(worths[each][what], 1e-9) for each in OTHERS}


def points(worths: Worths, near: Worths, what: str) -> dict[str, float]:
    ours = worths["accelgen"][what]
    return (
        {each: ours - worths[each][what] for each in OTHERS}
        | {f"{each}_is": found[what] for each, found in worths.items()}
        | {f"{each}_near": found[what] for each, found in near.items()}
    )


def ablated(worths: Worths) -> dict[str, float]:
    ours = worths["accelgen"]
    return {
        f"{what}_{each}": 1 - worths[each][f"{what}_per_s"] / ours[f"{what}_per_s"]
        for what in ("tokens", "good")
        for each in ("chunk", "order", "batch")
    } | {
        f"{what}_{each}": worths[each][what]
        for what in ("batch", "evicted")
        for each in ("accelgen", "chunk")
    }


def measure(size: Size, seed: int) -> Mapping[str, Numbers]:
    window_s = size.scaled(WINDOW_S)

    def under(policies: Sequence[str], load: Load) -> Worths:
        return {each: worth(POLICIES[each], load, seed) for each in policies}

    compared = (*OTHERS, "accelgen")
    worths = under([*POLICIES], Load(ACCELGEN_MIX, RATE, window_s))
    short = under(compared, Load(SHORT_ANSWERS, RATE, window_s))
    near = under(compared, Load(ACCELGEN_MIX, NEAR_RATE, size.scaled(NEAR_WINDOW_S)))
    ours = worths["accelgen"]
    used = {f"{each}_kv": worths[each]["kv_used"] for each in ("vllm", "accelgen")}

    def gained(what: str) -> dict[str, float]:
        return more(worths, what) | more(short, what, "_short") | {what: ours[what]} | used

    return {
        "throughput": gained("tokens_per_s") | {each: ours[each] for each in ("batch", "iteration_ms")},
        "requests": gained("requests_per_s"),
        "goodput": gained("good_per_s"),
        "slo": points(worths, near, "kept"),
        "jct-slo": points(worths, near, "jobs_kept"),
        "jct": {each: worths[each]["jct_s"] / ours["jct_s"] for each in OTHERS}
        | {"jct_s": ours["jct_s"]}
        | {f"{each}_near_s": near[each]["jct_s"] for each in compared},
        "ablations": ablated(worths) | used,
    }


# ---- claims ---------------------------------------------------------------------------------------------------------

_TWICE = (
    "{vllm:.2f}x vLLM, {sarathi:.2f}x Sarathi ({%s:.%df}/s; with answers as short as Alpaca's {vllm_short:.2f}x, "
    "{sarathi_short:.2f}x)"
)


def gain_claim(name: str, text: str, figure: str, claimed: float, ours: str) -> Claim:
    return Claim(
        name,
        text,
        SETUP + "; figure 11",
        figure,
        HOW,
        ours,
        lambda numbers: together([gain(claimed, numbers["vllm"]), gain(claimed, numbers["sarathi"])]),
        BECAUSE.get(name, {}),
    )


def points_claim(name: str, text: str, figure: str, claimed: float) -> Claim:
    return Claim(
        name,
        text,
        SETUP + "; figure 11c",
        figure,
        HOW,
        "{vllm:+.0%} over vLLM, {sarathi:+.0%} over Sarathi ({accelgen_is:.1%}; vLLM {vllm_is:.1%}, Sarathi "
        f"{{sarathi_is:.1%}}; at {NEAR_RATE}/s {{accelgen_near:.1%}}, {{vllm_near:.1%}}, {{sarathi_near:.1%}})",
        lambda numbers: together([amount(claimed, numbers["vllm"]), amount(claimed, numbers["sarathi"])]),
        BECAUSE.get(name, {}),
    )


MEMORY = (
    "Twelve gigabytes hold about six of these requests, and an iteration takes about 30 ms with any policy. "
    "Tokens/s are the quotient. On average, `fcfs` uses {vllm_kv:.0%} of this KV and `accelgen` {accelgen_kv:.0%}, "
    "so no order can gain much. And our `fcfs` chunks prompts too, and keeps the KV of preempted requests."
)
BECAUSE = {name: short_of(MEMORY) for name in ("throughput", "requests", "goodput", "ablations")} | {
    "slo": short_of(
        "Iterations of about 30 ms meet objectives of 140 to 230 ms with any policy. On the paper's machine few are "
        "within 187."
    ),
    "jct-slo": short_of(
        "Far more arrives than can be served, so all waiting requests are late, and the one that has waited longest "
        "has the least remaining time. That is the order of arrival. Under less load, too, a first token is due in "
        "the time that its prompt takes alone, and others leave or wait for each such prompt."
    ),
    "jct": short_of(
        "All waiting requests are late, and the one that has waited longest has the least remaining time. That is "
        "the order of arrival. And memory limits the number of running requests."
    ),
}

CLAIMS = [
    gain_claim("throughput", "tokens/s", "1.42 to 11.21x", 1.42, _TWICE % ("tokens_per_s", 0)),
    gain_claim("requests", "requests/s", "1.54 to 10x", 1.54, _TWICE % ("requests_per_s", 2)),
    gain_claim("goodput", "tokens/s in time", "1.43 to 13.71x", 1.43, _TWICE % ("good_per_s", 0)),
    points_claim("slo", "increase of the share of tokens within their objectives", "37 to 90 % more", 0.37),
    points_claim(
        "jct-slo", "increase of the share of requests that end within theirs", "34 to 93 % more", 0.34
    ),
    gain_claim(
        "jct",
        "reduction of the mean time to a request's end",
        "1.61 to 12.22x",
        1.61,
        "{vllm:.2f}x less than vLLM, {sarathi:.2f}x than Sarathi ({jct_s:.0f} s, of those that ended; at "
        f"{NEAR_RATE}/s {{accelgen_near_s:.1f}} s, vLLM {{vllm_near_s:.1f}}, Sarathi {{sarathi_near_s:.1f}})",
    ),
    Claim(
        "ablations",
        "loss without dynamic chunks, order by slack, and fitting batches",
        SETUP + "; figure 12",
        "tokens/s: 97, 35, 61 %; goodput: 44, 52, 27 % (without chunks, more throughput than goodput is lost, "
        "which can't be from the same runs)",
        HOW,
        "tokens/s: {tokens_chunk:.0%}, {tokens_order:.0%}, {tokens_batch:.0%}; goodput: {good_chunk:.0%}, "
        "{good_order:.0%}, {good_batch:.0%}",
        lambda numbers: together(
            [
                amount(claimed, numbers[f"good_{each}"])
                for each, claimed in (("chunk", 0.44), ("order", 0.52), ("batch", 0.27))
            ]
        ),
        BECAUSE["ablations"],
    ),
]


def measure_overhead(size: Size, seed: int) -> Mapping[str, Numbers]:
    window_s = size.scaled(90)
    arrivals = with_objectives(ACCELGEN_MIX.arrivals(int(RATE * window_s), RATE, seed), seed)
    made = scenario(timed.policy_name(timed.TimedAccelgen))
    plans = timed.plans_of(made, arrivals, until_s=window_s)
    complete = [each for each in made.simulate(arrivals, until_s=window_s).streams if each.is_complete]
    jct_s = fmean(latency_of(stream).jct_s for stream in complete)
    plan_s = fmean(each.seconds for each in plans)
    return {"overhead": {"share": plan_s / jct_s, "plan_ms": 1e3 * plan_s, "jct_s": jct_s}}


OVERHEAD = Claim(
    "overhead",
    "time to schedule an iteration, as a share of the mean time to a request's end",
    SETUP + "; figure 11f",
    "0.02 %",
    "Live: the processor time of the plans of `accelgen` on this machine. Times to the end are simulated",
    "{share:.4%} ({plan_ms:.2f} ms, {jct_s:.0f} s)",
    lambda numbers: at_most(0.0002, numbers["share"]),
)

PAPER = Paper(
    "accelgen",
    "AccelGen: heterogeneous SLO-guaranteed high-throughput LLM inference serving",
    [Experiment(CLAIMS, measure), Experiment([OVERHEAD], measure_overhead, is_timed=True)],
)
