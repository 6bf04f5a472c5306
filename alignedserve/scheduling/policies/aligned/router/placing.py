"""Which prefill instance computes a prompt. Pure.

With deadlines, real time (RT) waits there for earlier RT and for the end of an iteration with best effort (BE),
however much BE waits. So while RT comes and goes, BE is kept on as few instances as its windows of work allow: on the
others RT waits for no BE at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.scheduling.island import PrefillView

# The number of prompt tokens whose KV an instance may have, and does not compute.
NumKnown = Callable[[PrefillView], int]


def for_real_time(views: Sequence[PrefillView], num_known: NumKnown, is_colocated: bool) -> PrefillView:
    """Returns the instance where the prompt waits least; among colocated ones that are equal in this, the one where
    least decodes."""

    def wait(view: PrefillView) -> tuple[int, int, int]:
        num_be = view.pending.sum(is_rt=False)
        one_iteration = min(num_be, view.hello.limits.max_num_batched_tokens)
        num_before = view.pending.sum(is_rt=True) + one_iteration - num_known(view)
        return num_before, num_be, -view.num_free_blocks if is_colocated else 0

    return min(views, key=wait)


def for_best_effort(views: Sequence[PrefillView], num_iterations: int) -> PrefillView:
    """Each instance has a window of so many iterations of work. One with room in its window takes more before another
    begins."""
    ahead = [view.pending.sum(is_rt=False) for view in views]

    def place(number: int) -> tuple[bool, int]:
        window = num_iterations * views[number].hello.limits.max_num_batched_tokens
        is_full = ahead[number] >= window
        return is_full, ahead[number] if is_full else -ahead[number]

    return views[min(range(len(views)), key=place)]
