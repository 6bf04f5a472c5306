"""Ids and small shared types. Ids have types so that a request is never passed where its id is meant."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
# of a block in the pool's segment
PoolBlockId = NewType("PoolBlockId", int)
# what a request is to router, pool and instances; 1 .. 2**63 - 1
RequestKey = NewType("RequestKey", int)
# "prefill-0"
InstanceId = NewType("InstanceId", str)
# they connect to every router; there may be more gateways
GATEWAY, LAUNCHER = InstanceId("gateway-0"), InstanceId("launcher-0")
# one start of one process, or of another role in it; later starts have greater ones
Epoch = NewType("Epoch", int)


_GENERATION = "~"


def gateway_ids(count: int) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(f"gateway-{number}") for number in range(count))


# All gateways on islands' hosts, where it is said which processes may connect: islands come and go.
ISLAND_GATEWAY = InstanceId("gateway-of-island")


def island_gateway(number: int) -> InstanceId:
    """The name of the gateway on the host of the island of this number."""
    return InstanceId(f"{ISLAND_GATEWAY}-{number}")


def is_island_gateway(name: InstanceId) -> bool:
    return name.startswith(f"{ISLAND_GATEWAY}-")


def next_generation(name: InstanceId) -> InstanceId:
    """The name of the gateway that takes this one's place while this one still answers what it has."""
    base, _, number = name.partition(_GENERATION)
    return InstanceId(f"{base}{_GENERATION}{int(number or 1) + 1}")


def without_generation(name: InstanceId) -> InstanceId:
    return InstanceId(name.partition(_GENERATION)[0])


def is_text(value: object) -> bool:
    """A string that can be sent: without half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_GAP = " … "


def shortened(text: str, max_chars: int) -> str:
    """At most so many: its middle is left out, since what is wrong with something is often said at the end."""
    if len(text) <= max_chars:
        return text
    half = (max_chars - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[-half:]}"


class InvalidRequest(ValueError):
    """A request that can't be run. The message names the field, its value and what is allowed."""
