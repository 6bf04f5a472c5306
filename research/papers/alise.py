"""ALISE: preemptive, shortest predicted remaining time first, with KV swapped by estimated waiting time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from alignedserve.cli.simulate.goodput import find_goodput
from alignedserve.sim.foresight import GSM8K_ERROR, Foresee, Roughly, nothing, oracle
from alignedserve.sim.model_kv import with_kv
from alignedserve.sim.report import latency_of
from alignedserve.sim.scenario import Ran, Scenario
from alignedserve.sim.trace import Arrival
from research.papers import lengths
from research.papers.baselines import AGAIN, PROMPTS_FIRST
from research.papers.claim import Claim, Experiment, Numbers, Paper, Size, short_of
from research.papers.datasets import ALPACA, SHAREGPT, Dataset
from research.papers.figures import normalized_latency_s
from research.papers.machines import FITS, ONE_GPU, colocated, scheduling, with_memory
from research.papers.verdict import NOISE, Verdict, amount, at_least, at_most, gain, together

MAX_MODEL_LEN = 4096
# Seconds per answer token: the paper's limit.
BOUND_S = 0.2
# The seconds in which requests arrive, and a rate that every policy can sustain.
RUNS = {"alpaca": (ALPACA, 60, 56.0), "sharegpt": (SHAREGPT, 400, 6.0)}
# Seconds of shorter runs, which show whether the gain depends on how long requests arrive.
SHORTER_S = {"alpaca": 30, "sharegpt": 133}
HOW = (
    f"Simulated, with {FITS}. KV of 38,600 tokens, as on two V100 32 GB; one colocated instance of up to 1,024 "
    "requests. As in the paper, vLLM computes prompts in iterations of their own, and computes again what it preempts; "
    "`fcfs` is ours. Requests arrive for 400 s (Alpaca's for 60 s). Predicted lengths have an error of 27 %, that of "
    "our predictor on GSM8K"
)


def scenario(policy: str, foresee: Foresee, mode: str = "swap") -> Scenario:
    base = colocated(with_memory(ONE_GPU, 2, 32e9), max_model_len=MAX_MODEL_LEN)
    chosen = replace(scheduling(policy), preemption_mode=mode)
    return replace(base, scheduling=chosen, foresee=foresee, max_num_seqs=1024)


# Policies with their preemption modes.
VLLM, NOW, ALISE = (PROMPTS_FIRST, AGAIN), ("fcfs", "swap"), ("alise", "swap")


def foresight(policy: str) -> Foresee:
    return Roughly(MAX_MODEL_LEN, GSM8K_ERROR) if policy == "alise" else nothing


def simulate(system: tuple[str, str], arrivals: Sequence[Arrival], foresee: Foresee | None = None) -> Ran:
    policy, mode = system
    return scenario(policy, foresee or foresight(policy), mode).simulate(arrivals)


def normalized(ran: Ran) -> float:
    """All requests have ended."""
    return normalized_latency_s(ran.streams, 0.0, MAX_MODEL_LEN)


def highest_rate(
    dataset: Dataset, seconds: int, first: float, seed: int, system: tuple[str, str], precision: float
) -> float:
    @cache
    def is_within(rate: float) -> float:
        arrivals = dataset.arrivals(int(rate * seconds), rate, seed)
        return float(normalized(simulate(system, arrivals)) <= BOUND_S)

    return find_goodput(is_within, first, 1.0, 1.4, precision).rate


def measure_rate(name: str) -> Callable[[Size, int], Mapping[str, Numbers]]:
    def measure(size: Size, seed: int) -> Mapping[str, Numbers]:
        dataset, seconds, first = RUNS[name]
        # In a third of a minute hardly any queue grows with either policy.
        seconds = seconds if name == "alpaca" else size.scaled(seconds)
        precision = 0.06 if size.is_quick else 0.03

        def highest(system: tuple[str, str], seconds: int = seconds) -> float:
            return highest_rate(dataset, seconds, first, seed, system, precision)

        vllm, now, alise = map(highest, (VLLM, NOW, ALISE))
        found = {"vllm": alise / vllm, "seconds": seconds, "vllm_rate": vllm, "now_rate": now, "alise": alise}
        shorter_s = SHORTER_S[name]
        vllm, alise = (highest(system, shorter_s) for system in (VLLM, ALISE))
        found |= {
            "shorter": alise / vllm,
            "shorter_s": shorter_s,
            "shorter_vllm": vllm,
            "shorter_alise": alise,
        }
        return {f"rate-{name}": found}

    return measure


WHY_RATE = dict.fromkeys(
    Verdict,
    "The longer requests arrive, the less overload either order survives. In the paper queues grow for 30 minutes, and "
    "the gain still falls with the seconds that were simulated here.",
)


def rate_claim(name: str, figure: str, claimed: float) -> Claim:
    def judge(numbers: Numbers) -> Verdict:
        """The paper's requests arrive for much longer, so a gain that falls with the time is not settled."""
        verdict = gain(claimed, numbers["vllm"])
        is_settled = numbers["vllm"] >= (1 - NOISE) * numbers["shorter"]
        return verdict if is_settled else together([verdict, Verdict.PARTLY])

    return Claim(
        f"rate-{name}",
        f"the rate at 0.2 s of latency for each token, {RUNS[name][0].name}",
        "OPT-2.7B to 13B, two V100 32 GB; figure 6, 30 minutes",
        figure,
        HOW
        + ". A simulation of 30 minutes takes too long, so shorter arrivals were measured, too. The gain must not "
        "fall from the shorter to the longer ones",
        "{vllm:.2f}x ({vllm_rate:.1f} → {alise:.1f} requests/s, `fcfs` {now_rate:.1f}) with arrivals for {seconds:.0f} "
        "s, {shorter:.2f}x for {shorter_s:.0f} s ({shorter_vllm:.1f} → {shorter_alise:.1f})",
        judge,
        WHY_RATE,
    )


# ---- response latency and the memory protocol -----------------------------------------------------------------------


# Requests per second, from about the capacity to far above it. The paper varies the rate, too, and gives the most.
OVERLOADS = (("alpaca", (140.0,)), ("sharegpt", (8.0, 10.0, 12.0, 15.0)))
# The seconds in which they arrive, also without --quick. A queue of thousands takes an hour to simulate.
OVERLOADED_S = {"alpaca": 60, "sharegpt": 130}


def mean_jct_s(ran: Ran) -> float:
    return fmean(latency_of(stream).jct_s for stream in ran.streams)


# Requests per second below and above those of the claim, for as long as in OVERLOADED_S.
OTHER_RATES = (6.0, 10.0)


def measure_latency(size: Size, seed: int) -> Mapping[str, Numbers]:
    """The rate is a little above the capacity. Below it, order makes no difference; far above it, no order helps."""
    arrivals = SHAREGPT.arrivals(int(8.0 * size.scaled(400)), 8.0, seed)
    runs = [simulate(system, arrivals) for system in (VLLM, NOW, ALISE)]
    runs.append(simulate(ALISE, arrivals, oracle(MAX_MODEL_LEN)))
    vllm_s, now_s, alise_s, known_s = map(mean_jct_s, runs)
    others: dict[str, float] = {}
    for rate in OTHER_RATES:
        shorter = SHAREGPT.arrivals(int(rate * OVERLOADED_S["sharegpt"]), rate, seed)
        theirs_s, ours_s = (mean_jct_s(simulate(system, shorter)) for system in (VLLM, ALISE))
        others[f"less_{rate:g}"] = 1 - ours_s / theirs_s
    return {
        "latency": others
        | {
            "less": 1 - alise_s / vllm_s,
            "less_known": 1 - known_s / vllm_s,
            "vllm_s": vllm_s,
            "now_s": now_s,
            "alise_s": alise_s,
        }
    }


LATENCY = Claim(
    "latency",
    "reduction of the mean response latency, compared with order of arrival",
    "OPT-13B, ShareGPT at 2 requests/s; figure 9",
    "46 % less",
    HOW
    + ". At 8 requests/s, this machine's queue grows as the paper's does at 2. Other rates last for 130 s",
    "{less:.0%} less ({vllm_s:.1f} → {alise_s:.1f} s; {less_known:.0%} with lengths known; `fcfs` {now_s:.1f} s; at 6 "
    "and 10/s {less_6:.0%} and {less_10:.0%} less)",
    lambda numbers: amount(0.46, numbers["less"]),
    short_of("With all lengths known it would be {less_known:.0%}."),
)


def measure_modes(size: Size, seed: int) -> Mapping[str, Numbers]:
    """Measures the ratio at each rate, and the most for each dataset."""
    found: dict[str, dict[str, float]] = {"defer": {}, "recompute": {}}
    for name, rates in OVERLOADS:
        for rate in rates:
            arrivals = RUNS[name][0].arrivals(int(rate * OVERLOADED_S[name]), rate, seed)
            swapped = normalized(simulate(ALISE, arrivals))
            for mode, ratios in found.items():
                ratio = normalized(simulate(("alise", mode), arrivals)) / swapped
                ratios[f"{name}_{rate:g}"] = ratio
                ratios[name] = max(ratios.get(name, 0.0), ratio)
    return found


WHY_MODES = {
    "defer": "The gain grows with the load, since more short requests wait behind long ones.",
    "recompute": "KV is dropped for shorter requests only. The paper also drops it for requests that have aged, and "
    "warns that they then take turns. With ShareGPT, the gain does not grow beyond 12/s.",
}


def mode_claim(mode: str, over: str, claimed: float) -> Claim:
    return Claim(
        mode,
        f"normalized latency with KV swapped by estimated waiting time, compared with {over}",
        "OPT, V100, Alpaca; figure 8, several rates",
        f"up to {claimed}x",
        HOW
        + f". The other system is `alise` with `--preemption-mode {mode}`. Alpaca's requests arrive for 60 s, "
        "ShareGPT's for 130 s, with rates up to twice the capacity. The paper's figure is Alpaca's, and so is the "
        "verdict",
        "Alpaca {alpaca:.2f}x, ShareGPT up to {sharegpt:.2f}x (at 8, 10, 12 and 15/s {sharegpt_8:.2f}x, "
        "{sharegpt_10:.2f}x, {sharegpt_12:.2f}x and {sharegpt_15:.2f}x)",
        lambda numbers: gain(claimed, numbers["alpaca"]),
        short_of(WHY_MODES[mode]),
    )


DEFERRED = mode_claim("defer", "deferral of requests that find no room", 1.8)
RECOMPUTED = mode_claim("recompute", "its deletion and recomputation", 2.8)

# ---- KV as INT8 in host memory ---------------------------------------------------------------------------------------

# One pool larger than the rates above need, and one smaller.
POOLS = {"wide": 1e12, "narrow": 20e9}
# Measured answers (benchmarks/results/int8_kv.md).
ANSWERS = Path(__file__).parents[2] / "benchmarks" / "results" / "int8_kv.json"
# The most points of exact answers that INT8 may cost: that benchmark's target.
MOST_LOST = 0.3
# The seconds in which requests arrive, also without --quick. A queue of thousands takes an hour to simulate.
INT8_S = 130


def measure_int8(size: Size, seed: int) -> Mapping[str, Numbers]:
    measured = json.loads(ANSWERS.read_text())
    arrivals = SHAREGPT.arrivals(int(10.0 * INT8_S), 10.0, seed)
    found: dict[str, float] = {}
    for name, pool_bytes in POOLS.items():
        base = replace(scenario("alise", foresight("alise")), pool_bytes=pool_bytes)
        compressed = replace(base, cost=with_kv(base.cost, base.block_size, pool_kv_dtype="int8"))
        plain_s, int8_s = (normalized(each.simulate(arrivals)) for each in (base, compressed))
        found |= {f"{name}_s": plain_s, f"{name}_int8_s": int8_s, name: plain_s / int8_s}
        found["bytes"] = compressed.cost.pool_bytes_per_token / base.cost.pool_bytes_per_token
    agreement = measured["agreement"]
    found["same_tokens"] = agreement["num_same_tokens"] / agreement["num_tokens"]
    return {"int8": found | {"points_lost": measured["points_lost"]}}


INT8 = Claim(
    "int8",
    "KV in host memory as INT8: less memory, and almost the same answers",
    "3.2, where it is used throughout, without a figure",
    "none",
    HOW + f". ShareGPT at 10 requests/s for {INT8_S} s, with a pool that is never full and with one of "
    f"{POOLS['narrow'] / 1e9:.0f} GB. Answers are the demo model's, live (int8_kv.md)",
    "{bytes:.1%} of the bytes; normalized latency {wide_s:.3f} → {wide_int8_s:.3f} s, with a narrow pool "
    "{narrow_s:.3f} → {narrow_int8_s:.3f} s ({narrow:.2f}x); {same_tokens:.2%} of tokens the same, {points_lost:.2f} "
    "points of exact answers lost",
    lambda numbers: together(
        [
            at_most(MOST_LOST, numbers["points_lost"]),
            *(at_least(1 - NOISE, numbers[name]) for name in POOLS),
        ]
    ),
    {Verdict.REPRODUCED: "Answers are as good, and latency is no worse. The paper has no figure to reach."},
)

# ---- prediction -----------------------------------------------------------------------------------------------------


def measure_prediction(size: Size, seed: int) -> Mapping[str, Numbers]:
    return {"prediction": lengths.measure(size, seed)}


PREDICTION = Claim(
    "prediction",
    "mean relative error of predicted lengths, and milliseconds per prediction",
    "Alpaca and ShareGPT, BERT encoder and vector search; 3.1 and table 2",
    "3.4 % and 9.2 %; 3.9 to 4.7 ms",
    "Live: our hashing encoder, on the demo model's tasks or on --answers. Neither of the paper's datasets may be "
    "shipped",
    "{error:.1%}, {predict_ms:.2f} ms (class mean: {mean_error:.1%})",
    lambda numbers: at_most(0.092, numbers["error"]),
    {
        Verdict.REFUTED: "The paper's database already has answers to very similar prompts. Without such prompts, "
        "neither neighbours nor regression predict lengths that well (lengths.md)."
    },
)

PAPER = Paper(
    "alise",
    "ALISE: Accelerating Large Language Model Serving with Speculative Scheduling",
    [
        Experiment(
            [rate_claim("alpaca", "1.3 to 1.8x vLLM (1.5x at 200 ms)", 1.5)],
            measure_rate("alpaca"),
        ),
        Experiment([rate_claim("sharegpt", "up to 2.1x vLLM", 2.1)], measure_rate("sharegpt")),
        Experiment([LATENCY], measure_latency),
        Experiment([DEFERRED, RECOMPUTED], measure_modes),
        Experiment([INT8], measure_int8),
        Experiment([PREDICTION], measure_prediction, is_timed=True),
    ],
)
