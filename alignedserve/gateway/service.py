"""Which class of service a call is in, and how soon its tokens are due: `service_tier`, `slo`, and the SLO headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from alignedserve.gateway.errors import ApiError

ServiceTier = Literal["auto", "default", "priority", "flex"]

TTFT_HEADER = "X-SLO-TTFT-MS"
TBT_HEADER = "X-SLO-TBT-MS"
# Nobody waits longer in real time; who can, asks for `flex`.
MAX_TTFT_MS = 600_000.0
MAX_TBT_MS = 60_000.0


class Slo(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    # the first token is due so long after the request came
    ttft_ms: float | None = None
    # each further one so long after the one before
    tbt_ms: float | None = None


@dataclass(frozen=True)
class Service:
    # as the answer says it
    name: str = "default"
    # see messages.Request
    tier: str = "rt"
    ttft_s: float | None = None
    tbt_s: float | None = None
    deadline_s: float | None = None


def service_of(asked: ServiceTier | None, slo: Slo | None, headers: Mapping[str, str]) -> Service:
    """The body goes before the headers. Raises ApiError that names what is wrong."""
    slo = slo or Slo()
    ttft_s = _seconds("slo.ttft_ms", slo.ttft_ms, TTFT_HEADER, headers, MAX_TTFT_MS)
    tbt_s = _seconds("slo.tbt_ms", slo.tbt_ms, TBT_HEADER, headers, MAX_TBT_MS)
    if asked != "flex":
        return Service("priority" if asked == "priority" else "default", "rt", ttft_s, tbt_s)
    if ttft_s is not None or tbt_s is not None:
        raise ApiError(400, "slo: only for real-time traffic, and service_tier='flex' is not", param="slo")
    return Service("flex", "be")


def _seconds(
    name: str, value: float | None, header: str, headers: Mapping[str, str], most_ms: float
) -> float | None:
    if value is None:
        given = headers.get(header.lower())
        if given is None:
            return None
        name, value = header, _number(header, given)
    if not 1 <= value <= most_ms:  # NaN fails every comparison
        raise _wrong(name, value, f"must be a number of milliseconds from 1 to {most_ms:.0f}")
    return value / 1000


def _number(header: str, given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise _wrong(header, given, "must be a number of milliseconds") from None


def _wrong(name: str, value: object, allowed: str) -> ApiError:
    return ApiError(400, f"{name}={value!r}: {allowed}", param=name.split(".")[0])
