"""What hatchling does beside pyproject.toml: kernels in the wheel, and links that work outside the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PREBUILT = "alignedserve/kernels/cpu/prebuilt"
# The newest symbols of glibc, libstdc++ and libgcc that a system has of which this tag is true (PEP 600).
MANYLINUX_2_34 = {"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "11.0"}


class Kernels(BuildHookInterface[Any]):
    """Puts kernels into the wheel if $ALIGNEDSERVE_KERNELS is `all`, or names levels: `x86-64-v3,x86-64-v4`.

    The wheel is then for one machine. $CXX may be a compiler for another one.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("ALIGNEDSERVE_KERNELS")
        if not wanted or version == "editable":
            return
        sys.path.insert(0, self.root)
        from alignedserve.kernels.cpu.build import find_compiler, prebuild
        from alignedserve.kernels.cpu.levels import LEVELS

        compiler = find_compiler()
        machine = subprocess.check_output([compiler, "-dumpmachine"], text=True).partition("-")[0]
        names = list(LEVELS[machine]) if wanted == "all" else wanted.split(",")
        # kept until the wheel is written
        self.folder = TemporaryDirectory()
        paths = [prebuild(name, LEVELS[machine][name], Path(self.folder.name)) for name in names]
        build_data["force_include"] |= {str(path): f"{PREBUILT}/{path.name}" for path in paths}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(paths, machine)}"


def platform_of(libraries: list[Path], machine: str) -> str:
    """Returns the platform's tag: manylinux_2_34, unless the libraries need something newer than it has."""
    texts = [path.read_text(encoding="latin-1") for path in libraries]
    needed = {found for text in texts for found in re.findall(r"\0([A-Z]+)_([0-9.]+)(?=\0)", text)}
    newer = [
        f"{name}_{version}"
        for name, version in needed
        if name in MANYLINUX_2_34 and number(version) > number(MANYLINUX_2_34[name])
    ]
    if newer:
        print(f"not manylinux_2_34, since the kernels need {', '.join(sorted(newer))}", file=sys.stderr)
    return f"{'linux' if newer else 'manylinux_2_34'}_{machine}"


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class Links(MetadataHookInterface):
    """Adds the project's URLs, and makes links of the README absolute, if the repository's URL is known."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        if repository := repository_of(Path(self.root)):
            home = home_of(repository)
            metadata["urls"] = {
                "Source": home,
                "Documentation": f"{repository}/docs/quickstart.md",
                "Changelog": f"{repository}/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
            text = absolute(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def repository_of(root: Path) -> str:
    """Returns the URL of the repository's files, up to their paths; empty if it is not known."""
    settings = root / "docs/site/site.toml"
    known = tomllib.loads(settings.read_text())["repository"] if settings.exists() else ""
    return (os.environ.get("DOCS_REPOSITORY") or known).rstrip("/")


def home_of(repository: str) -> str:
    """Returns the URL that `git clone` takes."""
    return re.split(r"/(?:-/)?(?:blob|src)/", repository)[0]


def absolute(text: str, repository: str) -> str:
    raw = re.sub(r"/blob/", "/raw/", repository)
    text = text.replace("REPOSITORY_URL", home_of(repository))
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\g<1>{raw}/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?![a-z]+:|#)", rf"\g<1>{repository}/", text)
