"""Carries out a plan's operations on blocks that two requests fill from both ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from alignedserve.decode_worker.plan import Checkpoint, EndOp, GiveUp, Lend, Renew, Restore
from alignedserve.engine.request import Request
from alignedserve.instance.executor import Executor
from alignedserve.types import RequestKey


def carry_out(ops: Iterable[EndOp], engine: Executor, requests: Mapping[RequestKey, Request]) -> Counter[str]:
    """Returns the bytes copied, by purpose."""
    num_bytes: Counter[str] = Counter()
    for op in ops:
        lender = requests[op.lender]
        match op:
            case Lend(borrower, _, index, at):
                engine.allocate_up_to(requests[borrower], at)
                engine.lend(requests[borrower], lender, index)
            case Checkpoint(_, index, first, end):
                num_bytes["checkpoint"] += engine.checkpoint(lender, index, first, end)
            case GiveUp(_, index):
                engine.give_up(lender, index)
            case Renew(_, index):
                engine.renew(lender, index)
            case Restore(_, index, first, end):
                num_bytes["restore"] += engine.restore(lender, index, first, end)
    return +num_bytes
