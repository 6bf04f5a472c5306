"""`alignedserve serve`: checks the settings, starts the launcher, passes signals on, and leaves nothing behind."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from alignedserve.launch.console import Alarm, format_output, own_line
from alignedserve.launch.control import control_path, prepare_directory
from alignedserve.launch.first_process import Orders, run_in_child
from alignedserve.launch.leftovers import removing
from alignedserve.launch.ports import check_address, claimed
from alignedserve.launch.settings import Settings, log_of
from alignedserve.launch.signals import hold_signals
from alignedserve.types import SHM_PREFIX

logger = logging.getLogger(__name__)
# Its lines are printed anyway. Without this, logging would print warnings once more where no log file is.
logger.addHandler(logging.NullHandler())


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Runs until a signal ends it. Raises ValueError for settings that can't work, and RuntimeError if a process can't
    be kept running."""
    start_s = time.monotonic()
    say = _logging_too(settings, say)
    http = settings.http
    check_address(http.host, http.port)
    prepare_directory()
    control_path(http.host, http.port)
    hold_signals()
    with claimed(http.host, http.port), removing(f"{SHM_PREFIX}{secrets.token_hex(6)}") as left:

        def launch(orders: Orders) -> None:
            # The launcher's module, and what it imports, is only needed there.
            from alignedserve.launch.launcher import launch

            launch(settings, say, orders, left, start_s)

        try:
            is_done = run_in_child(launch, say)
        except (ValueError, RuntimeError) as error:
            logger.error("%s", error)
            raise
    if not is_done:
        say("stopped")


def _logging_too(settings: Settings, say: Callable[[str], None]) -> Callable[[str], None]:
    """Formats the output of this process. Returns a function which also writes what is printed to the launcher's log
    file, if there are files. Raises ValueError."""
    format_output(settings.log.format)
    try:
        log_of(settings).start("launcher", has_console=False)
    except OSError as error:
        raise ValueError(f"log_dir={settings.log.dir!r}: {error.strerror}") from None

    def say_and_log(line: str) -> None:
        level = logging.WARNING if isinstance(line, Alarm) else logging.INFO
        say(own_line(settings.log.format, logging.getLevelName(level).lower(), logger.name, line))
        logger.log(level, "%s", line)

    return say_and_log
