"""What becomes of a predicted length when the answer goes on beyond it: it doubles, and the request is demoted (ALISE).

A demotion is forgiven after a while (ALISE's ageing), so that whoever was taken for short does not starve for it.
"""

from __future__ import annotations

from dataclasses import dataclass

# so long after a demotion it counts no more
FORGIVEN_S = 10.0
# 0: as predicted. Nobody falls further than this.
MAX_LEVEL = 8


@dataclass(eq=False, slots=True)
class Forecast:
    # output tokens that are expected in all; 0: nothing is known, and nothing can be exceeded
    length: int = 0
    num_exceeded: int = 0
    _level: int = 0
    # when the level last changed
    _since_s: float = 0.0

    def advance(self, num_tokens: int, now: float) -> bool:
        """It has so many output tokens, and goes on. Whether that is more than was expected."""
        if not 0 < self.length <= num_tokens:
            return False
        while self.length <= num_tokens:
            self.length *= 2
            self.num_exceeded += 1
        self._level, self._since_s = min(self.level(now) + 1, MAX_LEVEL), now
        return True

    def level(self, now: float) -> int:
        """Of demotion."""
        return max(0, self._level - int((now - self._since_s) / FORGIVEN_S))

    def num_left(self, num_tokens: int) -> int | None:
        """None: nobody knows."""
        return self.length - num_tokens if self.length else None
