"""Checks of the HTTP server's address and API keys."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, counted, note, ok, warn
from alignedserve.gateway.http.keys import owners_of
from alignedserve.launch.ports import check_address


def check_port(case: Case) -> Iterator[Finding]:
    host, port = case.settings.http.host, case.settings.http.port
    check_address(host, port)
    yield ok(f"{port} is free at {host}")


def check_access(case: Case) -> Iterator[Finding]:
    num_keys = len(owners_of(*case.settings.keys.lists))
    if num_keys:
        yield ok(counted(num_keys, "API key"))
    elif case.settings.http.is_on_loopback:
        yield note("no API keys: every user of this machine has access")
    else:
        yield warn(
            f"no API keys: every client that reaches {case.settings.http.host} has access", "--api-key-file"
        )
