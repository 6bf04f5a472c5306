"""A digest of all events of a run. Two runs of one seed have the same digest."""

from __future__ import annotations

import hashlib

from alignedserve.sim.clock import Clock


class Journal:
    def __init__(self, clock: Clock, keeps_lines: bool = False) -> None:
        """With `keeps_lines` the events are also kept as text, for reading and comparing."""
        self.lines: list[str] | None = [] if keeps_lines else None
        self.num_events = 0
        self._clock = clock
        self._hash = hashlib.sha256()

    def add(self, *words: object) -> None:
        line = f"{self._clock.now!r} {' '.join(map(str, words))}"
        self.num_events += 1
        self._hash.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
