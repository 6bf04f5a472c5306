"""The SBOM and the licences: of what is installed here, and of reports of pip."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.markers import default_environment
from packaging.metadata import parse_email

from deploy import sbom


def item(metadata: dict[str, Any], sha256: str | None = None) -> dict[str, Any]:
    hashes = {"archive_info": {"hashes": {"sha256": sha256}}} if sha256 else {}
    return {"metadata": metadata, "download_info": {"url": "https://example.org/x.whl", **hashes}}


def report(*items: dict[str, Any]) -> dict[str, Any]:
    return {"version": "1", "install": list(items), "environment": dict(default_environment())}


def installed() -> list[dict[str, Any]]:
    def each(text: str) -> dict[str, Any]:
        raw: dict[str, Any] = dict(parse_email(text)[0])
        return raw | {"classifier": raw.get("classifiers", [])}

    return [item(each(text)) for one in distributions() if (text := one.read_text("METADATA"))]


OURS = {"name": "alignedserve", "version": "0.1.0", "license_expression": "Apache-2.0"}


def test_all_that_is_installed_here_has_a_licence_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # of `kuberay`, the dashboard's packages are not installed here
    monkeypatch.setattr(sbom, "EXTRAS", ("otel",))
    packages = sbom.read(report(*installed()))
    assert {"torch", "ray", "fastapi", "opentelemetry-sdk"} <= packages.keys()
    assert not {"pytest", "transformers", "mypy"} & packages.keys()
    assert list(sbom.problems(packages)) == []


def test_the_document_is_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sbom, "EXTRAS", ())
    packages = sbom.read(report(*installed()))
    packages["torch"].sha256 = "ab" * 32
    document, licences = sbom.write(packages, tmp_path)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(document.read_text()) is None
    found = json.loads(document.read_text())
    refs = {found["metadata"]["component"]["bom-ref"], *(each["bom-ref"] for each in found["components"])}
    assert {each["ref"] for each in found["dependencies"]} == refs
    assert {other for each in found["dependencies"] for other in each["dependsOn"]} < refs
    [torch] = [each for each in found["components"] if each["name"] == "torch"]
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert len(licences.read_text().splitlines()) == 2 + len(packages)


@pytest.mark.parametrize(
    "metadata,licence",
    [
        ({"license_expression": "MIT"}, "MIT"),
        ({"license": "apache-2.0"}, "Apache-2.0"),
        ({"license": "Apache 2.0", "classifier": ["License :: Other/Proprietary License"]}, "Apache-2.0"),
        ({"license": "Copyright X\n...", "classifier": ["License :: OSI Approved :: MIT License"]}, "MIT"),
        ({"classifier": ["License :: OSI Approved :: BSD License"]}, None),
        ({"license": "see LICENSE"}, None),
        ({}, None),
        ({"name": "jinja2"}, "BSD-3-Clause"),
        # CUDA's libraries name NVIDIA's terms, or none
        ({"name": "nvidia-cufile", "license": "LicenseRef-NVIDIA-Proprietary"}, sbom.NVIDIA),
        ({"name": "cuda-toolkit"}, sbom.NVIDIA),
        ({"name": "cuda-pathfinder", "license_expression": "Apache-2.0"}, "Apache-2.0"),
    ],
)
def test_a_licence_is_read_from_metadata(metadata: dict[str, Any], licence: str | None) -> None:
    assert sbom.Package({"name": "x", "version": "1", **metadata}).licence == licence


@pytest.mark.parametrize(
    "licence,problem",
    [
        ("MIT AND Apache-2.0 WITH LLVM-exception", None),
        ("AGPL-3.0-only", "x 1: AGPL-3.0-only is not among the licences allowed"),
        ("MIT AND GPL-3.0-or-later", "x 1: GPL-3.0-or-later is not among the licences allowed"),
        ("who knows", "x 1: its metadata names no licence; see deploy/licences.toml"),
    ],
)
def test_others_are_refused(licence: str, problem: str | None, tmp_path: Path) -> None:
    ours = item(OURS | {"requires_dist": ["x"]})
    packages = sbom.read(report(ours, item({"name": "x", "version": "1", "license": licence})))
    assert list(sbom.problems(packages)) == ([problem] if problem else [])
    if problem:
        with pytest.raises(ValueError, match=problem):
            sbom.write(packages, tmp_path)


def test_what_nothing_needs_is_left_out_and_what_is_missing_is_an_error() -> None:
    needs = ["a[fast]", 'b; extra == "otel"', 'c; sys_platform == "win32"', 'd; extra == "dev"']
    a = {"name": "A", "version": "1", "license": "MIT", "requires_dist": ['e; extra == "fast"']}
    items = [item(OURS | {"requires_dist": needs}), item(a)]
    items += [item({"name": name, "version": "1", "license": "MIT"}) for name in "bcde"]
    packages = sbom.read(report(*items))
    assert list(packages) == ["a", "alignedserve", "b", "e"]
    assert packages["alignedserve"].needs == {"a", "b"} and packages["a"].needs == {"e"}
    with pytest.raises(ValueError, match="e: is not among the packages"):
        sbom.read(report(*items[:-1]))


def test_it_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report(item(OURS, "ab" * 32))))
    sbom.main([str(tmp_path / "report.json"), "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "alignedserve-0.1.0.cdx.json"),
        str(tmp_path / "alignedserve-0.1.0.licences.md"),
    ]
