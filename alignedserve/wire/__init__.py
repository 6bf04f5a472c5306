"""Messages between the router and everyone else: `Hub` is its end, `RouterLink` is theirs."""

from __future__ import annotations

from alignedserve.wire.address import RouterAddress
from alignedserve.wire.frames import FrameReader, WireError, frame
from alignedserve.wire.hub import Handler, Hub
from alignedserve.wire.link import RefusedByRouter, RouterLink, new_epoch
from alignedserve.wire.signals import stop_on_sigterm

__all__ = [
    "FrameReader",
    "Handler",
    "Hub",
    "RefusedByRouter",
    "RouterAddress",
    "RouterLink",
    "WireError",
    "frame",
    "new_epoch",
    "stop_on_sigterm",
]
