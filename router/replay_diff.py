"""Replays an event log and finds the first event for which this router's orders differ from the log's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alignedserve.router.eventlog import LoggedStep, LogReader
from alignedserve.router.events import Send


@dataclass(frozen=True)
class Divergence:
    # The number of the event, from 1.
    number: int
    step: LoggedStep
    # This router's orders, or the exception that it raised.
    orders: list[Send]
    error: Exception | None = None


@dataclass(frozen=True)
class ReplayComparison:
    num_events: int
    # Events without recorded orders: 1 if the router died of the last event.
    num_unanswered: int
    num_torn_bytes: int
    divergence: Divergence | None


def compare(path: Path) -> ReplayComparison:
    """Replays up to the first divergence. Raises ValueError if the file is not a log."""
    log = LogReader(path)
    router = log.header.router()
    number = num_unanswered = 0
    found = None
    for number, step in enumerate(log.steps(), 1):
        try:
            orders = _as_recorded(router.on(step.event, step.now))
        except Exception as error:
            # The router that wrote the log may have died of this event, too.
            found = Divergence(number, step, [], error)
            break
        if step.orders is None:
            num_unanswered += 1
        elif orders != step.orders:
            found = Divergence(number, step, orders)
            break
    return ReplayComparison(number, num_unanswered, log.num_torn_bytes, found)


def _as_recorded(orders: list[Send]) -> list[Send]:
    """Returns the orders as a log returns them: without a declared type, tuples become lists."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(orders), type=list[Send])


def format_divergence(divergence: Divergence) -> Iterator[str]:
    """Yields lines for humans."""
    step = divergence.step
    yield f"event {divergence.number}, at {step.now:.6f} s: {format_value(step.event)}"
    if divergence.error is not None:
        yield f"  + raises {type(divergence.error).__name__}: {divergence.error}"
    if step.orders is None:
        yield "  the log ends with this event"
    recorded, now = step.orders or [], divergence.orders
    for place in range(max(len(recorded), len(now))):
        was, now_is = (each[place] if place < len(each) else None for each in (recorded, now))
        if was == now_is:
            yield f"    {_order(was)}"
            continue
        if was is not None:
            yield f"  - {_order(was)}"
        if now_is is not None:
            yield f"  + {_order(now_is)}"


def _order(send: Send | None) -> str:
    return f"{send.to}: {format_value(send.message)}" if send else ""


_MOST_SHOWN = 8


def format_value(value: object) -> str:
    """Returns one line. Shows only the first items of long lists, and omits fields with their default."""
    if isinstance(value, msgspec.Struct):
        shown = [
            f"{field.name}={format_value(getattr(value, field.name))}"
            for field in msgspec.structs.fields(value)
            if getattr(value, field.name) != _default(field)
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, list | tuple):
        more = [f"… {len(value) - _MOST_SHOWN} more"] if len(value) > _MOST_SHOWN else []
        return f"[{', '.join([*map(format_value, value[:_MOST_SHOWN]), *more])}]"
    return repr(value)


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default_factory() if callable(field.default_factory) else field.default
