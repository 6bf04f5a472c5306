"""`alignedserve serve`, where a signal comes while the launcher plans."""

from __future__ import annotations

import os
import signal
from typing import Any

from alignedserve.cli.main import main
from alignedserve.launch import launcher
from alignedserve.launch.plan import plan_gateways


def deaf(*planned: Any) -> Any:
    os.kill(os.getppid(), signal.SIGINT)
    return plan_gateways(*planned)


if __name__ == "__main__":
    setattr(launcher, plan_gateways.__name__, deaf)
    main()
