"""Where webhooks are sent, and how often they are retried. The text beside a field is its help on the command line."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from alignedserve.gateway.webhooks.urls import check_url

SECRET_VARIABLE = "ALIGNEDSERVE_WEBHOOK_SECRET"
_PREFIX = "whsec_"
# Standard Webhooks asks for 24 to 64 bytes.
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64


@dataclass(frozen=True)
class WebhookConfig:
    url: Annotated[
        tuple[str, ...],
        "URL to notify when a batch or background response has ended; repeat for more",
        "batch",
    ] = ()
    allowed_urls: Annotated[
        tuple[str, ...], "prefix of URLs that a batch may name for its own webhook; repeat for more"
    ] = ()
    secret_file: Annotated[
        str | None, f"file of secrets that sign webhooks (whsec_…), one a line [default: ${SECRET_VARIABLE}]"
    ] = None
    allow_private: Annotated[bool, "allow webhooks to loopback, private and link-local addresses"] = False
    # The seconds that a try may take, from the look-up of the name to the status of the answer.
    try_s: float = 15.0
    # Seconds until a failed delivery is retried: first and longest delay. Each delay is three times the one before.
    retry_s: float = 5.0
    max_retry_s: float = 3600.0
    # Seconds after which a delivery is given up.
    give_up_s: float = 86400.0
    # seconds between two searches of the store for deliveries
    look_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("url", "allowed_urls"):
            for each in getattr(self, name):
                try:
                    check_url(each)
                except ValueError as error:
                    raise ValueError(f"webhook_{name}={each!r}: {error}") from None

    @property
    def is_used(self) -> bool:
        return bool(self.url or self.allowed_urls)

    def secrets(self, environment: Mapping[str, str]) -> tuple[bytes, ...]:
        """Returns the secrets, each of which signs. Raises ValueError."""
        if not self.is_used:
            return ()
        if self.secret_file is None:
            lines = environment.get(SECRET_VARIABLE, "").split()
            name = f"${SECRET_VARIABLE}"
        else:
            lines, name = _lines(self.secret_file), "webhook_secret_file"
        if not lines:
            raise ValueError(
                f"webhook_url, webhook_allowed_urls: need a webhook_secret_file or ${SECRET_VARIABLE}"
            )
        return tuple(_secret(line, name) for line in lines)


def _lines(file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"webhook_secret_file={file!r}: can't be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]


def _secret(text: str, name: str) -> bytes:
    # The message does not repeat the text, which may be a secret.
    try:
        secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith(_PREFIX) or not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"{name}: a secret must be {_PREFIX} and {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes in Base64"
        )
    return secret
