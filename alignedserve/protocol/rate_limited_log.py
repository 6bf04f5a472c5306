"""Log lines that any client can trigger: at most one every EVERY_S seconds, with the number of suppressed ones."""

from __future__ import annotations

import logging
import time

EVERY_S = 10.0


class RateLimitedLog:
    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._num_unsaid = 0
        self._quiet_until_s = 0.0

    def warning(self, line: str) -> None:
        now = time.monotonic()
        if now < self._quiet_until_s:
            self._num_unsaid += 1
            return
        others = f" ({self._num_unsaid} more since the last such line)" if self._num_unsaid else ""
        self._num_unsaid, self._quiet_until_s = 0, now + EVERY_S
        self._logger.warning("%s%s", line, others)
