"""A simulated prefill instance: the real schedule, with iterations and copies that take the cost model's time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignedserve.estimate import Estimate
from alignedserve.messages import (
    Abort,
    AnyMessage,
    InstanceLimits,
    NewTokens,
    Prefill,
    PrefillReport,
    Stage,
    Unstage,
    Work,
)
from alignedserve.prefill_worker.options import PrefillOptions
from alignedserve.prefill_worker.plan import PrefillPlan
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.sim.instance import Copies, SimInstance
from alignedserve.types import InstanceId, RequestKey

if TYPE_CHECKING:
    from alignedserve.sim.world import World


@dataclass
class Notes:
    """For the next report."""

    news: list[NewTokens] = field(default_factory=list)
    saved: list[tuple[RequestKey, int]] = field(default_factory=list)
    staged: list[RequestKey] = field(default_factory=list)
    progress: list[tuple[RequestKey, int]] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not (self.news or self.saved or self.staged or self.progress)


@dataclass
class Saving:
    """How far a prompt's KV has got into the pool."""

    # tokens, when all is computed
    num_tokens: int
    # tokens that are there, or on their way
    num_sent: int
    num_under_way: int = 0
    has_failed: bool = False
    # all that is computed is sent; the rest waits
    is_giving_up: bool = False


class SimPrefill(SimInstance):
    role = "prefill"
    schedule: PrefillSchedule

    def __init__(
        self,
        world: World,
        instance_id: InstanceId,
        limits: InstanceLimits,
        staging_share: float,
        options: PrefillOptions | None = None,
    ) -> None:
        super().__init__(world, instance_id, limits)
        self._staging_share = staging_share
        self._options = options or PrefillOptions()

    def begin(self) -> None:
        super().begin()
        channels = self.world.cost.channels
        has_deadlines = self._options.discipline.has_deadlines
        estimate = Estimate(self.world.cost) if has_deadlines else None
        self.schedule = PrefillSchedule(self.limits, self._staging_share, self._options, estimate)
        self._saving: dict[RequestKey, Saving] = {}
        self._loading: set[RequestKey] = set()
        # tokens of each that decode instances may pull from here
        self._staged: dict[RequestKey, int] = {}
        self._loads = Copies(self, channels.stage)
        self._saves = Copies(self, channels.save)
        self._notes = Notes()

    def end_life(self) -> None:
        super().end_life()
        self._staged = {}

    def holds(self, key: RequestKey, num_tokens: int) -> bool:
        return self._staged.get(key) == num_tokens

    # ---- orders ----

    def obey(self, order: AnyMessage) -> None:
        match order:
            case Prefill():
                self.schedule.prefill(order.works)
                for work in order.works:
                    self.adopt(work)
                    num_tokens = self.sequences[work.request.key].num_tokens
                    self._saving[work.request.key] = Saving(num_tokens, num_sent=work.num_cached)
            case Stage():
                self.schedule.stage(order.works)
                for work in order.works:
                    self.adopt(work)
            case Unstage():
                self.schedule.unstage(order.keys)
                for key in order.keys:
                    self._unstaged(key)
            case Abort():
                self._abort(order.key)
            case _:
                raise ValueError(
                    f"{self.instance_id} got a {type(order).__name__}, not for prefill instances"
                )

    def _unstaged(self, key: RequestKey) -> None:
        if self._staged.pop(key, None) is not None:
            del self.sequences[key]

    def _abort(self, key: RequestKey) -> None:
        self._staged.pop(key, None)
        if not self.schedule.abort(key):
            self._saving.pop(key, None)
            self.forget(key)
            return
        self.aborted.add(key)
        self._finish_saving(key)

    # ---- copies from the pool ----

    def _load(self, work: Work) -> None:
        key = work.request.key
        self._loading.add(key)
        self.load(self._loads, self.sequences[key], lambda works: self._loaded(key, works))

    def _loaded(self, key: RequestKey, works: bool) -> None:
        self._loading.remove(key)
        if not works:
            self.schedule.abort(key)
        if not self.schedule.loaded(key):
            del self._saving[key]
            self.fail(key, "load")

    def _stage(self, work: Work) -> None:
        key = work.request.key
        self.load(self._loads, self.sequences[key], lambda works: self._stage_done(key, works))

    def _stage_done(self, key: RequestKey, works: bool) -> None:
        if not works:
            self.schedule.abort(key)
        if self.schedule.staged(key):
            self._staged[key] = self.sequences[key].num_cached
            self._notes.staged.append(key)
        elif works and key not in self.aborted:
            # unstaged meanwhile
            del self.sequences[key]
        else:
            self.fail(key, "load")

    # ---- copies to the pool ----

    def _save_new(self, key: RequestKey) -> None:
        """Blocks that are full, and the last one once all is computed."""
        sequence, saving = self.sequences[key], self._saving[key]
        end = sequence.num_cached
        if end < saving.num_tokens and not saving.is_giving_up:
            end -= end % self.limits.block_size
        if end > saving.num_sent:
            self.save(self._saves, sequence, saving.num_sent, end, lambda works: self._saved(key, works))
            saving.num_sent = end
            saving.num_under_way += 1

    def _saved(self, key: RequestKey, works: bool) -> None:
        saving = self._saving[key]
        saving.num_under_way -= 1
        if not works:
            saving.has_failed = True
            self.schedule.abort(key)
        self._finish_saving(key)

    def _finish_saving(self, key: RequestKey) -> None:
        saving = self._saving.get(key)
        if saving is None or key in self._loading or saving.num_under_way:
            return
        if key in self.aborted or saving.has_failed:
            self._leave(key)
            self.fail(key, "save")
        elif saving.is_giving_up:
            saving.is_giving_up = False
            self.schedule.gave_up(key)
        elif saving.num_sent == saving.num_tokens:
            self._leave(key)
            del self.sequences[key]
            self._notes.saved.append((key, saving.num_tokens))

    def _give_up(self, key: RequestKey) -> None:
        self._saving[key].is_giving_up = True
        self._save_new(key)
        self._finish_saving(key)

    def _leave(self, key: RequestKey) -> None:
        self.schedule.saved(key)
        del self._saving[key]

    # ---- iterations ----

    def go_on(self) -> None:
        plan = self.schedule.plan(self.world.clock.now)
        self.schedule.check()
        for key in plan.gives_up:
            self._give_up(key)
        for work in plan.loads:
            self._load(work)
        for work in plan.stages:
            self._stage(work)
        self._report()
        if plan.chunks:
            chunks = [(self.sequences[key].num_cached, count) for key, count in plan.chunks]
            duration_s = self.world.cost.iteration(chunks, [])
            self.compute(duration_s, lambda: self._computed(plan, duration_s))
        elif plan.goes_on:
            self.at_boundary(lambda: None)

    def _computed(self, plan: PrefillPlan, duration_s: float) -> None:
        self.schedule.took(duration_s)
        for key, count in plan.chunks:
            self.schedule.computed(key, count)
            sequence = self.sequences[key]
            self.advance(sequence, count)
            self._save_new(key)
            if sequence.num_cached == sequence.num_tokens:
                self._notes.news.append(self.sample(sequence))
            else:
                self._notes.progress.append((key, sequence.num_cached))
        self._notes.duration_s = duration_s

    def _report(self) -> None:
        notes = self._notes
        if notes.is_empty:
            return
        self._notes = Notes()
        self.send(
            PrefillReport(
                news=notes.news,
                saved=notes.saved,
                staged=notes.staged,
                progress=notes.progress,
                num_free_blocks=self.schedule.num_free_blocks,
                duration_s=notes.duration_s,
                pace=self.schedule.pace,
            )
        )
