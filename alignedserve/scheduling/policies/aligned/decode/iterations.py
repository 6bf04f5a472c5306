"""Which requests are in the next iteration, and with how many tokens: all real time (RT), and as much best effort (BE)
as keeps the iteration within what RT's next tokens allow. The others sit out: they keep their blocks, and nothing is
moved. Without RT all requests run. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.policies.aligned.decode.mixing import Mixing

# The number of tokens computed before, and the number to compute, of each chunk.
Chunks = list[tuple[int, int]]


def fill(at: DecodeBoundary, mixing: Mixing) -> None:
    ready, behind = at.ready_and_behind()
    if behind or any(not request.is_rt for request in ready):
        _fill_mixed(at, mixing, ready, behind)
    else:
        _run(at, ready)
        mixing.planned(num_be=0)


def _fill_mixed(
    at: DecodeBoundary, mixing: Mixing, ready: Sequence[DecodeRequest], behind: Sequence[DecodeRequest]
) -> None:
    """Runs real time, then as much of best effort as it allows."""
    if hold_s := mixing.hold_s([each for each in at.running if each.is_rt]):
        at.hold(hold_s)
        return
    rt = _run(at, [request for request in ready if request.is_rt])
    rt_behind = sorted((request for request in behind if request.is_rt), key=_due_s)
    bound_s = mixing.bound_s([*rt, *rt_behind])
    lengths = [request.num_tokens for request in rt]
    chunks = _catch_up(at, mixing, rt_behind, [], lengths, bound_s)
    be = [request for request in ready if not request.is_rt]
    chosen = _run(at, mixing.choose(rt, be, chunks, bound_s))
    lengths += [request.num_tokens for request in chosen]
    be_behind = [request for request in behind if not request.is_rt]
    if be_behind:
        bound_s = mixing.chunk_bound_s(be_behind[0], chunks, lengths, bound_s)
        taken = _catch_up(at, mixing, be_behind, chunks, lengths, bound_s)
        mixing.spent_on_chunks(taken, chunks, lengths)
    mixing.planned(num_be=len(chosen))


def _due_s(request: DecodeRequest) -> float:
    return request.deadlines.token_due_s(request.num_output)


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
        count = min(request.num_pending, at.num_tokens_left)
        if count > 0:
            count = mixing.most_tokens(request, count, [*chunks, *taken], lengths, bound_s)
        if count > 0 and at.chunk(request, count):
            taken.append((request.num_cached, count))
    return taken
