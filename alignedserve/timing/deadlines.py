"""When a request's tokens are due. Pure: what the router, the instances and the simulator schedule by.

All times are of the island's clock: `time.monotonic()` of its host, or the simulation's.

**Real time (RT).** The first token is due at `first_due_s`, each further one `tbt_s` later; once the first is there,
`first_due_s` is when it came. A request that got its tokens early is ahead: it has slack, and may wait. Whatever its
slack, nobody is made to wait for a token longer than `tbt_s` as long as that can be helped: its *allowance*, what the
next iteration may take, is never more.

**Best effort (BE).** All is due at `job_due_s`, or never. What is left of the window is spread over the tokens that are
left: waiting that was not used is there for later iterations, and what was used too much is missing then.

**Before the first token**, each class goes by the latest moment at which its work has to begin. Who has missed that is
*demoted*: it stands as if all of it were due `DEMOTION_S` later. Others, who can still make it, come first, and in the
end it is served.
"""

from __future__ import annotations

import math

import msgspec


class Deadlines(msgspec.Struct, frozen=True, array_like=True):
    is_rt: bool = False
    first_due_s: float = math.inf
    # between two tokens
    tbt_s: float = math.inf
    job_due_s: float = math.inf

    def token_due_s(self, number: int) -> float:
        """Of output token `number`, from 0."""
        return self.first_due_s + number * self.tbt_s if number else self.first_due_s

    def allowance_s(self, number: int, now: float) -> float:
        """What an iteration may take that yields this token. Below zero: it is late already."""
        return min(self.tbt_s, self.token_due_s(number) - now)

    def is_lost(self, number: int, now: float) -> bool:
        """So late that hurrying won't help: others come first from here on."""
        return now - self.token_due_s(number) > LOST_TOKENS * self.tbt_s

    def job_allowance_s(self, num_left: int, now: float) -> float:
        """What one of the `num_left` tokens may take, waiting included."""
        return (self.job_due_s - now) / max(num_left, 1)


# A stream that is so many tokens late has lost its objective.
LOST_TOKENS = 20


# A request that can't make it any more goes behind those that are due so much later.
DEMOTION_S = 10.0
# Real time without an objective stands in the queue as if it had this one.
UNSTATED_TTFT_S = 1.0


def due_s(deadlines: Deadlines, number: int) -> float:
    """When what has to be done next is to be ready: output token `number`, or all of a job. Infinite: no objective."""
    return deadlines.token_due_s(number) if deadlines.is_rt else deadlines.job_due_s


def latest_start_s(deadlines: Deadlines, number: int, needed_s: float, arrived_s: float) -> float:
    """The order within a class. `needed_s`: to output token `number`, of best effort to the end.

    Best effort without a window goes by arrival and by what it takes: the shorter of two equals first, and nobody waits
    for ever.
    """
    due = due_s(deadlines, number)
    if due < math.inf:
        return due - needed_s
    return arrived_s + UNSTATED_TTFT_S - needed_s if deadlines.is_rt else arrived_s + needed_s


def is_demoted(deadlines: Deadlines, number: int, needed_s: float, now: float) -> bool:
    """It has an objective, and can't make it any more."""
    due = due_s(deadlines, number)
    return due < math.inf and due - needed_s < now


def place_s(deadlines: Deadlines, number: int, needed_s: float, arrived_s: float, now: float) -> float:
    """The same, with those demoted that can't make it any more. Who has the least is first."""
    start_s = latest_start_s(deadlines, number, needed_s, arrived_s)
    return start_s + DEMOTION_S if is_demoted(deadlines, number, needed_s, now) else start_s
