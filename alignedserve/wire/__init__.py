"""Messages between the router and everyone else: `Hub` is its end, `RouterConnection` is theirs."""

from __future__ import annotations

from alignedserve.wire.address import RouterAddress
from alignedserve.wire.connection import RefusedByRouter, RouterConnection, new_epoch
from alignedserve.wire.frames import FrameReader, WireError, frame
from alignedserve.wire.hub import Handler, Hub
from alignedserve.wire.signals import stop_on_sigterm

__all__ = [
    "FrameReader",
    "Handler",
    "Hub",
    "RefusedByRouter",
    "RouterAddress",
    "RouterConnection",
    "WireError",
    "frame",
    "new_epoch",
    "stop_on_sigterm",
]
