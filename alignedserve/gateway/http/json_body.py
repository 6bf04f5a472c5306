"""A body of JSON, as it came: it is read elsewhere (openai/prepare.py)."""

from __future__ import annotations

from fastapi import Request

from alignedserve.gateway.http.errors import ApiError


async def json_body(http: Request) -> list[bytes]:
    """Returns the body in pieces: to put them together may take longer than others should have to wait. Raises ApiError
    unless the client says that it is JSON: a page can make a browser send anything else without asking."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        raise ApiError(400, "the body must be JSON, and come with the header Content-Type: application/json")
    return [piece async for piece in http.stream() if piece]
