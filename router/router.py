"""The router's core: events in, orders out. No I/O, no threads, no clock.

`on` is the table of contents: take the event in, start prefills, give pooled requests to decode instances. What a
request goes through is in life.py; the two directions are prefill.py and decode.py; deaths are recovery.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Candidates,
    DecodeReport,
    Failed,
    Gone,
    MakeSpare,
    PrefillReport,
    Rejected,
    Request,
    Reserved,
    Submit,
)
from alignedserve.router.admission import refuse, refuse_slo, remark_on, with_possible_slo
from alignedserve.router.clock import arrived_s, deadlines_of
from alignedserve.router.cluster_state import PrefillView
from alignedserve.router.config import RouterConfig
from alignedserve.router.decode import DecodeSide
from alignedserve.router.events import Closed, Connected, Event, Received, Send, Tick
from alignedserve.router.life import Life
from alignedserve.router.orphans import Orphans
from alignedserve.router.prefill import PrefillSide
from alignedserve.router.recovery import Recovery
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.forecast import Forecast
from alignedserve.scheduling.policies import make_policy
from alignedserve.types import Epoch, InstanceId, RequestKey


class Router:
    def __init__(
        self, config: RouterConfig, epoch: Epoch, scheduling: SchedulingConfig | None = None
    ) -> None:
        self.config = config
        self.life = Life(config, make_policy(scheduling or SchedulingConfig()))
        # by what they are about
        self._remarks: dict[str, str] = {}
        self._num_remarked = 0
        self._orphans = Orphans(config.orphan_s)
        self._decode = DecodeSide(self.life)
        self._prefill = PrefillSide(self.life, self._decode)
        self._recovery = Recovery(self.life, self._decode, self._orphans, epoch)

    def on(self, event: Event, now: float) -> list[Send]:
        self.life.now = now
        match event:
            case Connected():
                self._recovery.connected(event.hello)
            case Closed():
                self._recovery.closed(event.instance_id)
            case Received():
                self._received(event.sender, event.message)
            case Tick():
                self.life.has_room_again()
                self.life.release([key for key in self._orphans.take_expired(now) if self._is_unused(key)])
        self._prefill.start()
        self._decode.assign()
        return self.life.take_sends()

    def _is_unused(self, key: RequestKey) -> bool:
        """What the pool holds for an orphan may have become its request's room by now."""
        state = self.life.requests.get(key)
        return state is None or (state.phase is Phase.QUEUED and not state.blocks)

    @property
    def num_queued(self) -> int:
        return len(self.life.prefill_queue) + len(self.life.reserving)

    @property
    def num_queued_tokens(self) -> int:
        """That wait to be computed."""
        return self.life.prefill_queue.num_tokens + self.life.reserving.total

    def _waiting_before(self, request: Request) -> tuple[int, int]:
        """Requests and tokens. However much waits behind a request, it is no reason to refuse it."""
        life, is_rt = self.life, request.tier == "rt"
        num_queued, num_tokens = life.prefill_queue.before(is_rt)
        lines = [each for each in (True, False) if life.policy.line(each) <= life.policy.line(is_rt)]
        return (
            num_queued + sum(map(life.reserving.count, lines)),
            num_tokens + sum(map(life.reserving.sum, lines)),
        )

    @property
    def is_idle(self) -> bool:
        """Nobody waits for anything, and no time needs to pass."""
        return not self.life.requests and not len(self._orphans)

    def check_idle(self) -> None:
        """Nothing is left of requests that ended. Raises with what is."""
        life = self.life
        holding = [
            view.instance_id
            for view in life.cluster.prefills
            if view.pending or (isinstance(view, PrefillView) and view.staging)
        ]
        holding += [
            view.instance_id for view in life.cluster.decodes if view.batch or view.near or view.running
        ]
        left = (len(life.requests), len(life.decode_queue), self.num_queued, len(self._orphans))
        if any(left) or holding:
            raise RuntimeError(
                "idle, but left are {} requests, {} pooled, {} queued, {} orphans".format(*left)
                + (f", and some at {', '.join(holding)}" if holding else "")
            )

    def _received(self, sender: InstanceId, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._submit(sender, message)
            case Abort(key=key):
                state = self.life.requests.get(key)
                if state and state.gateway == sender and not state.is_finished:
                    self.life.output.add_timeline(state)
                    self.life.end(state)
            case Reserved():
                self._reserved(message)
            case Candidates():
                self._decode.candidates(message)
            case PrefillReport():
                self._prefill.report(sender, message)
                self._decode.staged(sender, message.staged)
            case DecodeReport():
                self._decode.report(sender, message)
            case Gone(keys=keys):
                for state in filter(None, map(self.life.requests.get, keys)):
                    self.life.forgotten_by(state, sender)
            case Failed():
                self._failed(sender, message)
            case _:
                raise ValueError(f"{sender} sent a {type(message).__name__}, which is not for the router")

    def _submit(self, gateway: InstanceId, submit: Submit) -> None:
        life, request = self.life, submit.request
        known = life.requests.get(request.key)
        if known is None:
            self._take(gateway, submit)
        elif known.is_finished:
            life.send(
                gateway, Rejected(request.key, "duplicate", "a request with this key is about to leave")
            )
        else:
            known.gateway = gateway
            life.output.resend(known, num_known=len(submit.delivered))

    def _take(self, gateway: InstanceId, submit: Submit) -> None:
        life, request = self.life, submit.request
        refusal = refuse(request, life.cluster, *self._waiting_before(request), self.config)
        if not refusal and not submit.delivered:
            refusal = refuse_slo(request, life.cluster)
        if refusal:
            life.send(gateway, Rejected(request.key, *refusal))
            return
        submit = self._with_possible_slo(submit)
        forecast = Forecast(submit.predicted_len)
        forecast.advance(len(submit.delivered), life.now)
        state = RequestState(
            submit.request,
            gateway,
            Phase.QUEUED,
            life.now,
            output=list(submit.delivered),
            forecast=forecast,
            arrived_s=arrived_s(submit, life.now),
            deadlines=deadlines_of(submit, life.now),
        )
        life.requests[state.key] = state
        if stored := self._orphans.claim(state.key):
            state.blocks = stored.blocks
            state.num_cached = min(stored.num_tokens, state.num_tokens - 1)
        # even if all of it is there: room that was asked for just before may be made of it
        life.wait(state)

    def _with_possible_slo(self, submit: Submit) -> Submit:
        possible = with_possible_slo(submit.request, self.life.cluster)
        for name, remark in remark_on(submit.request, possible):
            self._remarks.setdefault(name, remark)
        return replace(submit, request=possible)

    def take_remarks(self) -> list[str]:
        """For the log; each is made once."""
        remarks = list(self._remarks.values())[self._num_remarked :]
        self._num_remarked += len(remarks)
        return remarks

    def _reserved(self, reserved: Reserved) -> None:
        for key in reserved.dropped:
            self._orphans.drop(key)
            if spare := self.life.requests.get(key):
                self._dropped(spare)
        state = self.life.requests.get(reserved.key)
        if state and state.phase is Phase.RESERVING:
            self._prefill.reserved(state, reserved)
        elif state and state.phase is Phase.MAKING_ROOM:
            self._decode.made_room(state, reserved)

    def _dropped(self, state: RequestState) -> None:
        """The pool has nothing of it any more."""
        state.num_cached, state.blocks = 0, []
        self.life.pinned.pop(state.key, None)
        if state.phase is Phase.POOLED:
            self.life.requeue(state)
        elif state.phase is Phase.RESERVING:
            self.life.reserving.put(state.key, state.num_missing, state.is_rt)

    def _failed(self, sender: InstanceId, failed: Failed) -> None:
        if failed.what == "evict":
            if state := self.life.find(failed.key, sender, Phase.EVICTING):
                self.life.enter(state, Phase.RUNNING, sender)
                # the room that was made for it is others' until it is asked for again
                self.life.send_pool(MakeSpare([state.key]))
            return
        state = self.life.find(failed.key, sender, Phase.PREFILLING, Phase.STAGED, Phase.OFFERED)
        if state is None:
            return
        if failed.what == "load":
            state.num_cached = 0
        self.life.recall(state, gone_from=sender)
