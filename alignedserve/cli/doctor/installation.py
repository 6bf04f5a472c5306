"""Python and packages, compared with the bounds in this package's metadata."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from alignedserve.cli.doctor.finding import Finding, fail, ok

_PACKAGE = "alignedserve"
_SHOWN = ("torch", "ray", "fastapi", "msgspec")


def check_python() -> Iterator[Finding]:
    yield python_finding(platform.python_version(), str(metadata(_PACKAGE)["Requires-Python"]))


def python_finding(found: str, wanted: str) -> Finding:
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return ok(found)
    return fail(f"{found}: must be {wanted}", f"a Python {wanted}")


def check_packages() -> Iterator[Finding]:
    yield packages_finding(requires(_PACKAGE) or [])


def packages_finding(lines: list[str]) -> Finding:
    """`lines` are requirements as in a package's metadata. Extras are left out."""
    wanted = [requirement for line in lines if _is_needed(requirement := Requirement(line))]
    if wrong := list(filter(None, map(_wrong, wanted))):
        return fail("; ".join(wrong), "pip install --upgrade alignedserve, or the packages named")
    return ok(f"{len(wanted)} as required: " + ", ".join(f"{name} {version(name)}" for name in _SHOWN))


def check_ray() -> Iterator[Finding]:
    # Ray is looked up by name: only the launcher and the actors' shells import it.
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        yield fail(f"Ray can't be imported: {error}", "pip install ray")
    else:
        yield ok(f"{ray.__version__} can be imported")


def _is_needed(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _wrong(requirement: Requirement) -> str | None:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    is_in = requirement.specifier.contains(found, prereleases=True)
    return None if is_in else f"{requirement.name} {found}: must be {requirement.specifier}"
