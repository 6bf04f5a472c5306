"""When a request's tokens are due. Pure: the router, the instances and the simulator schedule by it.

All times are on the island's clock: `time.monotonic()` of its host, or the simulation's.

**Real time (RT).** The first token is due at `first_due_s`, and each further one `tbt_s` later. Once the first token is
there, `first_due_s` is its time. A request that got its tokens early is ahead: it has slack, and may wait. Even with
slack, no token should take longer than `tbt_s`. The request's *allowance*, the time that the next iteration may take,
is therefore never more than that. Its objective, however, is kept until tokens are late by more than `early_s`, the
time by which the first one was early. Then the request is *lost*.

**Best effort (BE).** The whole answer is due at `job_due_s`, or never. The rest of the window is spread over the
remaining tokens. Later iterations gain time that was not used, and lose time that was overused.

**Before the first token**, each class is ordered by the latest moment at which a request's work must begin. A request
that has missed it is *demoted*: it is ordered as if it were due `DEMOTION_S` later. Requests that can still be in time
come first, and the demoted one is served in the end. This applies to instances. At the router such a request is lost
(`router/queues.py`).
"""

from __future__ import annotations

import math

import msgspec


class Deadlines(msgspec.Struct, frozen=True, array_like=True):
    is_rt: bool = False
    first_due_s: float = math.inf
    # The objective for the time between two tokens, in seconds.
    tbt_s: float = math.inf
    job_due_s: float = math.inf
    # For RT: whether `tbt_s` was not requested, but is the operator's maximum. The next token is due as soon as
    # possible.
    hurries: bool = False
    # For BE: whether jobs would be late at their present speed.
    is_pressed: bool = False
    # For RT: how long before its objective the first token came, in seconds.
    early_s: float = 0.0

    def token_due_s(self, number: int) -> float:
        """When output token `number` is due, counted from 0."""
        return self.first_due_s + number * self.tbt_s if number else self.first_due_s

    def allowance_s(self, number: int, now: float) -> float:
        """Seconds that an iteration which yields this token may take; negative if the token is late already."""
        return min(self.tbt_s, self.token_due_s(number) - now)

    def slack_s(self, number: int, now: float) -> float:
        """Seconds until this token is due; negative if it is late already."""
        return self.token_due_s(number) - now

    def lost_s(self, number: int) -> float:
        """When the request is lost unless it has this token. A stream that is late by less than a token is not lost.
        Otherwise it would stand still over a small delay."""
        return self.token_due_s(number) + max(self.early_s, self.tbt_s)

    def is_lost(self, number: int, now: float) -> bool:
        """Whether its objective is missed. Others come first from here on."""
        return now > self.lost_s(number)

    def job_allowance_s(self, num_left: int, now: float) -> float:
        """Seconds that one of the `num_left` tokens may take, waiting included."""
        return (self.job_due_s - now) / max(num_left, 1)


# A request that can't be in time goes behind those that are due this many seconds later.
DEMOTION_S = 10.0
# An RT request without an objective is queued as if it had this one.
UNSTATED_TTFT_S = 1.0


def due_s(deadlines: Deadlines, number: int) -> float:
    """When output token `number`, or a whole job, is due; infinite without an objective."""
    return deadlines.token_due_s(number) if deadlines.is_rt else deadlines.job_due_s


def latest_start_s(deadlines: Deadlines, number: int, needed_s: float, arrived_s: float) -> float:
    """The latest start, which orders a class.

    `needed_s` is the time to output token `number`; for best effort, to the end. Best effort without a window is
    ordered by arrival plus needed time. If two arrive together the shorter one goes first, and none waits forever.
    """
    due = due_s(deadlines, number)
    if due < math.inf:
        return due - needed_s
    return arrived_s + UNSTATED_TTFT_S - needed_s if deadlines.is_rt else arrived_s + needed_s


def is_demoted(deadlines: Deadlines, number: int, needed_s: float, now: float) -> bool:
    """Whether the request has an objective, and can't meet it any more."""
    due = due_s(deadlines, number)
    return due < math.inf and due - needed_s < now


def place_s(deadlines: Deadlines, number: int, needed_s: float, arrived_s: float, now: float) -> float:
    """The latest start with demotion added. The request with the smallest value is first."""
    start_s = latest_start_s(deadlines, number, needed_s, arrived_s)
    return start_s + DEMOTION_S if is_demoted(deadlines, number, needed_s, now) else start_s
