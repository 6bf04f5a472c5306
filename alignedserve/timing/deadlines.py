"""When a request's tokens are due. Pure: the router, the instances and the simulator schedule by it.

All times are on the island's clock: `time.monotonic()` of its host, or the simulation's.

**Real time (RT).** The first token is due at `first_due_s`, each further one `tbt_s` later; once the first is there,
`first_due_s` is when it came. A request that got its tokens early is ahead: it has slack, and may wait. Whatever its
slack, no token takes longer than `tbt_s` as long as that can be helped: the request's *allowance*, what the
next iteration may take, is never more.

**Best effort (BE).** The whole answer is due at `job_due_s`, or never. What is left of the window is spread over the
tokens that are left: waiting time that was not used is there for later iterations, and time that was overused is
missing then.

**Before the first token**, each class goes by the latest moment at which its work has to begin. A request that has
missed it is *demoted*: it stands as if all of it were due `DEMOTION_S` later. Requests that can still make it come
first, and in the end the demoted one is served. That is at instances: at the router it is lost (`prefill_queue.py`).
"""

from __future__ import annotations

import math

import msgspec


class Deadlines(msgspec.Struct, frozen=True, array_like=True):
    is_rt: bool = False
    first_due_s: float = math.inf
    # The objective in seconds between two tokens.
    tbt_s: float = math.inf
    job_due_s: float = math.inf
    # Of RT: `tbt_s` is not what was asked for, but the most that the operator lets it take. The sooner the better.
    hurries: bool = False
    # Of BE: at their present speed jobs would be done too late.
    is_pressed: bool = False

    def token_due_s(self, number: int) -> float:
        """When output token `number` is due, counted from 0."""
        return self.first_due_s + number * self.tbt_s if number else self.first_due_s

    def allowance_s(self, number: int, now: float) -> float:
        """How many seconds an iteration may take that yields this token; negative if the token is late already."""
        return min(self.tbt_s, self.token_due_s(number) - now)

    def slack_s(self, number: int, now: float) -> float:
        """How many seconds there are until this token is due; negative if it is late already."""
        return self.token_due_s(number) - now

    def is_lost(self, number: int, now: float) -> bool:
        """Whether it is so late that hurrying won't help: others come first from here on."""
        return now - self.token_due_s(number) > LOST_TOKENS * self.tbt_s

    def job_allowance_s(self, num_left: int, now: float) -> float:
        """How many seconds one of the `num_left` tokens may take, waiting included."""
        return (self.job_due_s - now) / max(num_left, 1)


# A stream that is so many tokens late has lost its objective.
LOST_TOKENS = 20


# A request that can't make it any more goes behind those that are due so many seconds later.
DEMOTION_S = 10.0
# Real time without an objective stands in the queue as if it had this one.
UNSTATED_TTFT_S = 1.0


def due_s(deadlines: Deadlines, number: int) -> float:
    """When output token `number`, or all of a job, is due; infinite without an objective."""
    return deadlines.token_due_s(number) if deadlines.is_rt else deadlines.job_due_s


def latest_start_s(deadlines: Deadlines, number: int, needed_s: float, arrived_s: float) -> float:
    """The latest start, which orders a class. `needed_s` is the time to output token `number`, or for best effort to
    the end.

    Best effort without a window goes by arrival and by what it needs: of two that arrived together the shorter goes
    first, and none waits for ever.
    """
    due = due_s(deadlines, number)
    if due < math.inf:
        return due - needed_s
    return arrived_s + UNSTATED_TTFT_S - needed_s if deadlines.is_rt else arrived_s + needed_s


def is_demoted(deadlines: Deadlines, number: int, needed_s: float, now: float) -> bool:
    """Whether the request has an objective, and can't make it any more."""
    due = due_s(deadlines, number)
    return due < math.inf and due - needed_s < now


def place_s(deadlines: Deadlines, number: int, needed_s: float, arrived_s: float, now: float) -> float:
    """The latest start with demotion added: the request with the smallest place is first."""
    start_s = latest_start_s(deadlines, number, needed_s, arrived_s)
    return start_s + DEMOTION_S if is_demoted(deadlines, number, needed_s, now) else start_s
