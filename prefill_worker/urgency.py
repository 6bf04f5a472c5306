"""In which order prompts of a class go: by `alignedserve.deadlines`, with what they still take here, and for best
effort what its answer will take."""

from __future__ import annotations

from alignedserve.deadlines import place_s
from alignedserve.estimate import Estimate
from prefill_worker.members import Member


def place_of(member: Member, estimate: Estimate, now: float) -> float:
    """Who has the least is first."""
    if member.since_s is None:
        raise RuntimeError(f"request {member.key}: its place is asked before a plan has seen it")
    work = member.work
    needed_s = estimate.iteration([(member.num_computed, member.num_pending)], [])
    if not member.is_rt:
        num_left = max(work.predicted_len - len(work.output), 0)
        needed_s += num_left * estimate.iteration([], [member.num_tokens])
    return place_s(work.deadlines, len(work.output), needed_s, member.since_s, now)
