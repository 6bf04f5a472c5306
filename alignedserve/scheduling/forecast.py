"""The expected length of an answer. If the answer exceeds it, the expected length doubles, and the request is demoted
(ALISE).

A demotion is forgiven after a while (ALISE's aging), so that a request with too short a prediction does not starve.
"""

from __future__ import annotations

from dataclasses import dataclass

# The expected number of output tokens of an answer without a prediction.
UNKNOWN_OUTPUT = 512
# Seconds after which one level of demotion no longer counts.
FORGIVEN_S = 10.0
# The highest level of demotion.
MAX_LEVEL = 8


def length_beyond(expected_len: int, num_output: int) -> int:
    """Returns the new expected length of an answer that was expected to have `expected_len` tokens (at least one), has
    `num_output`, and continues."""
    while expected_len <= num_output:
        expected_len *= 2
    return expected_len


@dataclass(eq=False, slots=True)
class Forecast:
    # The expected number of output tokens in all; 0: unknown, so that nothing can be exceeded.
    length: int = 0
    _level: int = 0
    # When the level last changed.
    _since_s: float = 0.0

    def advance(self, num_output: int, now: float) -> bool:
        """Notes that the answer has `num_output` tokens and continues. Returns whether that exceeds the expected
        length."""
        if not 0 < self.length <= num_output:
            return False
        self.length = length_beyond(self.length, num_output)
        self._level, self._since_s = min(self.level(now) + 1, MAX_LEVEL), now
        return True

    def level(self, now: float) -> int:
        """Returns the level of demotion; 0 if the answer is no longer than predicted, or that was forgiven."""
        return max(0, self._level - int((now - self._since_s) / FORGIVEN_S))
