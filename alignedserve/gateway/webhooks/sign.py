"""Signatures of Standard Webhooks, which OpenAI's clients check."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence


def signed_headers(event_id: str, now: float, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """Returns the headers. Each secret signs, because a receiver may have the older or the newer one."""
    text = f"{event_id}.{int(now)}.".encode() + body
    signatures = [
        base64.b64encode(hmac.new(each, text, hashlib.sha256).digest()).decode() for each in secrets
    ]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": " ".join(f"v1,{each}" for each in signatures),
    }
