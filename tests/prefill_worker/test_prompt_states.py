"""What each event does to a prompt in each of its states: in the table of prompts, and on a whole prefill instance with
copies that end when the test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from alignedserve.prefill_worker.prompt_table import PromptTable
from alignedserve.prefill_worker.schedule import PrefillSchedule
from alignedserve.prefill_worker.scheduled_request import PromptState
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Failed,
    Gone,
    InstanceLimits,
    Prefill,
    PrefillReport,
    Unstage,
    Work,
)
from alignedserve.scheduling.boundary import PrefillBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import PrefillPart
from alignedserve.sim.model import make_request
from alignedserve.sim.trusting import TrustingEngine
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.transport.completions import Completions, Done, Outcome, TransferIds
from alignedserve.transport.runs import Pairs, TransferSpec
from alignedserve.transport.staging_buffer import StagingBuffer
from alignedserve.types import BlockId, Epoch, InstanceId, PoolBlockId, RequestKey
from tests.sim.islands import COST, limits
from tests.works import make_work

KEY = RequestKey(7)
LOADING, COMPUTING, SAVING = PromptState.LOADING, PromptState.COMPUTING, PromptState.SAVING
SAVED, PREEMPTING, ABORTED = PromptState.SAVED, PromptState.PREEMPTING, PromptState.ABORTED
WAITING = PromptState.WAITING


class Preempting(PrefillPart):
    is_wanted = False

    def plan(self, at: PrefillBoundary) -> None:
        if self.is_wanted:
            self.is_wanted = False
            at.preempt(at.computing[0])
        else:
            super().plan(at)


class OnDemand(Fcfs):
    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        self.part = Preempting(limits, self.config)
        return self.part


class Transfers:
    """Copies that run until `end`. They stop for nobody."""

    staging_share = 0.5
    checks_some_blocks = False

    def __init__(self) -> None:
        self.completions = Completions()
        self.staging_buffer = StagingBuffer(Epoch(1), self.completions)
        self._ids = TransferIds(Epoch(1))
        self._running: list[tuple[str, RequestKey, Done]] = []

    def load(self, key: RequestKey, pairs: Pairs, done: Done, is_urgent: bool = False) -> None:
        self._running.append(("load", key, done))

    def save(
        self, key: RequestKey, pairs: Pairs, num_empty: int, done: Done, is_urgent: bool = False
    ) -> None:
        self._running.append(("save", key, done))

    def end(self, error: str | None = None) -> None:
        for what, key, done in self._running:
            self.completions.post(done, Outcome(self._ids.next(), what, (key,), error))
        self._running.clear()

    def stage(self, key: RequestKey, blocks: Sequence[BlockId], done: Done) -> None:
        self.staging_buffer.put(key, blocks, done)
        self.num_staged = len(blocks)

    def unstage(self, key: RequestKey) -> None:
        self.staging_buffer.withdraw(key)

    def abandon(self, key: RequestKey) -> None: ...

    def pull(self, source: InstanceId, address: str, specs: Sequence[TransferSpec], done: Done) -> None: ...

    def use_pool(self, pool: object, checksums: object = None) -> None: ...

    def leave_pool(self) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None: ...


class Instance:
    """With one prompt of forty tokens, sixteen an iteration."""

    def __init__(self, num_cached: int = 0, is_rt: bool = False, num_output: int = 5) -> None:
        engine = TrustingEngine(limits(max_num_batched_tokens=16), COST, Counter())
        self.transfers, self._policy = Transfers(), OnDemand(SchedulingConfig())
        self.worker = PrefillWorker(
            engine, self.transfers, self._policy, clock=lambda: 0.0, memory=engine.memory
        )
        self.said: list[AnyMessage] = []
        blocks = [PoolBlockId(block) for block in range(3)]
        request = make_request(KEY, 40, num_output, 0.0)
        self.worker.on(Prefill([Work(request, [], num_cached, blocks, Deadlines(is_rt))]))

    def step(self, num_steps: int = 1) -> Instance:
        for _ in range(num_steps):
            messages, _ = self.worker.step()
            self.said += messages
        return self

    def end_copies(self, error: str | None = None) -> Instance:
        self.transfers.end(error)
        self.said += self.worker.take_outcomes()
        return self

    def fail_copies(self) -> Instance:
        return self.end_copies("lost")

    def order(self, order: AnyMessage) -> Instance:
        self.worker.on(order)
        self.said += self.worker.take_outcomes()
        return self

    def abort(self) -> Instance:
        return self.order(Abort([KEY]))

    def unstage(self) -> Instance:
        return self.order(Unstage([KEY]))

    def preempt(self) -> Instance:
        self._policy.part.is_wanted = True
        return self.step()

    def begin_pull(self) -> Instance:
        self.transfers.staging_buffer.begin_pull([KEY], [self.transfers.num_staged])
        return self

    def finish_pull(self) -> Instance:
        self.transfers.staging_buffer.finish_pull([KEY])
        self.said += self.worker.take_outcomes()
        return self

    @property
    def state(self) -> PromptState | None:
        prompts = self.worker.schedule.prompts
        request = prompts.started.get(KEY) or prompts.waiting.get(KEY)
        if request is None:
            self.worker.check_idle()
        self.worker.check()
        return request.state if request else None

    @property
    def told(self) -> list[object]:
        """What the router was told of the prompt's end: `saved`, or a message."""
        reports = [each for each in self.said if isinstance(each, PrefillReport)]
        saved = ["saved" for report in reports for key, _ in report.saved if key == KEY]
        return [*saved, *(each for each in self.said if isinstance(each, Failed | Gone))]


def held() -> Instance:
    return Instance(is_rt=True).step(3)


STARTS: dict[str, Callable[[], Instance]] = {
    "loading": lambda: Instance(num_cached=16).step(),
    "computing": lambda: Instance().step(),
    "computing, no copy": lambda: Instance().step().end_copies(),
    "at the last chunk": lambda: Instance().step(2),
    "saving": lambda: Instance().step(3),
    "saving, held": held,
    "saving, pulled": lambda: held().begin_pull(),
    "saved": lambda: held().end_copies(),
    "saved, pulled": lambda: held().begin_pull().end_copies(),
    "preempting": lambda: Instance().step().preempt(),
    "preempted": lambda: Instance().step().end_copies().preempt(),
    "aborted": lambda: Instance().step().abort(),
    "aborted, pulled": lambda: held().begin_pull().end_copies().abort(),
    "failed, pulled": lambda: held().begin_pull().fail_copies(),
    "ended": lambda: Instance(num_output=1).step(3),
}
GONE, FAILED = Gone([KEY]), Failed(KEY, "save", "lost")
# None: nothing is left of it.
AFTER: list[tuple[str, Callable[[Instance], object], PromptState | None, list[object]]] = [
    ("loading", Instance.end_copies, COMPUTING, []),
    ("loading", Instance.fail_copies, None, [Failed(KEY, "load", "lost")]),
    ("loading", Instance.abort, ABORTED, []),
    ("computing", Instance.step, COMPUTING, []),
    ("computing", Instance.end_copies, COMPUTING, []),
    ("computing", Instance.fail_copies, None, [FAILED]),
    ("computing", Instance.abort, ABORTED, []),
    ("computing", Instance.preempt, PREEMPTING, []),
    ("computing, no copy", Instance.abort, None, [GONE]),
    ("computing, no copy", Instance.preempt, WAITING, []),
    ("at the last chunk", Instance.step, SAVING, []),
    ("saving", Instance.end_copies, None, ["saved"]),
    ("saving", Instance.fail_copies, None, [FAILED]),
    ("saving", Instance.abort, ABORTED, []),
    ("saving, held", Instance.end_copies, SAVED, ["saved"]),
    ("saving, held", Instance.fail_copies, None, [FAILED]),
    ("saving, held", Instance.abort, ABORTED, []),
    ("saving, held", Instance.unstage, SAVING, []),
    ("saving, pulled", Instance.end_copies, SAVED, ["saved"]),
    ("saving, pulled", Instance.fail_copies, ABORTED, []),
    ("saving, pulled", Instance.abort, ABORTED, []),
    ("saving, pulled", Instance.unstage, SAVING, []),
    ("saving, pulled", Instance.finish_pull, SAVING, []),
    ("saved", Instance.abort, None, [GONE]),
    ("saved", Instance.unstage, None, []),
    ("saved, pulled", Instance.abort, ABORTED, []),
    ("saved, pulled", Instance.unstage, SAVED, []),
    ("saved, pulled", Instance.finish_pull, None, []),
    ("preempting", Instance.end_copies, WAITING, []),
    ("preempting", Instance.fail_copies, None, [FAILED]),
    ("preempting", Instance.abort, ABORTED, []),
    ("preempted", Instance.step, LOADING, []),
    ("preempted", Instance.abort, None, [GONE]),
    ("aborted", Instance.end_copies, None, [GONE]),
    ("aborted", Instance.fail_copies, None, [GONE]),
    ("aborted", Instance.abort, ABORTED, []),
    ("aborted, pulled", Instance.finish_pull, None, [GONE]),
    ("failed, pulled", Instance.finish_pull, None, [FAILED]),
    ("failed, pulled", Instance.abort, ABORTED, []),
    ("ended", Instance.end_copies, None, []),
    ("ended", Instance.abort, ABORTED, []),
]


@pytest.mark.parametrize(("start", "event", "state", "told"), AFTER)
def test_an_event_leads_to_this_state(
    start: str, event: Callable[[Instance], object], state: PromptState | None, told: list[object]
) -> None:
    instance = STARTS[start]()
    instance.said.clear()
    event(instance)
    assert (instance.state, instance.told) == (state, told)


def test_an_abort_is_answered_although_the_prompt_had_failed() -> None:
    assert STARTS["failed, pulled"]().abort().finish_pull().told == [GONE]
    assert STARTS["ended"]().abort().end_copies().told == [GONE]


def prompts_in(state: PromptState) -> PromptTable:
    schedule = PrefillSchedule(limits())
    schedule.prefill([make_work(40, 0, num_cached=16 if state is LOADING else 0, key=KEY)])
    schedule.plan(0.0)
    prompts = schedule.prompts
    if state in (SAVING, SAVED):
        prompts.computed(KEY, 40)
    if state is SAVED:
        schedule.hold(KEY)
        prompts.saved(KEY)
    if state is PREEMPTING:
        prompts.preempt(prompts.started[KEY])
    if state is ABORTED:
        prompts.abort(KEY)
    assert prompts.started[KEY].state is state
    return prompts


REPORTS: dict[str, Callable[[PromptTable], object]] = {
    "loaded": lambda prompts: prompts.loaded(KEY),
    "computed": lambda prompts: prompts.computed(KEY, prompts.started[KEY].num_pending),
    "saved": lambda prompts: prompts.saved(KEY),
    "let go": lambda prompts: prompts.let_go(KEY),
    "preempt": lambda prompts: prompts.preempt(prompts.started[KEY]),
    "preempted": lambda prompts: prompts.preempted(KEY),
    "abort": lambda prompts: prompts.abort(KEY),
}
# None: it is gone. Other reports raise.
REPORTED: dict[PromptState, dict[str, PromptState | None]] = {
    LOADING: {"loaded": COMPUTING, "let go": LOADING, "abort": ABORTED},
    COMPUTING: {"computed": SAVING, "let go": COMPUTING, "preempt": PREEMPTING, "abort": ABORTED},
    SAVING: {"saved": None, "let go": SAVING, "abort": ABORTED},
    SAVED: {"let go": None, "abort": ABORTED},
    PREEMPTING: {"let go": PREEMPTING, "preempted": WAITING, "abort": ABORTED},
    ABORTED: {"loaded": None, "saved": None, "let go": ABORTED, "abort": ABORTED},
}


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("state", REPORTED)
def test_a_report_leads_to_this_state_or_raises(state: PromptState, report: str) -> None:
    prompts = prompts_in(state)
    if report not in REPORTED[state]:
        with pytest.raises(RuntimeError, match=rf"request 7: to enter \w+, but it is {state.name}"):
            REPORTS[report](prompts)
        return
    REPORTS[report](prompts)
    left = prompts.started.get(KEY) or prompts.waiting.get(KEY)
    assert (left and left.state) is REPORTED[state][report]
