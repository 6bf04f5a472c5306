"""What `pip install alignedserve` installs: a CycloneDX document, and a table of licences.

    uv tool run pip install --dry-run --ignore-installed --report REPORT -c requirements.lock 'WHEEL[otel,kuberay]'
    python -m deploy.sbom REPORT --out dist

pip resolves the packages and reads their metadata, and downloads none of those that the index has metadata of.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT_PACKAGE = "alignedserve"
EXTRAS = ("otel", "kuberay")
# Each of these classifiers means one licence; "BSD License" does not.
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
SPELLINGS = {"3-Clause BSD License": "BSD-3-Clause", "Apache 2.0": "Apache-2.0"}
NVIDIA = "LicenseRef-NVIDIA-Proprietary"


@dataclass
class Package:
    # as pip's report has it: https://packaging.python.org/specifications/core-metadata/, in JSON
    metadata: Mapping[str, Any]
    # of the file that is installed, if that is known
    sha256: str | None = None
    needs: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return canonicalize_name(self.metadata["name"])

    @property
    def version(self) -> str:
        return str(self.metadata["version"])

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version.replace('+', '%2B')}"

    @property
    def licence(self) -> str | None:
        """An SPDX expression; None if none can be told."""
        if known := settings()["known"].get(self.name):
            return str(known)
        for text in (self.metadata.get("license_expression"), self.metadata.get("license")):
            try:
                return str(canonicalize_license_expression(SPELLINGS.get(text or "", text or "")))
            except InvalidLicenseExpression:
                pass
        ends = [each.rpartition(" :: ")[2] for each in self.metadata.get("classifier", [])]
        found = {CLASSIFIERS[end] for end in ends if end in CLASSIFIERS}
        if not found and self.name.startswith(("nvidia-", "cuda-")):
            return NVIDIA
        return found.pop() if len(found) == 1 else None


@cache
def settings() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "licences.toml").read_text())


def read(report: Mapping[str, Any]) -> dict[str, Package]:
    """Returns the packages of a report of `pip install --report`, without those that nothing needs."""
    items = report["install"]
    packages = [
        Package(
            item["metadata"], item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        )
        for item in items
    ]
    return needed({each.name: each for each in packages}, report["environment"])


def needed(packages: Mapping[str, Package], environment: Mapping[str, str]) -> dict[str, Package]:
    """Returns the packages that ours needs, with what each needs. Raises ValueError if one is missing."""
    seen: set[tuple[str, str]] = set()
    found: dict[str, Package] = {}
    left = [(ROOT_PACKAGE, extra) for extra in ("", *EXTRAS)]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name not in packages:
            raise ValueError(f"{name}: is not among the packages")
        package = found.setdefault(name, packages[name])
        for each in map(Requirement, package.metadata.get("requires_dist", [])):
            if each.marker is None or each.marker.evaluate({**environment, "extra": extra}):
                other = canonicalize_name(each.name)
                package.needs |= {other} - {name}
                left += [(other, more) for more in ("", *each.extras)]
    return dict(sorted(found.items()))


def problems(packages: Mapping[str, Package]) -> Iterator[str]:
    for package in packages.values():
        if package.licence is None:
            yield f"{package.name} {package.version}: its metadata names no licence; see deploy/licences.toml"
            continue
        words = set(re.findall(r"[\w.+-]+", package.licence)) - {"AND", "OR", "WITH"}
        if other := sorted(words.difference(settings()["allowed"])):
            yield f"{package.name} {package.version}: {', '.join(other)} is not among the licences allowed"


def cyclonedx(packages: Mapping[str, Package]) -> dict[str, Any]:
    components = {name: component(package) for name, package in packages.items()}
    document = {
        "metadata": {"component": components.pop(ROOT_PACKAGE) | {"type": "application"}},
        "components": list(components.values()),
        "dependencies": [
            {"ref": package.purl, "dependsOn": [packages[name].purl for name in sorted(package.needs)]}
            for package in packages.values()
        ],
    }
    serial = uuid5(NAMESPACE_URL, json.dumps(document))
    head = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
    }
    return head | document


def component(package: Package) -> dict[str, Any]:
    said = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": [{"expression": package.licence}],
    }
    return said | ({"hashes": [{"alg": "SHA-256", "content": package.sha256}]} if package.sha256 else {})


def table(packages: Mapping[str, Package]) -> str:
    lines = [f"| {each.name} | {each.version} | {each.licence} |" for each in packages.values()]
    return "\n".join(["| package | version | licence |", "| --- | --- | --- |", *lines, ""])


def write(packages: Mapping[str, Package], folder: Path) -> list[Path]:
    """Writes both files. Raises ValueError if a licence is unknown or not allowed."""
    if found := list(problems(packages)):
        raise ValueError("\n".join(found))
    stem = f"{ROOT_PACKAGE}-{packages[ROOT_PACKAGE].version}"
    texts = {
        f"{stem}.cdx.json": json.dumps(cyclonedx(packages), indent=1) + "\n",
        f"{stem}.licences.md": table(packages),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes an SBOM and a table of licences.")
    parser.add_argument("report", type=Path, help="of pip install --dry-run --report")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args(arguments)
    for path in write(read(json.loads(options.report.read_text())), options.out):
        print(path)


if __name__ == "__main__":
    main()
