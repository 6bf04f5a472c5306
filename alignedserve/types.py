"""Ids and small shared types. Ids have their own types, so that a request is never passed in place of its id."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
# a block in the pool's segment
PoolBlockId = NewType("PoolBlockId", int)
# identifies a request for router, pool and instances; 1 .. 2**63 - 1
RequestKey = NewType("RequestKey", int)
# "prefill-0"
InstanceId = NewType("InstanceId", str)
# they connect to every router; more gateways may exist
GATEWAY, LAUNCHER = InstanceId("gateway-0"), InstanceId("launcher-0")
# one start of a process, or of a new role in it; later starts have greater epochs
Epoch = NewType("Epoch", int)
# the beginning of all names of shared memory
SHM_PREFIX = "alignedserve-"


_GENERATION = "~"


def gateway_ids(count: int) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(f"gateway-{number}") for number in range(count))


# Stands for all gateways on islands' hosts in the list of processes that may connect: islands come and go.
ISLAND_GATEWAY = InstanceId("gateway-of-island")


def island_gateway(number: int) -> InstanceId:
    """The name of the gateway on the host of island `number`."""
    return InstanceId(f"{ISLAND_GATEWAY}-{number}")


def is_island_gateway(name: InstanceId) -> bool:
    return name.startswith(f"{ISLAND_GATEWAY}-")


def next_generation(name: InstanceId) -> InstanceId:
    """The name of the gateway that replaces this one, while this one still finishes its requests."""
    base, _, number = name.partition(_GENERATION)
    return InstanceId(f"{base}{_GENERATION}{int(number or 1) + 1}")


def without_generation(name: InstanceId) -> InstanceId:
    return InstanceId(name.partition(_GENERATION)[0])


def is_text(value: object) -> bool:
    """Whether it is a string that can be sent as UTF-8, without half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_GAP = " … "


def shortened(text: str, max_chars: int) -> str:
    """Returns the text, or at most `max_chars` of it without its middle: an error's cause is often at the end."""
    if len(text) <= max_chars:
        return text
    half = (max_chars - len(_GAP)) // 2
    return f"{text[:half]}{_GAP}{text[-half:]}"


class InvalidRequest(ValueError):
    """A request that can't be run. The message names the field, its value and what is allowed."""
