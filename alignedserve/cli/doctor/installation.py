"""Checks of Python and packages against the requirements in this package's metadata."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from alignedserve.cli.doctor.finding import Finding, fail, ok
from alignedserve.launch.settings import Settings

_PACKAGE = "alignedserve"
_SHOWN = ("torch", "ray", "fastapi", "msgspec")


def check_python() -> Iterator[Finding]:
    yield python_finding(platform.python_version(), str(metadata(_PACKAGE)["Requires-Python"]))


def python_finding(found: str, wanted: str) -> Finding:
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return ok(found)
    return fail(f"{found}: must be {wanted}", f"install Python {wanted}")


def check_packages() -> Iterator[Finding]:
    yield packages_finding(requires(_PACKAGE) or [])


def packages_finding(lines: list[str]) -> Finding:
    """Checks requirements, which are lines of a package's metadata. Those of extras are skipped."""
    wanted = [requirement for line in lines if _is_needed(requirement := Requirement(line))]
    if wrong := list(filter(None, map(_wrong, wanted))):
        return fail("; ".join(wrong), "pip install --upgrade alignedserve, or these packages")
    return ok(f"{len(wanted)} as required: " + ", ".join(f"{name} {version(name)}" for name in _SHOWN))


def check_ray() -> Iterator[Finding]:
    # Imported by name: only the launcher may import Ray.
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        yield fail(f"Ray can't be imported: {error}", "pip install ray")
    else:
        yield ok(f"{ray.__version__} can be imported")


def check_extras(settings: Settings) -> Iterator[Finding]:
    """Checks the optional packages that the settings need."""
    wanted = {
        "otel": (settings.http.otlp_endpoint is not None, "--otlp-endpoint"),
        "sentence": (settings.lengths.predictor == "sentence", "--length-predictor sentence"),
    }
    for extra, (is_wanted, flag) in wanted.items():
        if is_wanted:
            yield extra_finding(requires(_PACKAGE) or [], extra, flag)


def extra_finding(lines: list[str], extra: str, flag: str) -> Finding:
    """Checks the requirements of an extra, which a flag needs."""
    wanted = [
        requirement
        for line in lines
        if not _is_needed(requirement := Requirement(line)) and _is_needed(requirement, extra)
    ]
    if wrong := list(filter(None, map(_wrong, wanted))):
        return fail(f"{flag}: {'; '.join(wrong)}", f"pip install 'alignedserve[{extra}]'")
    return ok(f"{flag}: the packages of alignedserve[{extra}] are installed")


def _is_needed(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _wrong(requirement: Requirement) -> str | None:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    is_in = requirement.specifier.contains(found, prereleases=True)
    return None if is_in else f"{requirement.name} {found}: must be {requirement.specifier}"
