"""The product's files and functions that a chat crosses in a whole system, from its HTTP call to its first token, and
the shapes of its data on the way (benchmarks/house/shapes.py).

The system runs in virtual time (alignedserve/vopr/front_end), so the result is the same in each run. It has one gateway
and one island with a prefill and a decode instance. Its engine and its sockets are simulated, and not counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from msgspec.structs import replace

from alignedserve.types import RequestKey
from alignedserve.vopr.build import island_config
from alignedserve.vopr.front_end.answers import StreamedAnswer
from alignedserve.vopr.front_end.chats import CHATS, asked
from alignedserve.vopr.front_end.conditions import FrontConditions
from alignedserve.vopr.front_end.front import Front, FrontConfig
from alignedserve.vopr.front_end.words import Question
from alignedserve.vopr.liveness import BoundedClock
from alignedserve.vopr.plan import Plan, make_plan
from benchmarks.house.shapes import Shapes
from benchmarks.house.source import BESIDE, PACKAGE, ROOT

# Seconds after which all processes are connected.
_READY_S = 5.0
_NUM_WORDS = 20
_SIMULATED = (f"{PACKAGE}/sim/", f"{PACKAGE}/vopr/")


@dataclass(frozen=True)
class Journey:
    # each as "file function"
    functions: list[str]
    # each as "shape: the function where it was seen first"
    shapes: list[str]

    @property
    def files(self) -> list[str]:
        return sorted({function.split()[0] for function in self.functions})


def journey() -> Journey:
    plan = _plan()
    assert plan.front
    clock = BoundedClock()
    config = FrontConfig(island_config(plan), plan.front.num_islands, plan.num_gateways)
    front = Front(config, plan.seed, clock, FrontConditions(plan, plan.front, clock))
    question = Question.of(RequestKey(1), _NUM_WORDS, 20, front.max_model_len)
    shapes = Shapes((question.prompt, question.answer[0].split()[0]), list(range(_NUM_WORDS)))
    calls = _Calls(shapes)

    async def drive(front: Front) -> None:
        await asyncio.sleep(_READY_S)
        await _until_first_token(front, question, calls)

    front.run(drive)
    return Journey(calls.of_product(), shapes.names())


async def _until_first_token(front: Front, question: Question, calls: _Calls) -> None:
    body = json.dumps(asked(question, is_chat=True, more={"stream": True})).encode()
    answer = StreamedAnswer(question, is_chat=True)
    with calls:
        call = front.gateways[0].call("POST", CHATS, body)
        assert call
        async for piece in call.pieces():
            answer.feed(piece)
            if answer.num_words:
                return
    raise RuntimeError(f"the chat ended with status {call.status} before its first token")


def _plan() -> Plan:
    plan = make_plan(1, ["aligned"], ["whole"])
    assert plan.front
    return replace(
        plan,
        num_gateways=1,
        num_prefill=1,
        num_decode=1,
        num_colocated=0,
        link="host",
        window=0,
        num_full_groups=0,
        num_sliding_groups=1,
        share_blocks=False,
        hidden_cache=False,
        change_roles=False,
        length_error=None,
        # So quick that little else happens meanwhile.
        iteration_s=0.001,
        max_latency_s=0.0001,
        front=replace(plan.front, num_islands=1),
    )


class _Calls:
    """The code that is entered while this is on."""

    def __init__(self, shapes: Shapes) -> None:
        self._codes: set[CodeType] = set()
        self._shapes = shapes

    def __enter__(self) -> None:
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, result: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        name = _name(code.co_filename)
        if name is None:
            return
        self._codes.add(code)
        for value in frame.f_locals.values() if event == "call" else (result,):
            self._shapes.look(value, f"{name} {code.co_qualname}")

    def of_product(self) -> list[str]:
        # Comprehensions and lambdas are parts of the function around them.
        codes = [code for code in self._codes if not code.co_name.startswith("<")]
        return sorted({f"{_name(code.co_filename)} {code.co_qualname}" for code in codes})


@cache
def _name(file: str) -> str | None:
    """Returns the file's path from the root, if it is the product's and not simulated."""
    path = Path(file).resolve()
    if not path.is_relative_to(ROOT):
        return None
    name = str(path.relative_to(ROOT))
    is_ours = name.split("/")[0] in (PACKAGE, *BESIDE) and not name.startswith(_SIMULATED)
    return name if is_ours else None
