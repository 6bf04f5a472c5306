"""Decides which processes are struck, how and when, from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["alone", "together", "again"]

# Seconds without a fault before each episode, so that streams run again.
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 4.0
# Seconds of a stop. A stop shorter than the hang timeout is waited for; a longer one counts as a death.
MIN_STOP_S, MAX_SHORT_STOP_S, MAX_STOP_S = 0.2, 4.0, 16.0
# Share of stops that may be long.
LONG_SHARE = 0.4
# Seconds between the strikes of an episode: any moment of a recovery, which takes a few seconds.
MAX_AGAIN_S = 5.0
# The launcher gives up a process that dies four times before it is up.
MAX_KILLS_OF_ROLE = 2


@dataclass(frozen=True)
class Strike:
    # Seconds after the begin of the episode.
    delay_s: float
    role: str
    # Index among the role's processes, modulo their number.
    index: int
    # Seconds for which it is stopped; None: it is killed.
    stop_s: float | None = None

    def __str__(self) -> str:
        return f"{self.role} " + ("killed" if self.stop_s is None else f"stopped for {self.stop_s:.1f} s")


@dataclass(frozen=True)
class Episode:
    """Related faults. The next episode begins when the system has recovered."""

    kind: Kind
    pause_s: float
    strikes: tuple[Strike, ...]

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(strike.role for strike in self.strikes)

    def __str__(self) -> str:
        return ", ".join(f"{strike} at {strike.delay_s:.1f}" for strike in self.strikes)


def episodes(seed: int, roles: Sequence[str]) -> Iterator[Episode]:
    """Yields episodes without end, in rounds. In each round every role is killed and stopped alone. There are half as
    many episodes of each other kind."""
    dice = random.Random(f"soak {seed}")
    while True:
        deck: list[tuple[Kind, tuple[Strike, ...]]] = []
        for role in roles:
            deck += [("alone", (_kill(dice, role),)), ("alone", (_stop(dice, role),))]
        for _ in range(len(roles) // 2):
            deck += [("together", _together(dice, roles)), ("again", _again(dice, roles))]
        dice.shuffle(deck)
        for kind, strikes in deck:
            yield Episode(kind, dice.uniform(MIN_PAUSE_S, MAX_PAUSE_S), strikes)


def _kill(dice: random.Random, role: str, delay_s: float = 0.0) -> Strike:
    return Strike(delay_s, role, dice.randrange(16))


def _stop(dice: random.Random, role: str, delay_s: float = 0.0) -> Strike:
    most_s = MAX_STOP_S if dice.random() < LONG_SHARE else MAX_SHORT_STOP_S
    return Strike(delay_s, role, dice.randrange(16), dice.uniform(MIN_STOP_S, most_s))


def _either(dice: random.Random, role: str, delay_s: float = 0.0) -> Strike:
    return (_kill if dice.random() < 0.7 else _stop)(dice, role, delay_s)


def _together(dice: random.Random, roles: Sequence[str]) -> tuple[Strike, ...]:
    return tuple(_either(dice, role) for role in dice.sample(roles, 2))


def _again(dice: random.Random, roles: Sequence[str]) -> tuple[Strike, ...]:
    """Strikes the same role half of the time, as soon as it has a process again, and otherwise another role at any
    moment."""
    first = dice.choice(roles)
    struck = [first, first if dice.random() < 0.5 else dice.choice(roles)]
    if dice.random() < 0.3:
        struck.append(dice.choice([role for role in roles if struck.count(role) < MAX_KILLS_OF_ROLE]))
    delays_s = [0.0, *sorted(dice.uniform(0.05, MAX_AGAIN_S) for _ in struck[1:])]
    return (
        _kill(dice, first),
        *(_either(dice, role, delay_s) for role, delay_s in zip(struck[1:], delays_s[1:], strict=True)),
    )
