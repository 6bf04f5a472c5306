"""Makes the actions of a history happen, each at its time or after the message that it waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.clock import Clock
from alignedserve.vopr.history import Action, Arrive, Ask, Batch, kind_of

# What clients ask for is asked for when everything is well, too.
_ASKING = (Arrive, Ask, Batch)


class Driver(ABC):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # What waits for a message or a call of the store, by its name.
        self._waiting: defaultdict[str, list[Action]] = defaultdict(list)
        self._is_calm = False
        # How many actions of each kind have happened.
        self.happened: Counter[str] = Counter()

    @abstractmethod
    def act(self, action: Action) -> None:
        """Makes it happen, now."""

    def schedule(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._clock.at(action.at_s, partial(self._due, action))

    def calm(self) -> None:
        """From here on nothing goes wrong any more; requests that are open stay."""
        self._is_calm = True
        self._waiting.clear()

    def observe(self, now: float, event: Event, sends: list[Send]) -> None:
        """A router has made a step."""
        if self._waiting:
            message = type(event.message if isinstance(event, Received) else event).__name__
            self.look_for([message, *(type(send.message).__name__ for send in sends)])

    def look_for(self, names: Iterable[str]) -> None:
        for name in names:
            for action in self._waiting.pop(name, ()):
                self._clock.after(action.delay_s, partial(self._do, action))

    def _due(self, action: Action) -> None:
        if self.is_put_off(action):
            return
        if action.after:
            self._waiting[action.after].append(action)
        else:
            self._do(action)

    def is_put_off(self, action: Action) -> bool:
        """Returns whether the action waits for something else than a message, which the subclass sees to."""
        return False

    def _do(self, action: Action) -> None:
        if self._is_calm and not isinstance(action, _ASKING):
            return
        self.happened[kind_of(action)] += 1
        self.act(action)
