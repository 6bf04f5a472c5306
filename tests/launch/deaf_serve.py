"""`alignedserve serve`, where a signal comes while it plans, and what it raises is swallowed: as native code does."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from alignedserve.cli.main import main
from alignedserve.launch import serve
from alignedserve.launch.plan import plan_gateways


def deaf(*planned: Any) -> Any:
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    return plan_gateways(*planned)


if __name__ == "__main__":
    setattr(serve, plan_gateways.__name__, deaf)
    main()
