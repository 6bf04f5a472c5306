"""The parts in virtual time: OPT-13B on an A100, by its cost model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as replace_struct

from alignedserve.cli.simulate.goodput import find_goodput
from alignedserve.cli.simulate.mixture import Mixture, mixture
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.foresight import DEMO_ERROR, Foresee, Roughly, nothing, oracle
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import (
    Arrival,
    Lengths,
    LognormalLengths,
    gamma_arrivals,
    mixed,
    poisson_arrivals,
    read_azure_trace,
)
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.rt_with_be.arithmetic import Case, Row, objectives_s

COST = "opt-13b/a100-80gb"
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 64
POOL_BYTES = 800e9
ISLANDS = ((1, 1), (2, 2))
BURST_CV = 5.0
# Seconds until RT begins, when the instances are full of BE.
FILL_S = 60.0
TABLE_WINDOWS = 3
GOODPUT_WINDOW_S = 120.0
# Seconds for requests that are still open at the end of the window.
TAIL_S = 20.0
# Objectives for parts that can't measure them first.
SLO = Objectives(ttft_s=0.5, tpot_s=0.05)
# BE requests per decode instance: at the beginning, and per second after that, which is more than can be done.
BE_AT_FIRST, BE_PER_S = 200, 7.0
# Jobs with windows per second and decode instance.
JOBS_PER_S = 3.2
LENGTHS = ("none", "predicted", "oracle")


@dataclass(frozen=True)
class Workload:
    """Lengths of RT and BE, from a trace or generated. RT is shorter."""

    rt: Sequence[Lengths]
    be: Sequence[Lengths]

    @staticmethod
    def made_up(num_requests: int = 4000) -> Workload:
        rt = LognormalLengths(200, 48, spread=1.6, max_prompt=1024, max_output=256)
        be = LognormalLengths(500, 250, spread=1.6, max_prompt=2048, max_output=1024)
        return Workload(rt.sample(num_requests, seed=1), be.sample(num_requests, seed=2))

    @staticmethod
    def of_trace(path: Path, num_requests: int = 4000) -> Workload:
        """Takes both from the same trace: short chats are real time, longer ones best effort."""
        lengths = [arrival.lengths for arrival in read_azure_trace(path)]
        fitting = [each for each in lengths if each.prompt + each.output <= MAX_MODEL_LEN]
        random.Random(1).shuffle(fitting)
        rt = [each for each in fitting if each.prompt <= 1024 and each.output <= 256]
        be = [each for each in fitting if each.prompt > 256]
        return Workload(rt[:num_requests], be[-num_requests:])

    def real_time(self, rate: float, begin_s: float, end_s: float, cv: float = 1.0) -> list[Arrival]:
        # At high rates lengths are reused.
        lengths = [*self.rt] * (1 + int(2 * rate * (end_s - begin_s) / len(self.rt)))
        arrive = (
            poisson_arrivals(lengths, rate, seed=3) if cv == 1 else gamma_arrivals(lengths, rate, cv, seed=3)
        )
        within = [each for each in arrive if each.time_s < end_s - begin_s]
        if len(within) == len(arrive):
            raise ValueError(f"rate={rate}: {len(arrive)} requests do not last for {end_s - begin_s} s")
        return [replace(each, time_s=each.time_s + begin_s) for each in within]

    def best_effort(self, num_at_first: int, rate: float = 0.0, end_s: float = 0.0) -> list[Arrival]:
        """Returns `num_at_first` requests at time 0, and then a steady flow."""
        times_s = [0.0] * num_at_first + [index / rate for index in range(int(rate * end_s))]
        return [Arrival(time_s, self.be[index % len(self.be)], "be") for index, time_s in enumerate(times_s)]


@dataclass(frozen=True)
class Simulated:
    workload: Workload
    # RT requests per second and decode instance.
    rt_rate: float = 0.3
    window_s: float = 400.0

    def scenario(
        self, policy: str, size: tuple[int, int], slo: Objectives = SLO, lengths: str = "predicted"
    ) -> Scenario:
        return Scenario(
            load_cost_model(COST),
            num_prefill=size[0],
            num_decode=size[1],
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            pool_bytes=POOL_BYTES,
            slo=slo,
            scheduling=SchedulingConfig(policy),
            foresee=foresight(lengths),
            is_checked=False,
        )

    @property
    def end_s(self) -> float:
        return FILL_S + self.window_s

    def _run(self, scenario: Scenario, workload: list[Arrival]) -> Mixture:
        ran = scenario.simulate(workload, until_s=self.end_s + TAIL_S)
        return mixture(ran, FILL_S, self.end_s)

    def _run_full(self, scenario: Scenario, rt: list[Arrival]) -> Mixture:
        """Runs RT beside more BE than can be done. Raises RuntimeError if no BE was waiting at the end."""
        size = scenario.num_decode
        be = self.workload.best_effort(BE_AT_FIRST * size, BE_PER_S * size, self.end_s)
        ran = scenario.simulate(mixed(be, rt), until_s=self.end_s + TAIL_S)
        num_open = sum(stream.request.tier == "be" and stream.outcome is None for stream in ran.streams)
        if num_open <= MAX_NUM_SEQS * size:
            raise RuntimeError(f"of {len(be)} best-effort requests {num_open} are left: it has run out")
        return mixture(ran, FILL_S, self.end_s)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def table(self, policies: Sequence[str], slo: Objectives | None) -> Iterator[Row]:
        """Uses a longer window than the other parts, because a p99 needs hundreds of requests."""
        longer = replace(self, window_s=TABLE_WINDOWS * self.window_s)
        for size in ISLANDS:
            for policy in policies:
                yield from longer._cases(policy, size, slo)

    def _cases(self, policy: str, size: tuple[int, int], slo: Objectives | None) -> Iterator[Row]:
        rt = self.workload.real_time(self.rt_rate * size[1], FILL_S, self.end_s)
        head: Row = {"part": "sim", "place": place(size), "policy": policy, "round": 0}
        alone = self._run(self.scenario(policy, size, slo or SLO), rt)
        slo = slo or Objectives(*objectives_s(case_of(alone)))
        objectives = {"slo_ttft_s": slo.ttft_s, "slo_tbt_s": slo.tpot_s}
        yield head | {"case": "rt"} | case_of(alone).as_row() | costs_of(alone)
        scenario = self.scenario(policy, size, slo)
        for name, some in (("be", []), ("mix", rt)):
            found = self._run_full(scenario, some)
            yield head | {"case": name} | case_of(found).as_row() | costs_of(found) | objectives

    def bursts(self, policies: Sequence[str], slo: Objectives | None) -> Iterator[Row]:
        """BE's jobs have windows of various lengths, and need about what the instance can do."""
        for size in ISLANDS:
            rt = self.workload.real_time(2 * self.rt_rate * size[1], FILL_S, self.end_s, BURST_CV)
            be = self._jobs(size)
            for policy in policies:
                found = self._run(self.scenario(policy, size, slo or SLO), mixed(be, rt))
                yield (
                    {"part": "bursts", "place": place(size), "policy": policy, "round": 0, "case": "bursts"}
                    | case_of(found).as_row()
                    | costs_of(found)
                    | {"jobs_kept": found.be.jobs_kept}
                )

    def _jobs(self, size: tuple[int, int]) -> list[Arrival]:
        """Returns a steady flow of nearly what the instances can do, each job with a window of 30 s to 3 minutes."""
        dice = random.Random(4)
        lengths = self.workload.be
        rate = JOBS_PER_S * size[1]
        arrivals = poisson_arrivals(lengths[: int(rate * self.end_s)], rate, seed=5)
        return [replace(each, tier="be", window_s=dice.choice((30.0, 60.0, 180.0))) for each in arrivals]

    def goodput(self, policies: Sequence[str], slo: Objectives | None) -> Iterator[Row]:
        """Uses shorter windows, because about eight rates are tried."""
        shorter = replace(self, window_s=min(self.window_s, GOODPUT_WINDOW_S))
        for size in ISLANDS:
            for policy in policies:
                for lengths in LENGTHS if policy == "aligned" else ("predicted",):
                    yield shorter._goodput(policy, size, lengths, slo or SLO)

    def _goodput(self, policy: str, size: tuple[int, int], lengths: str, slo: Objectives) -> Row:
        scenario, found = self.scenario(policy, size, slo, lengths), {}

        def attainment(rate: float) -> float:
            rt = self.workload.real_time(rate, FILL_S, self.end_s)
            found[rate] = self._run_full(scenario, rt)
            return found[rate].rt.attainment

        goodput = find_goodput(attainment, first_rate=0.1 * size[1], precision=0.1)
        best = found.get(goodput.rate)
        return {
            "part": "goodput",
            "place": place(size),
            "policy": policy,
            "lengths": lengths,
            "rt_per_s": goodput.rate,
            "be_tokens_per_s": best.be.tokens_per_s if best else 0.0,
            "tried": goodput.tried,
        }

    def exact(self, policies: Sequence[str]) -> Iterator[Row]:
        """With memory for about a dozen requests. The simulated gateways check that the tokens are right."""
        for size in ISLANDS:
            for policy in policies:
                scenario = self.scenario(policy, size, lengths="none")
                cost = replace_struct(scenario.cost, num_kv_tokens=12_000)
                rt = self.workload.real_time(0.5 * size[1], 1.0, 120.0)
                be = self.workload.best_effort(200 * size[1])
                ran = replace(scenario, cost=cost).simulate(mixed(be, rt))
                found = mixture(ran, 0.0, max(stream.ended_s for stream in ran.streams))
                yield (
                    {"part": "exact", "place": place(size), "policy": policy}
                    | costs_of(found)
                    | {"num_different": sum(not stream.is_complete for stream in ran.streams)}
                )


def foresight(lengths: str) -> Foresee:
    by_name: dict[str, Foresee] = {
        "none": nothing,
        "predicted": Roughly(MAX_MODEL_LEN, DEMO_ERROR),
        "oracle": oracle(MAX_MODEL_LEN),
    }
    return by_name[lengths]


def place(size: tuple[int, int]) -> str:
    return f"{size[0]}+{size[1]}"


def case_of(found: Mixture) -> Case:
    rt = found.rt
    return Case(
        num_rt=rt.num_requests,
        ttft_p50_s=rt.ttft_s.p50,
        ttft_p99_s=rt.ttft_s.p99,
        gap_p50_s=rt.gap_s.p50,
        gap_p99_s=rt.gap_s.p99,
        attainment=rt.attainment if rt.num_requests else None,
        rt_tokens_per_s=rt.tokens_per_s,
        be_tokens_per_s=found.be.tokens_per_s,
        busy=found.busy,
    )


def costs_of(found: Mixture) -> Row:
    return {
        "num_evicted": found.num_evicted,
        "num_sat_out": found.num_sat_out,
        "num_interrupted": found.num_interrupted,
        "moved_bytes": found.moved_bytes,
        "num_computed": found.num_computed,
        "num_needed": found.num_needed,
    }
