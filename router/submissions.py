"""Requests that gateways submit, and requests that they abort."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from alignedserve.protocol.messages import Rejected, Submit
from alignedserve.router.admission import refuse, refuse_slo, remark_on, with_possible_slo
from alignedserve.router.clock import Clock, arrived_s, deadlines_of
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.config import RouterConfig
from alignedserve.router.orphans import Orphans
from alignedserve.router.outbox import Outbox
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.scheduling.forecast import Forecast
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class Submissions:
    _config: RouterConfig
    _clock: Clock
    _cluster: ClusterState
    _requests: RequestTable
    _prefill_queue: PrefillQueue
    _requeuer: Requeuer
    _recaller: Recaller
    _orphans: Orphans
    _output: OutputCoalescing
    _outbox: Outbox
    # Sentences for the log, by the objective that each is about. The first `_num_remarked` were taken already.
    _remarks: dict[str, str] = field(default_factory=dict)
    _num_remarked: int = 0

    def submit(self, gateway: InstanceId, submit: Submit) -> None:
        known = self._requests.get(submit.request.key)
        if known is None:
            self._admit(gateway, submit)
        elif known.is_finished:
            self._reject(gateway, submit, "duplicate", "a request with this key is about to leave")
        else:
            known.gateway = gateway
            self._output.resend(known, num_known=len(submit.delivered))

    def abort(self, gateway: InstanceId, key: RequestKey) -> None:
        state = self._requests.get(key)
        if state and state.gateway == gateway and not state.is_finished:
            self._output.add_timeline(state)
            self._recaller.finish(state)

    def _admit(self, gateway: InstanceId, submit: Submit) -> None:
        request = submit.request
        num_queued, num_tokens = self._prefill_queue.waiting_before(request.tier == "rt")
        refusal = refuse(request, self._cluster, num_queued, num_tokens, self._config)
        if not refusal and not submit.delivered:
            refusal = refuse_slo(request, self._cluster)
        if refusal:
            self._reject(gateway, submit, *refusal)
            return
        state = self._new_state(gateway, self._with_possible_slo(submit))
        self._requests.add(state)
        if stored := self._orphans.claim(state.key, state.num_tokens):
            state.blocks, state.num_cached = stored.blocks, stored.num_tokens
        # Even if the pool has all of its KV: the pool may be dropping that KV for a reservation that was sent just
        # before.
        self._requeuer.queue_prefill(state)

    def _reject(self, gateway: InstanceId, submit: Submit, reason: str, sentence: str) -> None:
        self._outbox.send(gateway, Rejected(submit.request.key, reason, sentence))

    def _new_state(self, gateway: InstanceId, submit: Submit) -> RequestState:
        now = self._clock.now
        forecast = Forecast(submit.predicted_len)
        forecast.advance(len(submit.delivered), now)
        return RequestState(
            submit.request,
            gateway,
            Phase.QUEUED,
            now,
            output=list(submit.delivered),
            forecast=forecast,
            arrived_s=arrived_s(submit, now),
            deadlines=deadlines_of(submit, now),
        )

    def _with_possible_slo(self, submit: Submit) -> Submit:
        possible = with_possible_slo(submit.request, self._cluster)
        for name, remark in remark_on(submit.request, possible):
            self._remarks.setdefault(name, remark)
        return replace(submit, request=possible)

    def take_remarks(self) -> list[str]:
        """Returns sentences for the log, each once."""
        remarks = list(self._remarks.values())[self._num_remarked :]
        self._num_remarked += len(remarks)
        return remarks
