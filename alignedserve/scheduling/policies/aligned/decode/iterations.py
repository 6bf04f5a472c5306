"""Which requests are in the next iteration, and with how many tokens: real time (RT), and as much best effort (BE) as
keeps the iteration within what RT's next tokens allow. The others sit out: they keep their blocks, and nothing is
moved. Without RT all requests run. Pure.

All RT runs as long as its objectives are alike. Else those that can wait sit out iterations which would be too long for
those that can't (AccelGen): `scheduling/remaining_time.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.policies.aligned.decode.mixing import Mixing
from alignedserve.scheduling.remaining_time import RemainingTime
from alignedserve.timing.deadlines import DEMOTION_S

# TBT objectives are alike if none is more than so many times as long as another one.
ALIKE = 1.25
# The number of tokens computed before, and the number to compute, of each chunk.
Chunks = list[tuple[int, int]]


def fill(at: DecodeBoundary, mixing: Mixing, time: RemainingTime) -> None:
    ready, behind = at.ready_and_behind()
    rt = _in_time([request for request in ready if request.is_rt], at.now, time)
    be = [request for request in ready if not request.is_rt]
    if behind or be:
        _fill_mixed(at, mixing, rt, be, behind)
    else:
        _run(at, rt)
        mixing.planned(num_be=0)


def _in_time(rt: list[DecodeRequest], now: float, time: RemainingTime) -> list[DecodeRequest]:
    objectives_s = [request.deadlines.tbt_s for request in rt]
    if not rt or max(objectives_s) <= ALIKE * min(objectives_s):
        return rt
    time.look(rt, now)
    return time.in_time(rt, now)[0]


def _fill_mixed(
    at: DecodeBoundary,
    mixing: Mixing,
    rt: Sequence[DecodeRequest],
    be: Sequence[DecodeRequest],
    behind: Sequence[DecodeRequest],
) -> None:
    """Runs real time, then as much of best effort as it allows."""
    if hold_s := mixing.hold_s([each for each in at.running if each.is_rt]):
        at.hold(hold_s)
        return
    rt = _run(at, rt)
    rt_behind = sorted(
        (request for request in behind if request.is_rt), key=lambda each: _place_s(each, at.now)
    )
    bound_s = mixing.bound_s([*rt, *rt_behind])
    lengths = [request.num_tokens for request in rt]
    # Where nobody decodes, or is about to, prompts of RT hold nobody up but prompts behind them.
    is_alone = not (rt or at.arriving or mixing.is_rt_near)
    prompts_s = math.inf if is_alone else mixing.bound_of_prompts_s(rt)
    chunks = _catch_up(at, mixing, rt_behind, [], lengths, prompts_s)
    chosen = _run(at, mixing.choose(rt, be, chunks, bound_s))
    lengths += [request.num_tokens for request in chosen]
    be_behind = [request for request in behind if not request.is_rt]
    if be_behind:
        bound_s = mixing.chunk_bound_s(be_behind[0], rt, chunks, lengths, bound_s)
        taken = _catch_up(at, mixing, be_behind, chunks, lengths, bound_s)
        mixing.spent_on_chunks(taken, chunks, lengths)
    mixing.planned(num_be=len(chosen))


def _place_s(request: DecodeRequest, now: float) -> float:
    """Who is due first goes first; who is late goes behind those that are due a while later."""
    due_s = request.deadlines.token_due_s(request.num_output)
    return due_s if due_s >= now else due_s + DEMOTION_S


def _run(at: DecodeBoundary, requests: Iterable[DecodeRequest]) -> list[DecodeRequest]:
    """Runs the requests that have a block for their next token."""
    return at.run_each([*requests])


def _catch_up(
    at: DecodeBoundary,
    mixing: Mixing,
    behind: Iterable[DecodeRequest],
    chunks: Chunks,
    lengths: Sequence[int],
    bound_s: float,
) -> Chunks:
    """Computes chunks of requests whose KV was lost, as far as tokens, blocks and time allow, beside the given chunks.
    Returns the new ones."""
    taken: Chunks = []
    for request in behind:
        most = at.limits.max_prefill_chunk or at.num_tokens_left
        count = min(request.num_pending, at.num_tokens_left, most)
        if count > 0:
            count = mixing.most_tokens(request, count, [*chunks, *taken], lengths, bound_s)
        if count > 0 and at.chunk(request, count):
            taken.append((request.num_cached, count))
    return taken
