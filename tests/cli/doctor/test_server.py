"""What `doctor --url` reports about a server with incomplete answers."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.cli.doctor.server import what_is_wrong


@pytest.mark.parametrize(
    ("health", "said"),
    [
        ({"down": ["decode-0", "decode-1"]}, "decode-0, decode-1 down"),
        ({"store": "down", "reason": "batches wait"}, "batches wait"),
        (
            {"missing": ["1 of 2 islands are there", "node-1 is slow"]},
            "1 of 2 islands are there; node-1 is slow",
        ),
        (
            {"down": ["decode-0"], "files": "down", "reason": "files answer 503", "missing": ["none"]},
            "decode-0 down; files answer 503; none",
        ),
    ],
)
def test_a_degraded_server_says_what_is_wrong(health: dict[str, Any], said: str) -> None:
    assert what_is_wrong({"status": "degraded"} | health) == said
