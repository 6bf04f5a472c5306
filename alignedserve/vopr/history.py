"""What happens to a system: a plan, and actions that can each be left out. A file of it replays to the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from alignedserve.types import InstanceId, RequestKey
from alignedserve.vopr.plan import Plan

# In a whole system processes of an island have its name before theirs: "island-0/router". Gateways have not.
ROUTER = InstanceId("router")
# In an action that waits for a transition: the process that its message is from or to.
PEER = InstanceId("peer")


class Action(msgspec.Struct, kw_only=True, tag_field="kind", frozen=True, forbid_unknown_fields=True):
    # The second from which on it happens.
    at_s: float
    # It happens `delay_s` seconds after a router next hears or sends this (transitions.py); "": at once.
    after: str = ""
    delay_s: float = 0.0


class Arrive(Action, frozen=True, tag="arrive"):
    """A client asks."""

    key: RequestKey
    gateway: InstanceId
    # The prompt begins with the first `num_shared` tokens of a family of prompts.
    family: int
    num_shared: int
    prompt_len: int
    output_len: int
    max_tokens: int | None = None
    salt: str = ""
    tier: str = "rt"
    ttft_s: float | None = None
    tbt_s: float | None = None
    window_s: float | None = None
    is_structured: bool = False
    # How an embedding is made of its prompt, if it wants one.
    pooling: str | None = None
    adapter: str = ""


class Leave(Action, frozen=True, tag="leave"):
    """A client leaves as soon as its request is in a phase; "": whatever phase that is."""

    key: RequestKey
    phase: str = ""


class Kill(Action, frozen=True, tag="kill"):
    """Processes die, and are started again after so many seconds each."""

    processes: dict[InstanceId, float]
    loses_segment: bool = False


class Hang(Action, frozen=True, tag="hang"):
    process: InstanceId
    seconds: float


class Cut(Action, frozen=True, tag="cut"):
    """A process's connection is lost, with what is under way on it."""

    process: InstanceId


class Late(Action, frozen=True, tag="late"):
    """Messages of a process take up to so many seconds each, for some time; they stay in order."""

    process: InstanceId
    is_up: bool
    latency_s: float
    seconds: float


class FailingCopies(Action, frozen=True, tag="failing copies"):
    """A share of the copies fails, at their start or on their way."""

    rate: float
    seconds: float
    # Only copies of this kind: "load", "save" or "pull"; "": all.
    what: str = ""


class SlowCopies(Action, frozen=True, tag="slow copies"):
    slowdown: float
    seconds: float
    # See FailingCopies.
    what: str = ""


class Jump(Action, frozen=True, tag="clock jumps"):
    process: InstanceId
    seconds: float


class Drift(Action, frozen=True, tag="clock drifts"):
    """From then on the process's clock counts so many seconds a second."""

    process: InstanceId
    rate: float


# ---- of whole systems only ----


class Ask(Action, frozen=True, tag="ask"):
    """A client of the HTTP API asks, and again until it has its answer or leaves for good."""

    key: RequestKey
    prompt_len: int
    output_len: int
    is_chat: bool = True
    is_stream: bool = True
    is_flex: bool = False
    # The seconds for which it reads nothing, now and then.
    pause_s: float = 0.0
    # It leaves after so many events of the stream, or so many seconds, whichever is first; None: it does not.
    leaves_after: int | None = None
    leaves_after_s: float | None = None
    # The seconds after which it comes back, once; None: it has left for good.
    is_back_after_s: float | None = None


class Batch(Action, frozen=True, tag="batch"):
    """A client has a batch job: it uploads the file, watches the job, fetches the results and deletes the files."""

    key: RequestKey
    num_lines: int
    prompt_len: int
    output_len: int
    is_chat: bool = False
    # The seconds from its upload to its cancellation; None: it is not cancelled.
    cancels_after_s: float | None = None


class Stop(Action, frozen=True, tag="stop"):
    """A gateway gets SIGTERM, and is started again so many seconds after its end."""

    process: InstanceId
    seconds: float


class Regroup(Action, frozen=True, tag="regroup"):
    """Gateways are told that only these islands are there, and so many seconds later that all are. A gateway that
    starts meanwhile knows all."""

    islands: list[int]
    seconds: float


class Disturb(Action, frozen=True, tag="disturb"):
    """Something happens to one of a process's connections to routers: the oldest, or a later one."""

    process: InstanceId
    number: int
    how: Literal["stall", "process is gone", "router is gone", "vanish"]
    # For which it stalls.
    seconds: float = 0.0


class StoreAway(Action, frozen=True, tag="store away"):
    """A gateway can't reach the store; "": none can."""

    process: InstanceId
    seconds: float


class StoreSlow(Action, frozen=True, tag="store slow"):
    process: InstanceId
    latency_s: float
    seconds: float


class StoreForgetful(Action, frozen=True, tag="store answers lost"):
    """Calls are made, and a share of their answers is lost."""

    process: InstanceId
    rate: float
    seconds: float


OfClients = Arrive | Leave | Ask | Batch
OfIslands = Kill | Hang | Cut | Late | FailingCopies | SlowCopies | Jump | Drift
OfFronts = Stop | Regroup | Disturb | StoreAway | StoreSlow | StoreForgetful
AnyAction = OfClients | OfIslands | OfFronts


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: Plan
    actions: list[AnyAction]

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> History:
        """Raises ValueError if the file is no history."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: is no history of this version: {error}") from None


def kind_of(action: Action) -> str:
    return str(type(action).__struct_config__.tag)
