"""The child process that prepares request bodies of all endpoints (generation/prepare_process.py)."""

from __future__ import annotations

from typing import Final

from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.generation.prepare_process import main

# The module that the gateway runs in the child process.
MODULE: Final = "alignedserve.gateway.prepare_process"

if __name__ == "__main__":
    main(ENDPOINTS)
