"""The process that prepares bodies, of every endpoint (generation/prepare_process.py)."""

from __future__ import annotations

from typing import Final

from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.generation.prepare_process import main

# The name by which the gateway starts it.
MODULE: Final = "alignedserve.gateway.prepare_process"

if __name__ == "__main__":
    main(ENDPOINTS)
