"""A simulated decode instance: the real schedule, with iterations and copies that take the cost model's time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignedserve.decode_worker.options import DecodeOptions
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.decode_worker.schedule import DecodeSchedule
from alignedserve.estimate import Estimate
from alignedserve.messages import (
    Abort,
    AnyMessage,
    Coming,
    DecodeReport,
    Evict,
    Failed,
    InstanceLimits,
    NewTokens,
    Offer,
    Work,
)
from alignedserve.sim.instance import Copies, Sequence, SimInstance
from alignedserve.sim.prefill import SimPrefill
from alignedserve.types import InstanceId, RequestKey

if TYPE_CHECKING:
    from alignedserve.sim.world import World


@dataclass
class Notes:
    """For the next report."""

    news: list[NewTokens] = field(default_factory=list)
    admitted: list[RequestKey] = field(default_factory=list)
    evicted: list[tuple[RequestKey, int]] = field(default_factory=list)
    duration_s: float = 0.0


class SimDecode(SimInstance):
    role = "decode"
    schedule: DecodeSchedule

    def __init__(
        self, world: World, instance_id: InstanceId, limits: InstanceLimits, options: DecodeOptions
    ) -> None:
        super().__init__(world, instance_id, limits)
        self._options = options

    def begin(self) -> None:
        super().begin()
        channels = self.world.cost.channels
        has_deadlines = self._options.discipline.has_deadlines
        estimate = Estimate(self.world.cost) if has_deadlines else None
        self.schedule = DecodeSchedule(self.limits, self._options, estimate)
        self._fetches = Copies(self, channels.fetch)
        self._admissions = Copies(self, channels.admit)
        self._saves = Copies(self, channels.save)
        self._notes = Notes()
        self._last_report: DecodeReport | None = None

    # ---- orders ----

    def obey(self, order: AnyMessage) -> None:
        match order:
            case Offer():
                self.schedule.offer(order.works, order.is_batch, order.source)
                for work in order.works:
                    self.adopt(work)
            case Coming():
                self.schedule.expect(order.num_prefilling, order.num_ready, self.world.clock.now)
            case Evict():
                self._evict(order)
            case Abort():
                self._abort(order.key)
            case _:
                raise ValueError(f"{self.instance_id} got a {type(order).__name__}, not for decode instances")

    def _abort(self, key: RequestKey) -> None:
        if self.schedule.abort(key):
            self.aborted.add(key)
        else:
            self.forget(key)

    def _evict(self, order: Evict) -> None:
        key = order.key
        if not self.schedule.evict(key):
            return
        sequence = self.sequences[key]
        sequence.blocks = order.blocks
        num_saved, num_cached = order.num_saved, sequence.num_cached
        if sequence.segment.num_blocks_for(num_cached) > len(order.blocks):
            self.schedule.evict_failed(key)
            self.send(Failed(key, "evict", f"{num_cached} tokens, {len(order.blocks)} blocks"))
        else:
            self.save(self._saves, sequence, num_saved, num_cached, lambda works: self._evicted(key, works))

    def _evicted(self, key: RequestKey, works: bool) -> None:
        if key in self.aborted:
            self.schedule.evicted(key)
            self.forget(key)
        elif works:
            self.schedule.evicted(key)
            self._notes.evicted.append((key, self.sequences.pop(key).num_cached))
        else:
            self.schedule.evict_failed(key)
            self.send(Failed(key, "evict", "the simulation wanted it so"))

    # ---- admission ----

    def _pull(self, work: Work) -> None:
        key = work.request.key
        source = self.schedule.source_of(key)
        if source is None:
            self.load(self._fetches, self.sequences[key], lambda works: self._pulled(key, works))
        else:
            self._pull_from(source, self.sequences[key])

    def _pull_from(self, source: InstanceId, sequence: Sequence) -> None:
        stager = self.world.processes[source]
        assert isinstance(stager, SimPrefill)
        key, num_tokens = sequence.key, sequence.num_cached
        works = self.world.copy_works() and stager.holds(key, num_tokens)

        def finish() -> None:
            still_works = works and stager.holds(key, num_tokens)
            self.at_boundary(lambda: self._pulled(key, still_works))

        self._admissions.start(sequence.segment.num_blocks_for(num_tokens), finish, sequence.is_rt)

    def _pulled(self, key: RequestKey, works: bool) -> None:
        if not works:
            self.schedule.pull_failed(key)
            self.fail(key, "pull")
        elif self.schedule.pulled(key):
            self._notes.admitted.append(key)
        else:
            self.forget(key)

    # ---- iterations ----

    def go_on(self) -> None:
        plan = self.schedule.plan(self.world.clock.now)
        self.schedule.check()
        for work in plan.pulls:
            self._pull(work)
        self._report(plan.wants_evicted)
        if plan.hold_s:
            self.after(plan.hold_s, lambda: self.at_boundary(lambda: None))
        elif plan.goes_on:
            duration_s = self._duration_s(plan)
            self.compute(duration_s, lambda: self._computed(plan, duration_s))

    def _duration_s(self, plan: DecodePlan) -> float:
        chunks = [(self.sequences[key].num_cached, count) for key, count in plan.chunks]
        lengths = []
        for sequence in (self.sequences[key] for key in plan.run):
            if sequence.num_tokens - sequence.num_cached == 1:
                lengths.append(sequence.num_tokens)
            else:
                chunks.append((sequence.num_cached, sequence.num_tokens - sequence.num_cached))
        return self.world.cost.iteration(chunks, lengths)

    def _computed(self, plan: DecodePlan, duration_s: float) -> None:
        self.schedule.took(duration_s)
        for key, count in plan.chunks:
            self.schedule.computed(key, count)
            self.advance(self.sequences[key], count)
        self.schedule.sampled(plan.run)
        for key in plan.run:
            self._sample(self.sequences[key])
        self._notes.duration_s = duration_s

    def _sample(self, sequence: Sequence) -> None:
        self.advance(sequence, sequence.num_tokens - sequence.num_cached)
        news = self.sample(sequence)
        self._notes.news.append(news)
        if news.finish_reason:
            self.schedule.ended(sequence.key)
            del self.sequences[sequence.key]

    def _report(self, wants_evicted: list[RequestKey]) -> None:
        notes, schedule, lengths = self._notes, self.schedule, self.schedule.lengths()
        num_be_running, num_be_blocks = schedule.best_effort()
        report = DecodeReport(
            news=notes.news,
            admitted=notes.admitted,
            wants_evicted=wants_evicted,
            evicted=notes.evicted,
            num_free_blocks=schedule.num_free_blocks,
            num_running=schedule.num_running,
            max_length=max(lengths, default=0),
            sum_lengths=sum(lengths),
            duration_s=notes.duration_s,
            min_length=min(lengths, default=0),
            pace=schedule.pace,
            num_be_running=num_be_running,
            num_be_blocks=num_be_blocks,
        )
        self._notes = Notes()
        if report != self._last_report:
            self._last_report = report
            self.send(report)
