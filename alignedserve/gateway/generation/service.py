"""The service tier and the objectives of a call: `service_tier`, `slo` and the SLO headers. The headers are those of
Kubernetes' inference gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from msgspec.structs import replace

from alignedserve.gateway.generation.call import Call, ServiceTier, Spec
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits.limits import MAX_TBT_MS, MAX_TTFT_MS, SloConfig
from alignedserve.process.logs import request_id
from alignedserve.protocol.messages import Request

TTFT_HEADER = "X-SLO-TTFT-MS"
TBT_HEADER = "X-SLO-TBT-MS"
TPOT_HEADER = "X-SLO-TPOT-MS"
# The tier, unless the body has one. Names that an operator has defined for other servers are ignored.
OBJECTIVE_HEADER = "X-Gateway-Inference-Objective"


def served(call: Call[Spec], headers: Mapping[str, str], defaults: SloConfig, owner: str) -> Call[Spec]:
    """Returns the call with the service that it gets. The body takes precedence over headers. `owner` is the owner of
    the call's API key (http/keys.py). Raises ApiError."""
    ttft_s = _seconds("slo.ttft_ms", call.ttft_ms, TTFT_HEADER, headers, MAX_TTFT_MS)
    tbt_header = TBT_HEADER if TBT_HEADER.lower() in headers else TPOT_HEADER
    tbt_s = _seconds("slo.tbt_ms", call.tbt_ms, tbt_header, headers, MAX_TBT_MS)
    asked = call.service_tier or _tier_of(headers.get(OBJECTIVE_HEADER.lower(), ""))
    if asked == "flex":
        if ttft_s is not None or tbt_s is not None:
            message = "slo: service_tier='flex' is best effort, which has no objectives"
            raise ApiError(400, message, param="slo")
        return best_effort(call, owner)
    tier: ServiceTier = "priority" if asked == "priority" else "default"
    request = _real_time(_of_owner(call.request, owner), ttft_s, tbt_s, defaults.of(tier))
    return replace(call, request=request, service_tier=tier)


def best_effort(
    call: Call[Spec], owner: str, deadline_s: float | None = None, is_pressed: bool = False
) -> Call[Spec]:
    """Returns the call as best effort, due as a whole at `deadline_s` if that is given: see messages.Request."""
    has_tokens = not call.request.is_embedding
    request = replace(
        _of_owner(call.request, owner),
        tier="be",
        deadline_s=deadline_s,
        is_pressed=is_pressed and has_tokens,
        # Lines of jobs have a deadline.
        has_next_turn=deadline_s is None and has_tokens,
    )
    return replace(call, request=request, service_tier="flex")


def _of_owner(request: Request, owner: str) -> Request:
    """Owners do not share KV, because the time to the first token would reveal whether another owner sent the same
    prompt."""
    salt = f"{owner} {request.cache_salt}" if owner else request.cache_salt
    return replace(request, owner=owner, cache_salt=salt, request_id=request_id.get() or "")


def _real_time(
    request: Request,
    ttft_s: float | None,
    tbt_s: float | None,
    defaults: tuple[float | None, float | None],
) -> Request:
    default_ttft_s, default_tbt_s = defaults
    names = [] if ttft_s is not None else ["ttft_s"]
    request = replace(request, ttft_s=default_ttft_s if ttft_s is None else ttft_s, slo_defaults=names)
    if request.is_embedding:
        # It has no tokens after the first.
        return request
    return replace(
        request,
        tbt_s=default_tbt_s if tbt_s is None else tbt_s,
        slo_defaults=names if tbt_s is not None else [*names, "tbt_s"],
        hurries=tbt_s is None,
        has_next_turn=True,
    )


def _tier_of(objective: str) -> ServiceTier | None:
    """Returns the tier with this name. None: there is none."""
    tiers = (tier for tier in get_args(ServiceTier) if tier == objective.strip().lower())
    return next(tiers, None)


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
