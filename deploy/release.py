"""All of a release up to the button: checks, the sdist, the wheels, an SBOM, licences and sums, in dist/.

`make release` runs it, and `make release DRY=1` rehearses it in build/rehearsal. docs/guides/releasing.md says
what a person does before and after it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from packaging.metadata import Metadata

import alignedserve
from deploy import sbom
from hatch_build import repository_of

ROOT = Path(__file__).parents[1]
DIST, REHEARSAL = ROOT / "dist", ROOT / "build/rehearsal"
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
# PyPI's limit of a file, if nobody has asked it for more
MAX_BYTES = 100_000_000


def problems_of_the_tree(root: Path) -> Iterator[str]:
    if run("git", "status", "--porcelain", cwd=root):
        yield "the tree has changes that are not committed"
    heading = rf"^## \[{re.escape(alignedserve.__version__)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        yield f"CHANGELOG.md: needs a heading `## [{alignedserve.__version__}] - YYYY-MM-DD`"
    if not repository_of(root):
        yield "docs/site/site.toml: `repository` is empty, and the metadata has links to it"


def build(root: Path, out: Path, compilers: Mapping[str, str]) -> list[Path]:
    """Builds the sdist, and from it a wheel without kernels and one for each compiler, with kernels of the levels."""
    hatchling(root, out, "sdist")
    with TemporaryDirectory() as folder:
        [sdist] = out.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        [unpacked] = Path(folder).iterdir()
        hatchling(unpacked, out, "wheel")
        for compiler, levels in compilers.items():
            hatchling(unpacked, out, "wheel", CXX=compiler, ALIGNEDSERVE_KERNELS=levels)
    return sorted(out.iterdir())


def hatchling(project: Path, out: Path, target: str, **environment: str) -> None:
    kernels = f" with kernels by {environment['CXX']}, which takes minutes" if environment else ""
    print(f"Building the {target}{kernels}", flush=True)
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out), cwd=project, **environment)


def problems_of(file: Path) -> Iterator[str]:
    """Yields what an index would refuse, or show wrong."""
    metadata = Metadata.from_email(metadata_of(file), validate=True)
    if str(metadata.version) != alignedserve.__version__:
        yield f"{file.name}: is version {metadata.version}"
    if not metadata.project_urls:
        yield f"{file.name}: has no project URLs"
    if relative := re.search(r"\]\((?![a-z]+:|#)[^)]*\)", metadata.description or ""):
        yield f"{file.name}: its description has a relative link: {relative[0]}"
    if file.stat().st_size > MAX_BYTES:
        yield f"{file.name}: has {file.stat().st_size} bytes, and PyPI takes {MAX_BYTES}"
    if "-linux_" in file.name:
        yield f"{file.name}: needs a newer C or C++ library than a published wheel may: build on Debian 12"


def metadata_of(file: Path) -> bytes:
    if file.suffix == ".whl":
        with ZipFile(file) as archive:
            [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
            return archive.read(name)
    with tarfile.open(file) as archive:
        found = archive.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert found is not None
        return found.read()


def report(wheel: Path, root: Path) -> dict[str, object]:
    """Returns what pip would install with this wheel. The pip of an environment may be too old to read licences."""
    print("Reading the licences of all dependencies", flush=True)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        pip = ["uv", "tool", "run", "--python", sys.executable, "pip"]
        options = [
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(file),
            "-c",
            "requirements.lock",
        ]
        run(*pip, "install", *options, f"{wheel}[{','.join(sbom.EXTRAS)}]", cwd=root)
        found: dict[str, object] = json.loads(file.read_text())
        return found


def sums(files: list[Path]) -> str:
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def show(problems: Iterator[str]) -> None:
    for each in problems:
        print(f"A release would stop here: {each}", flush=True)


def stop_at(problems: Iterator[str]) -> None:
    if found := list(problems):
        sys.exit("\n".join(found))


def main(arguments: Sequence[str]) -> None:
    asked = parsed(arguments)
    compilers = [COMPILERS[each] for each in asked.only or COMPILERS]
    missing = (f"{each} is not installed" for each in compilers if not shutil.which(each))
    # A rehearsal shows them all and goes on.
    check = show if asked.dry_run else stop_at
    check(each for found in (missing, problems_of_the_tree(ROOT)) for each in found)
    out = REHEARSAL if asked.dry_run else DIST
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    files = build(ROOT, out, {} if asked.dry_run else dict.fromkeys(compilers, "all"))
    check(each for file in files for each in problems_of(file))
    # pip installs one here. All wheels have the same dependencies.
    wheel = next(file for file in files if file.name.endswith(("none-any.whl", "x86_64.whl")))
    files += sbom.write(sbom.read(report(wheel, ROOT)), out)
    (out / "SHA256SUMS").write_text(sums(files))
    for file in files:
        print(f"{file.stat().st_size:10,} bytes  {file.name}")
    print("This was a rehearsal" if asked.dry_run else "Next: docs/guides/releasing.md")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make release")
    parser.add_argument(
        "--only", action="append", choices=[*COMPILERS], help="build kernels for this machine only"
    )
    parser.add_argument("--dry-run", action="store_true", help="build no kernels, and stop at no problem")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
