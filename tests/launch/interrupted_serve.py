"""`alignedserve serve`, where a signal comes while its event loop is made."""

from __future__ import annotations

import os
import signal
from asyncio import selector_events
from typing import Any

from alignedserve.cli.main import main

make_self_pipe = selector_events.BaseSelectorEventLoop._make_self_pipe  # type: ignore[attr-defined]


def interrupted(loop: Any) -> None:
    os.kill(os.getppid(), signal.SIGINT)
    make_self_pipe(loop)


if __name__ == "__main__":
    selector_events.BaseSelectorEventLoop._make_self_pipe = interrupted  # type: ignore[attr-defined]
    main()
