"""The address of the HTTP endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, fail, note, ok, warn
from alignedserve.gateway.keys import digests_of
from alignedserve.launch.config import is_loopback
from alignedserve.launch.ports import is_free


def check_port(case: Case) -> Iterator[Finding]:
    host, port = case.serve.host, case.serve.port
    try:
        free = is_free(host, port)
    except OSError as error:
        yield fail(
            f"{host}, port {port}: {error.strerror}", "an address of this machine, a port from 1024 on"
        )
        return
    if free:
        yield ok(f"{port} is free at {host}")
    else:
        yield fail(f"{port}: another program listens on it at {host}", "another --port, or stop that one")


def check_access(case: Case) -> Iterator[Finding]:
    num_keys = len(digests_of(case.serve.api_key, case.serve.api_key_file))
    if num_keys:
        yield ok(f"{num_keys} API keys")
    elif is_loopback(case.serve.host):
        yield note("no API keys: whoever is on this machine may use it")
    else:
        yield warn(f"no API keys: whoever reaches {case.serve.host} may use it", "--api-key-file")
