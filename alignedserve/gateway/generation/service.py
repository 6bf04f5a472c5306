"""The service tier and the objectives of a call: `service_tier`, `slo` and the SLO headers. The headers are those of
Kubernetes' inference gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.limits.limits import MAX_TBT_MS, MAX_TTFT_MS, SloConfig

ServiceTier = Literal["auto", "default", "scale", "priority", "flex"]

TTFT_HEADER = "X-SLO-TTFT-MS"
TBT_HEADER = "X-SLO-TBT-MS"
TPOT_HEADER = "X-SLO-TPOT-MS"
# The tier, unless the body has one. Names that an operator has defined for other servers are ignored.
OBJECTIVE_HEADER = "X-Gateway-Inference-Objective"


class Slo(BodyFields):
    is_ours: ClassVar[bool] = True

    # Milliseconds from the request's arrival until its first token is due.
    ttft_ms: float | None = None
    # Milliseconds from one token until the next is due.
    tbt_ms: float | None = None


@dataclass(frozen=True)
class Service:
    # The tier's name in the answer.
    name: str = "default"
    # See messages.Request.
    tier: str = "rt"
    ttft_s: float | None = None
    tbt_s: float | None = None
    deadline_s: float | None = None
    is_pressed: bool = False
    # The objectives that are defaults.
    slo_defaults: tuple[str, ...] = ()


def service_of(
    asked: ServiceTier | None, slo: Slo | None, headers: Mapping[str, str], defaults: SloConfig
) -> Service:
    """Returns the service of a call. The body takes precedence over headers. Raises ApiError."""
    slo = slo or Slo()
    ttft_s = _seconds("slo.ttft_ms", slo.ttft_ms, TTFT_HEADER, headers, MAX_TTFT_MS)
    tbt_header = TBT_HEADER if TBT_HEADER.lower() in headers else TPOT_HEADER
    tbt_s = _seconds("slo.tbt_ms", slo.tbt_ms, tbt_header, headers, MAX_TBT_MS)
    asked = asked or _tier_of(headers.get(OBJECTIVE_HEADER.lower(), ""))
    if asked != "flex":
        return _real_time("priority" if asked == "priority" else "default", ttft_s, tbt_s, defaults)
    if ttft_s is not None or tbt_s is not None:
        raise ApiError(400, "slo: service_tier='flex' is best effort, which has no objectives", param="slo")
    return Service("flex", "be")


def _tier_of(objective: str) -> ServiceTier | None:
    """Returns the tier with this name. None: there is none."""
    tiers = (tier for tier in get_args(ServiceTier) if tier == objective.strip().lower())
    return next(tiers, None)


def _real_time(name: str, ttft_s: float | None, tbt_s: float | None, defaults: SloConfig) -> Service:
    default_ttft_s, default_tbt_s = defaults.of(name)
    given = {"ttft_s": ttft_s, "tbt_s": tbt_s}
    return Service(
        name,
        "rt",
        default_ttft_s if ttft_s is None else ttft_s,
        default_tbt_s if tbt_s is None else tbt_s,
        slo_defaults=tuple(field for field, value in given.items() if value is None),
    )


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
    # float() accepts more than that: 1_0, 1e3, digits of other scripts.
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", given):
        raise _wrong(header, given, "must be a number of milliseconds")
    return float(given)


def _wrong(name: str, value: object, allowed: str) -> ApiError:
    return ApiError(400, f"{name}={value!r}: {allowed}", param=name.split(".")[0])
