"""The messages that a router receives and sends, by name, and the contents of those that report several things.

`DecodeReport.evicted` is a DecodeReport with something in its field `evicted`. Every transition of a request or a
process is one of these, or follows from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alignedserve.router.events import Closed, Connected, Event, Received, Send
from alignedserve.types import InstanceId
from alignedserve.vopr.plan import Plan

# A transition, and the sender or receiver of its message, the router's peer; "": it has none.
Seen = tuple[str, InstanceId]

# The fields that report a transition.
_FIELDS: dict[str, tuple[str, ...]] = {
    "Submit": ("delivered",),
    "Reserved": ("dropped",),
    "Offer": ("source",),
    "PrefillReport": ("saved", "staged", "held"),
    "DecodeReport": ("admitted", "wants_evicted", "evicted", "dropped", "failed_pulls"),
}

# Transitions with the pool as their peer.
OF_POOL = (
    "Reserve",
    "Reserved",
    "Reserved.dropped",
    "Commit",
    "MakeSpare",
    "Release",
    "FormBatch",
    "Candidates",
)
_OF_ALL = (
    *OF_POOL,
    *("Submit", "Submit.delivered", "Abort", "Tokens", "Connected", "Closed", "Gone", "Failed", "Offer"),
    *("Evict", "DecodeReport.admitted", "DecodeReport.wants_evicted", "DecodeReport.evicted"),
)
_OF_DROPPING = ("DecodeReport.dropped",)
_OF_PREFILL = ("Prefill", "PrefillReport.saved")
_OF_LINKS = (
    *("Stage", "Unstage", "Offer.source", "PrefillReport.staged", "PrefillReport.held"),
    "DecodeReport.failed_pulls",
)
_OF_ROLES = ("TakeRole",)
TRANSITIONS = (*_OF_ALL, *_OF_DROPPING, *_OF_PREFILL, *_OF_LINKS, *_OF_ROLES)


def transitions_of(plan: Plan) -> list[str]:
    """Returns the transitions that a system with this plan may have."""
    return [
        *_OF_ALL,
        *(_OF_DROPPING if plan.preemption_mode != "swap" else ()),
        *(_OF_PREFILL if plan.num_prefill else ()),
        *(_OF_LINKS if plan.num_prefill and plan.link != "host" else ()),
        *(_OF_ROLES if plan.change_roles else ()),
    ]


def seen(event: Event, sends: Sequence[Send]) -> Iterator[Seen]:
    """Yields the transitions of a router's step."""
    match event:
        case Received(sender, message):
            yield from _named(message, sender)
        case Connected(hello):
            yield "Connected", hello.instance_id
        case Closed(instance_id):
            yield "Closed", instance_id
        case _:
            yield type(event).__name__, InstanceId("")
    for send in sends:
        yield from _named(send.message, send.to)


def _named(message: object, peer: InstanceId) -> Iterator[Seen]:
    name = type(message).__name__
    yield name, peer
    for field in _FIELDS.get(name, ()):
        if getattr(message, field):
            yield f"{name}.{field}", peer
