"""Requests as gateways submit them: which are accepted, resumed or refused. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from alignedserve.protocol.messages import Rejected, Request, Submit
from alignedserve.router.adapters import Adapters
from alignedserve.router.clock import arrived_s, deadlines_of
from alignedserve.router.cluster import ClusterState
from alignedserve.router.config import RouterConfig
from alignedserve.router.leaving import Recaller, Requeuer
from alignedserve.router.queues import PrefillQueue
from alignedserve.router.recovery import Orphans
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.views import Process
from alignedserve.scheduling.forecast import Forecast
from alignedserve.types import InstanceId, RequestKey

# ---- admission -------------------------------------------------------------------------------------------------------

# Which requests are accepted. A refusal has a reason for programs and a sentence for humans.
#
# A requested objective that the model can't meet even for a single request is refused. A default objective is raised.


Refusal = tuple[str, str]

# A default objective is raised to the time of a request that runs alone, times this factor.
DEFAULT_SLACK = 1.25


def refuse_queued(
    request: Request, queue: PrefillQueue, config: RouterConfig, has_begun: bool = False
) -> Refusal | None:
    """Returns why the queue has no room for the request, or for another one of its owner. What waits of an owner of API
    keys may be at most as much as is then still free, so there is room for others. Without API keys, all clients
    together may fill the queue. `has_begun`: it was accepted by an earlier router, and its owner has its place."""
    is_rt, owner, num_prompt = request.tier == "rt", request.owner, len(request.prompt)
    num_queued, num_tokens = queue.waiting_before(is_rt)
    num_own, num_own_tokens = queue.waiting_before(is_rt, owner) if owner else (0, 0)
    most, most_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    # No owner is told how much of others waits.
    told, told_tokens = ("many", "many") if owner else (num_queued, num_tokens)
    if num_queued >= most:
        return "full", f"{told} requests wait already, at most {most} may"
    if num_tokens and num_tokens + num_prompt > most_tokens:
        return (
            "full",
            f"{told_tokens} tokens wait for prefill already, and this prompt's {num_prompt} would make it more than "
            f"{most_tokens}",
        )
    for own, more, num_free, what, limit in (
        (num_own, 1, most - num_queued, "requests", "max_num_queued_reqs"),
        (num_own_tokens, num_prompt, most_tokens - num_tokens, "prompt tokens", "max_num_queued_tokens"),
    ):
        if own and not has_begun and own + more > num_free - more:
            return (
                "owner_full",
                f"{own} {what} from this API key wait already, and may be at most as many as {limit} leaves free",
            )
    return None


def refuse(request: Request, cluster: ClusterState) -> Refusal | None:
    """Returns why the request can never run."""
    instances = cluster.instances
    if not cluster.pool or not instances:
        return None
    limits = instances[0].hello.limits
    most_tokens = min(view.hello.limits.max_model_len for view in instances)
    num_prompt = len(request.prompt)
    if num_prompt + (not request.is_embedding) > most_tokens:
        return (
            "too_long",
            f"the prompt has {num_prompt} tokens, and prompt and output together at most {most_tokens}",
        )
    num_tokens = min(num_prompt + (request.params.max_tokens or most_tokens), most_tokens)
    if request.is_embedding:
        num_tokens = num_prompt
    needed = limits.span.num_columns(num_tokens)
    most = min(map(_most_columns, (cluster.pool, *instances)))
    if needed > most:
        return (
            "too_long",
            f"prompt and output need {needed} blocks of KV, and there are at most {most} for a request",
        )
    return None


def _most_columns(process: Process) -> int:
    """Returns the most columns of KV that a request may have in this process."""
    limits = process.hello.limits
    if process.hello.role in ("decode", "colocated"):
        return limits.span.longest(limits.num_blocks)
    # A prefill instance frees no blocks of a running prompt, and the pool stores whole requests.
    return limits.num_blocks // limits.span.num_groups


def refuse_slo(request: Request, cluster: ClusterState) -> Refusal | None:
    num_prompt = len(request.prompt)
    if request.ttft_s is None and request.tbt_s is None:
        return None
    for name, asked_s, least_s, what in (
        (
            "ttft",
            request.ttft_s,
            cluster.fastest_ttft_s(num_prompt),
            f"a prompt of {num_prompt} tokens takes",
        ),
        ("tbt", request.tbt_s, cluster.fastest_tbt_s(num_prompt + 1), "a token takes"),
    ):
        if asked_s is not None and asked_s < least_s and f"{name}_s" not in request.slo_defaults:
            least_ms = 1000 * least_s
            return (
                "slo",
                f"slo.{name}_ms={1000 * asked_s:g}: must be at least {least_ms:.3g}, which is what {what} "
                "when this server does nothing else",
            )
    return None


def with_possible_slo(request: Request, cluster: ClusterState) -> Request:
    """Returns the request with its default objectives raised to what the model can achieve."""
    num_prompt = len(request.prompt)
    ttft_s, tbt_s = request.ttft_s, request.tbt_s
    if ttft_s is not None and "ttft_s" in request.slo_defaults:
        ttft_s = max(ttft_s, DEFAULT_SLACK * cluster.fastest_ttft_s(num_prompt))
    if tbt_s is not None and "tbt_s" in request.slo_defaults:
        tbt_s = max(tbt_s, DEFAULT_SLACK * cluster.fastest_tbt_s(num_prompt + 1))
    return replace(request, ttft_s=ttft_s, tbt_s=tbt_s)


def remark_on(asked: Request, possible: Request) -> list[tuple[str, str]]:
    """Returns (objective, sentence) for each default objective that was raised."""
    return [
        (
            name,
            f"The default objective {name}={given_s:g} can't be met with a prompt of "
            f"{len(asked.prompt)} tokens: raised to {raised_s:.3g} for it, and as far as needed for others",
        )
        for name, given_s, raised_s in (
            ("ttft_s", asked.ttft_s, possible.ttft_s),
            ("tbt_s", asked.tbt_s, possible.tbt_s),
        )
        if given_s is not None and raised_s is not None and raised_s > given_s
    ]


# ---- submissions -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Submissions:
    """Requests that gateways submit, and requests that they abort."""

    _router: RouterState
    _requeuer: Requeuer
    _recaller: Recaller
    _orphans: Orphans
    _adapters: Adapters
    # Sentences for the log, by the objective that each is about. The first `_num_remarked` were taken already.
    _remarks: dict[str, str] = field(default_factory=dict)
    _num_remarked: int = 0

    def submit(self, gateway: InstanceId, submit: Submit) -> None:
        known = self._router.requests.get(submit.request.key)
        if known is None:
            self._admit(gateway, submit)
        elif known.is_finished:
            self._reject(gateway, submit, "duplicate", "a request with this key is about to leave")
        else:
            known.gateway = gateway
            self._router.output.resend(known, num_known=len(submit.delivered))

    def abort(self, gateway: InstanceId, keys: Iterable[RequestKey]) -> None:
        for state in filter(None, map(self._router.requests.get, keys)):
            if state.gateway == gateway and not state.is_finished:
                self._router.output.add_timeline(state)
                self._recaller.finish(state)

    def _admit(self, gateway: InstanceId, submit: Submit) -> None:
        request = submit.request
        refusal = self._adapters.refusal(request)
        refusal = refusal or refuse_queued(
            request, self._router.prefill_queue, self._router.config, bool(submit.delivered)
        )
        refusal = refusal or refuse(request, self._router.cluster)
        if not refusal and not submit.delivered:
            refusal = refuse_slo(request, self._router.cluster)
        if refusal:
            self._reject(gateway, submit, *refusal)
            return
        state = self._new_state(gateway, self._with_possible_slo(submit))
        self._router.requests.add(state)
        self._router.prefill_queue.opened(state)
        if stored := self._orphans.claim(state.key, state.num_tokens):
            state.blocks, state.num_cached = stored.blocks, stored.num_tokens
            state.is_alone |= self._router.era > 0
        # Even if the pool has all of its KV: the pool may be dropping that KV for a reservation that was sent just
        # before.
        self._requeuer.queue_prefill(state)

    def _reject(self, gateway: InstanceId, submit: Submit, reason: str, sentence: str) -> None:
        self._router.outbox.send(gateway, Rejected(submit.request.key, reason, sentence))

    def _new_state(self, gateway: InstanceId, submit: Submit) -> RequestState:
        now = self._router.clock.now
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
            era=self._router.era,
            is_alone=self._router.policy.config.is_alone(submit.request.tier),
        )

    def _with_possible_slo(self, submit: Submit) -> Submit:
        possible = with_possible_slo(submit.request, self._router.cluster)
        for name, remark in remark_on(submit.request, possible):
            self._remarks.setdefault(name, remark)
        return replace(submit, request=possible)

    def take_remarks(self) -> list[str]:
        """Returns sentences for the log, each once."""
        remarks = list(self._remarks.values())[self._num_remarked :]
        self._num_remarked += len(remarks)
        return remarks
