"""The address of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, note, ok, warn
from alignedserve.gateway.http.keys import owners_of
from alignedserve.launch.config import is_loopback
from alignedserve.launch.ports import check_address


def check_port(case: Case) -> Iterator[Finding]:
    host, port = case.serve.host, case.serve.port
    check_address(host, port)
    yield ok(f"{port} is free at {host}")


def check_access(case: Case) -> Iterator[Finding]:
    num_keys = len(owners_of(case.serve.api_key, case.serve.api_key_file))
    if num_keys:
        yield ok(f"{num_keys} API keys")
    elif is_loopback(case.serve.host):
        yield note("no API keys: whoever is on this machine may use it")
    else:
        yield warn(f"no API keys: whoever reaches {case.serve.host} may use it", "--api-key-file")
