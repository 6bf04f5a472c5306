"""Ids and small shared types. Ids have types so that a request is never passed where its id is meant."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)


class InvalidRequest(ValueError):
    """A request that can't be run. The message names the field, its value and what is allowed."""
