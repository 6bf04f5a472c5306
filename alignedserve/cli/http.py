"""How commands call a server's HTTP API."""

from __future__ import annotations

import httpx

# The seconds for which a server may work on one answer.
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0


def http_client(url: str, api_key: str | None) -> httpx.Client:
    """`url` may end with /v1 or not. Raises ValueError if it is no URL."""
    if api_key is not None and any(not "!" <= letter <= "~" for letter in api_key):
        raise ValueError("api_key: a key must be of printable ASCII letters, without spaces")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=_base_of(url), headers=headers, timeout=timeout)


def refusal(answer: httpx.Response) -> str:
    """Returns the reason, in the server's words if it gave any."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.url}: {answer.status_code} {answer.reason_phrase}"


def _base_of(url: str) -> str:
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ValueError(f"url={url!r}: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"url={url!r}: must be like http://127.0.0.1:8000")
    return str(base)
