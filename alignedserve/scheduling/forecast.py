"""How long an answer is expected to be, and what happens when it goes on beyond that: the expected length doubles, and
the request is demoted (ALISE).

A demotion is forgiven after a while (ALISE's ageing), so that a request which was taken for short does not starve.
"""

from __future__ import annotations

from dataclasses import dataclass

# The number of output tokens that an answer is expected to have as long as nothing is known of it.
UNKNOWN_OUTPUT = 512
# Seconds after which one level of demotion no longer counts.
FORGIVEN_S = 10.0
# No request is demoted further than this.
MAX_LEVEL = 8


def length_beyond(expected_len: int, num_output: int) -> int:
    """The expected length of an answer which was expected to have `expected_len` tokens (at least one), has
    `num_output`, and goes on."""
    while expected_len <= num_output:
        expected_len *= 2
    return expected_len


@dataclass(eq=False, slots=True)
class Forecast:
    # The number of output tokens that are expected in all; 0 if nothing is known, and then nothing can be exceeded.
    length: int = 0
    _level: int = 0
    # When the level last changed.
    _since_s: float = 0.0

    def advance(self, num_output: int, now: float) -> bool:
        """The answer has so many tokens, and goes on. Returns whether that is more than was expected."""
        if not 0 < self.length <= num_output:
            return False
        self.length = length_beyond(self.length, num_output)
        self._level, self._since_s = min(self.level(now) + 1, MAX_LEVEL), now
        return True

    def level(self, now: float) -> int:
        """The level of demotion; 0 if the answer is no longer than predicted, or that was forgiven."""
        return max(0, self._level - int((now - self._since_s) / FORGIVEN_S))
