from __future__ import annotations

import sys
from pathlib import Path

from tests.test_imports import ROOT, imports_of

PACKAGES = {"torch", "numpy", "msgspec"}
OURS = (
    "alignedserve.transport",
    "alignedserve.protocol.messages",
    "alignedserve.protocol.handshake",
    "alignedserve.kv.format",
    # for a pool whose blocks are not as the cache's
    *("alignedserve.kernels.cpu", "alignedserve.kernels.kv_int8", "alignedserve.kernels.triton.kv_int8"),
    "alignedserve.types",
)


def test_transports_stand_on_the_base_modules_only() -> None:
    """Neither Ray nor the pool: whoever has an array of blocks can move them."""
    files: list[Path] = list((ROOT / "alignedserve/transport").rglob("*.py"))
    assert files
    for path in files:
        foreign = {
            name
            for name in imports_of(path)
            if name.split(".")[0] not in sys.stdlib_module_names | PACKAGES and not name.startswith(OURS)
        }
        assert not foreign, f"{path.name} imports {foreign}"
