"""Checks of the HTTP server's address and API keys."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, counted, note, ok, warn
from alignedserve.gateway.http.keys import Keys, is_operator, owners_of
from alignedserve.launch.ports import check_address


def check_port(case: Case) -> Iterator[Finding]:
    host, port = case.settings.http.host, case.settings.http.port
    check_address(host, port)
    yield ok(f"{port} is free at {host}")


def check_access(case: Case) -> Iterator[Finding]:
    owners = owners_of(*case.settings.keys.lists)
    num_operators = sum(map(is_operator, owners.values()))
    if owners:
        counts = (len(owners) - num_operators, "API key"), (num_operators, "operator's key")
        yield ok(", ".join(counted(*each) for each in counts if each[0]))
        if Keys(owners).num_owners > 1 and not num_operators:
            yield warn("several owners of API keys: no key can read /metrics", "--operator-key-file")
    elif case.settings.http.is_on_loopback:
        yield note("no API keys: every user of this machine has access")
    else:
        yield warn(
            f"no API keys: every client that reaches {case.settings.http.host} has access", "--api-key-file"
        )
