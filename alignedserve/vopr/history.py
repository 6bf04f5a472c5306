"""A run's history: a plan, and actions that can each be left out. A saved history replays to the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from alignedserve.types import InstanceId, RequestKey
from alignedserve.vopr.plan import Plan

# In a whole system, an island's processes have its name as a prefix: "island-0/router". Gateways have no prefix.
ROUTER = InstanceId("router")
# In an action that waits for a transition: the process that sends or receives its message.
PEER = InstanceId("peer")


class Action(msgspec.Struct, kw_only=True, tag_field="kind", frozen=True, forbid_unknown_fields=True):
    # The second from which on it may happen.
    at_s: float
    # It happens `delay_s` seconds after a router next receives or sends this (transitions.py); "": without waiting.
    after: str = ""
    delay_s: float = 0.0


class Arrive(Action, frozen=True, tag="arrive"):
    """A client submits a request."""

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
    # The pooling of its embedding, if it asks for one.
    pooling: str | None = None
    adapter: str = ""
    owner: str = ""
    # A turn of the same chat. The prompt begins with that one's prompt and answer.
    earlier: Arrive | None = None


class Leave(Action, frozen=True, tag="leave"):
    """A client leaves as soon as its request is in this phase; "": in any phase."""

    key: RequestKey
    phase: str = ""


class Kill(Action, frozen=True, tag="kill"):
    """Processes die, and each is restarted after its number of seconds."""

    processes: dict[InstanceId, float]
    loses_segment: bool = False


class Hang(Action, frozen=True, tag="hang"):
    process: InstanceId
    seconds: float


class Disconnect(Action, frozen=True, tag="cut"):
    """A process's connection is lost, with everything on its way."""

    process: InstanceId


class Late(Action, frozen=True, tag="late"):
    """For some time, messages of a process take up to `latency_s` each. They stay in order."""

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


class FlipBit(Action, frozen=True, tag="flip"):
    """A bit flips in a pool block: the one with this number among those with content, modulo their number."""

    number: int


class Jump(Action, frozen=True, tag="clock jumps"):
    process: InstanceId
    seconds: float


class Drift(Action, frozen=True, tag="clock drifts"):
    """From then on the process's clock runs at this rate."""

    process: InstanceId
    rate: float


# ---- only for whole systems ----


class Ask(Action, frozen=True, tag="ask"):
    """A client of the HTTP API asks, and retries until it has its answer or leaves for good."""

    key: RequestKey
    prompt_len: int
    output_len: int
    is_chat: bool = True
    is_stream: bool = True
    is_flex: bool = False
    # Seconds for which it reads nothing, now and then.
    pause_s: float = 0.0
    # It leaves after this many events of the stream, or this many seconds, whichever is first; None: it does not.
    leaves_after: int | None = None
    leaves_after_s: float | None = None
    # Seconds after which it returns, once; None: it has left for good.
    is_back_after_s: float | None = None


class SubmitJob(Action, frozen=True, tag="batch"):
    """A client has a batch job: it uploads the file, watches the job, fetches the results and deletes the files."""

    key: RequestKey
    num_lines: int
    prompt_len: int
    output_len: int
    is_chat: bool = False
    # Seconds from its upload to its cancellation; None: it is not cancelled.
    cancels_after_s: float | None = None


class Stop(Action, frozen=True, tag="stop"):
    """A gateway gets SIGTERM, and is restarted `seconds` after its end."""

    process: InstanceId
    seconds: float


class Regroup(Action, frozen=True, tag="regroup"):
    """Gateways are told that only these islands exist, and `seconds` later that all do. A gateway that starts meanwhile
    knows all of them."""

    islands: list[int]
    seconds: float


class Disturb(Action, frozen=True, tag="disturb"):
    """A fault of one of a process's connections to routers: the oldest (0), or a later one."""

    process: InstanceId
    number: int
    how: Literal["stall", "process is gone", "router is gone", "vanish"]
    # For how long it stalls.
    seconds: float = 0.0


class LoseStore(Action, frozen=True, tag="store away"):
    """A gateway can't reach the store; "": none can."""

    process: InstanceId
    seconds: float


class StoreSlow(Action, frozen=True, tag="store slow"):
    process: InstanceId
    latency_s: float
    seconds: float


class StoreForgetful(Action, frozen=True, tag="store answers lost"):
    """Calls are executed, but a share of their answers is lost."""

    process: InstanceId
    rate: float
    seconds: float


OfClients = Arrive | Leave | Ask | SubmitJob
OfIslands = Kill | Hang | Disconnect | Late | FailingCopies | SlowCopies | FlipBit | Jump | Drift
OfFronts = Stop | Regroup | Disturb | LoseStore | StoreSlow | StoreForgetful
AnyAction = OfClients | OfIslands | OfFronts


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: Plan
    actions: list[AnyAction]

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> History:
        """Raises ValueError if the file is not a history."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: is not a history of this version: {error}") from None


def kind_of(action: Action) -> str:
    return str(type(action).__struct_config__.tag)
