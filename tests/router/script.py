"""A router among neighbours that say what a test wants them to say."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from msgspec.structs import replace

from alignedserve.protocol.messages import (
    AnyMessage,
    Candidates,
    DecodeReport,
    Gone,
    Hello,
    InstanceLimits,
    NewTokens,
    PrefillReport,
    Request,
    Reserve,
    Reserved,
    Stored,
    Submit,
)
from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Closed, Connected, Received, Send, Tick
from alignedserve.router.requests import RequestState
from alignedserve.router.router import Router
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey

POOL, PREFILL, DECODE, GATEWAY = map(InstanceId, ("kvpool", "prefill-0", "decode-0", "gateway-0"))
BLOCK_SIZE = 4
ONE = RequestKey(1)
_ROUTER_OPTIONS = [field.name for field in fields(RouterConfig)]


def hello(
    instance_id: str,
    epoch: int = 1,
    segment: str = "seg",
    inventory: list[Stored] | None = None,
    num_blocks: int = 100,
    num_staging_blocks: int = 50,
    enable_prefix_caching: bool = False,
    knows_content: bool = False,
    **others: Any,
) -> Hello:
    """`others`: of the limits."""
    limits = InstanceLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=200,
        num_staging_blocks=num_staging_blocks,
        enable_prefix_caching=enable_prefix_caching,
        **others,
    )
    role = instance_id.split("-")[0]
    is_pool = role == "kvpool"
    return Hello(
        role,
        InstanceId(instance_id),
        Epoch(epoch),
        100,
        {},
        limits,
        segment if is_pool else "",
        inventory or [],
        knows_content=knows_content,
    )


def request(key: int = 1, num_prompt: int = 6, max_tokens: int = 10, arrival_s: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(RequestKey(key), list(range(num_prompt)), params, seed=0, arrival_s=arrival_s)


class Script:
    def __init__(
        self,
        connect: bool = True,
        num_blocks: int = 100,
        num_staging_blocks: int = 50,
        **scheduling: Any,
    ) -> None:
        """`scheduling`: of SchedulingConfig, and some of RouterConfig."""
        config = {"link": "host"} | {
            name: scheduling.pop(name) for name in {*scheduling} & {*_ROUTER_OPTIONS}
        }
        self.router = Router(RouterConfig(**config), Epoch(7), SchedulingConfig(**scheduling))
        self.now = 0.0
        self.sent: list[tuple[str, AnyMessage]] = []
        # The last Reserve for each request: a Reserved answers it, unless it says another number.
        self._asked: dict[RequestKey, Reserve] = {}
        if connect:
            for name in (POOL, PREFILL, DECODE, GATEWAY):
                self.connect(name, num_blocks=num_blocks, num_staging_blocks=num_staging_blocks)
            self.take()

    def _on(self, event: Connected | Closed | Received | Tick) -> None:
        sent = [(send.to, send.message) for send in self._decide(event)]
        self.sent += sent
        self._asked |= {message.key: message for _, message in sent if isinstance(message, Reserve)}

    def _decide(self, event: Connected | Closed | Received | Tick) -> list[Send]:
        return self.router.on(event, self.now)

    def connect(self, instance_id: str, **options: Any) -> None:
        self._on(Connected(hello(instance_id, **options)))

    def close(self, instance_id: str, epoch: int = 1) -> None:
        self._on(Closed(InstanceId(instance_id), Epoch(epoch)))

    def say(self, sender: str, message: AnyMessage) -> None:
        if isinstance(message, Reserved) and not message.number:
            asked = self._asked.get(message.key)
            message = replace(message, number=asked.number if asked else 0)
        self._on(Received(InstanceId(sender), message))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._on(Tick())

    def take(self) -> list[tuple[str, AnyMessage]]:
        """What was sent since the last time."""
        for state in self.router.state.requests:
            state.check()
        sent, self.sent = self.sent, []
        return sent

    def take_one(self, kind: type[Any], to: str) -> Any:
        """The only message of this kind, to whom it should go."""
        found = [(name, message) for name, message in self.take() if isinstance(message, kind)]
        assert [name for name, _ in found] == [to], found
        return found[0][1]

    def take_reserve(self) -> tuple[RequestKey, int]:
        """The only request and its number of tokens that the pool is asked to have room for."""
        message = self.take_one(Reserve, POOL)
        return message.key, message.num_tokens

    def state(self, key: int = 1) -> RequestState:
        return self.router.state.requests[RequestKey(key)]

    # ---- a request's way, in steps ----

    def submit(self, key: int = 1, tier: str = "rt", deadline_s: float | None = None, **options: Any) -> None:
        self.say(GATEWAY, Submit(replace(request(key, **options), tier=tier, deadline_s=deadline_s)))

    def reserve(self, key: int = 1, blocks: list[int] | None = None) -> None:
        """The pool gives the request these blocks, and as many more as it was asked for."""
        given = blocks or [10, 11]
        if asked := self._asked.get(RequestKey(key)):
            num_more = -(-asked.num_tokens // BLOCK_SIZE) - len(given)
            given = [*given, *range(1000 * key, 1000 * key + num_more)]
        state = self.router.state.requests.get(RequestKey(key))
        num_tokens = state.num_cached if state else 0
        self.say(POOL, Reserved(RequestKey(key), pool_blocks(*given), num_tokens=num_tokens))

    def first_token(self, key: int = 1, token: int = 50, sender: str = PREFILL, **news: Any) -> None:
        first = len(self.state(key).output)
        self.say(sender, prefill_report(news=[NewTokens(RequestKey(key), first, [token], **news)]))

    def saved(self, key: int = 1, sender: str = PREFILL) -> None:
        num_tokens = self.state(key).num_tokens - 1
        self.say(sender, prefill_report(saved=[(RequestKey(key), num_tokens)]))

    def pooled(self, key: int = 1, **options: Any) -> None:
        """Up to the pool, which holds it."""
        self.submit(key, **options)
        self.reserve(key, [10 * key, 10 * key + 1])
        self.first_token(key)
        self.saved(key)

    def chosen(self, *keys: int, is_batch: bool = True) -> None:
        self.say(POOL, Candidates(DECODE, [RequestKey(key) for key in keys], is_batch))

    def decode(self, **report: Any) -> None:
        self.say(DECODE, decode_report(**report))

    def running(self, key: int = 1, **options: Any) -> None:
        """Up to a decode instance, which runs it."""
        self.pooled(key, **options)
        self.chosen(key)
        self.decode(admitted=[RequestKey(key)])

    def token(
        self, key: int = 1, token: int = 60, wants_evicted: list[RequestKey] | None = None, **news: Any
    ) -> None:
        first = len(self.state(key).output)
        self.decode(
            news=[NewTokens(RequestKey(key), first, [token], **news)], wants_evicted=wants_evicted or []
        )

    def gone(self, sender: str, key: int = 1) -> None:
        self.say(sender, Gone([RequestKey(key)]))


def pool_blocks(*blocks: int) -> list[PoolBlockId]:
    return [PoolBlockId(block) for block in blocks]


def prefill_report(**fields: Any) -> PrefillReport:
    plain: dict[str, Any] = {"news": [], "saved": [], "staged": [], "progress": [], "num_free_blocks": 90}
    return PrefillReport(**plain | fields)


def decode_report(**fields: Any) -> DecodeReport:
    empty: dict[str, Any] = {name: [] for name in ("news", "admitted", "wants_evicted", "evicted")}
    counts = {"num_free_blocks": 90, "num_running": 1, "max_length": 7, "sum_lengths": 7, "min_length": 7}
    counts |= {"batch": 1, "batch_min_length": 7, "batch_max_length": 7}
    return DecodeReport(**empty | counts | fields)
