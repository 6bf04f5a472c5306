"""What the kernels are tested on when they are built for another processor than this one."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AREAS = (
    "linear",
    "groups",
    "gguf",
    "quantised",
    "attention",
    "layer_groups",
    "kv_rows",
    "kv_int8",
    "rowwise",
    "experts",
    "adapters",
    "sampling",
)


def draw_options(config: pytest.Config) -> list[str]:
    """Those with which another run of pytest has the cases of this one."""
    return ["--everything"] if config.option.everything else ["--draw", config.option.draw]


needs_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="builds for x86-64")
