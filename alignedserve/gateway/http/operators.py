"""Stub of the operator's key."""

from __future__ import annotations

from fastapi import Request

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.keys import ANYONE, owner_of


def require_operator(http: Request) -> None:
    """Raises ApiError unless the call may change the server for all clients."""
    if owner_of(http) != ANYONE:
        raise ApiError(403, "this call changes the server for all clients, and needs an --operator-key")
