"""How long an answer is expected to be, and what becomes of that when it goes on beyond it: the length doubles, and the
request is demoted (ALISE).

A demotion is forgiven after a while (ALISE's ageing): a request that was taken for short does not starve for it.
"""

from __future__ import annotations

from dataclasses import dataclass

# output tokens that an answer is expected to have as long as nothing is known of it
UNKNOWN_OUTPUT = 512
# seconds after which one level of demotion counts no more
FORGIVEN_S = 10.0
# No request falls further than this.
MAX_LEVEL = 8


def length_beyond(expected_len: int, num_output: int) -> int:
    """Of an answer that was expected to have `expected_len` tokens, at least one, has `num_output`, and goes on."""
    while expected_len <= num_output:
        expected_len *= 2
    return expected_len


@dataclass(eq=False, slots=True)
class Forecast:
    # output tokens that are expected in all; 0: nothing is known, and nothing can be exceeded
    length: int = 0
    _level: int = 0
    # when the level last changed
    _since_s: float = 0.0

    def advance(self, num_output: int, now: float) -> bool:
        """The answer has so many tokens, and goes on. Returns whether that is more than was expected."""
        if not 0 < self.length <= num_output:
            return False
        self.length = length_beyond(self.length, num_output)
        self._level, self._since_s = min(self.level(now) + 1, MAX_LEVEL), now
        return True

    def level(self, now: float) -> int:
        """Of demotion. 0: the answer is as long as predicted."""
        return max(0, self._level - int((now - self._since_s) / FORGIVEN_S))
