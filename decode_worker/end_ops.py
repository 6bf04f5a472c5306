"""Carries out a plan's operations on blocks that two requests fill from both ends, and counts the copied bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alignedserve.decode_worker.plan import Checkpoint, EndOp, GiveUp, Lend, Renew, Restore
from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.types import RequestKey


class EndOps:
    def __init__(self, engine: Executor, requests: Mapping[RequestKey, Request]) -> None:
        self._engine = engine
        self._requests = requests
        # Bytes copied since `take_bytes`, by purpose.
        self._num_bytes = {"checkpoint": 0, "restore": 0}

    def carry_out(self, ops: Iterable[EndOp]) -> None:
        engine, requests = self._engine, self._requests
        for op in ops:
            lender = requests[op.lender]
            match op:
                case Lend(borrower, _, index, at):
                    engine.allocate_up_to(requests[borrower], at)
                    engine.lend(requests[borrower], lender, index)
                case Checkpoint(_, index, first, end):
                    self._num_bytes["checkpoint"] += engine.checkpoint(lender, index, first, end)
                case GiveUp(_, index):
                    engine.give_up(lender, index)
                case Renew(_, index):
                    engine.renew(lender, index)
                case Restore(_, index, first, end):
                    self._num_bytes["restore"] += engine.restore(lender, index, first, end)

    def take_bytes(self) -> dict[str, int]:
        """Returns the bytes copied since the last call, without purposes that had none."""
        found = {what: num_bytes for what, num_bytes in self._num_bytes.items() if num_bytes}
        self._num_bytes = dict.fromkeys(self._num_bytes, 0)
        return found
