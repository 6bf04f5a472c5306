"""Receives a JSON body as bytes. Parsing happens elsewhere (generation/preparer.py)."""

from __future__ import annotations

from fastapi import Request

from alignedserve.gateway.http.errors import ApiError


async def json_body(http: Request) -> list[bytes]:
    """Returns the body in pieces, because joining them could hold up other requests. Raises ApiError unless the content
    type is JSON: a page can make a browser send other types without a preflight request."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        raise ApiError(400, "the body must be JSON, and come with the header Content-Type: application/json")
    return [piece async for piece in http.stream() if piece]
