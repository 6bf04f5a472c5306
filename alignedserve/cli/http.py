"""The HTTP client that commands use, and its error messages."""

from __future__ import annotations

import ipaddress

import httpx2

# Seconds that a server may take for one answer.
TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0


def http_client(url: str, api_key: str | None) -> httpx2.Client:
    """Returns a client. `url` may end with /v1. Raises ValueError for a malformed URL or key."""
    if api_key is not None and any(not "!" <= letter <= "~" for letter in api_key):
        raise ValueError("api_key: a key must consist of printable ASCII characters without spaces")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base = _base_of(url)
    # This machine is reached directly: a proxy would read prompts and keys.
    transport = httpx2.HTTPTransport() if _is_here(httpx2.URL(base).host) else None
    return httpx2.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)


def refusal(answer: httpx2.Response) -> str:
    """Returns why the server refused, in its own words if it sent any and a command has no better ones."""
    if answer.status_code == httpx2.codes.UNAUTHORIZED:
        what = (
            "does not know this API key" if "authorization" in answer.request.headers else "needs an API key"
        )
        return f"{_host_of(answer.url)}: the server {what}; give --api-key KEY, or set OPENAI_API_KEY"
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.url}: {answer.status_code} {answer.reason_phrase}"


def away(http: httpx2.Client, error: httpx2.TransportError) -> str:
    """Returns the message for a server that can't be reached, with what to do."""
    hint = "; `alignedserve serve` starts one, --url names another" if _is_absent(error) else ""
    return f"{why_away(http, error)}{hint}"


def why_away(http: httpx2.Client, error: httpx2.TransportError) -> str:
    reason = "no server answers there" if _is_absent(error) else error or type(error).__name__
    return f"{str(http.base_url).rstrip('/')}: {reason}"


def _is_absent(error: httpx2.TransportError) -> bool:
    return isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)


def _host_of(url: httpx2.URL) -> str:
    return str(url.copy_with(path="/", query=None)).rstrip("/")


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _base_of(url: str) -> str:
    try:
        base = httpx2.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx2.InvalidURL as error:
        raise ValueError(f"url={url!r}: {error}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"url={url!r}: must be like http://127.0.0.1:8000")
    return str(base)
