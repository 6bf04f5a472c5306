"""Makes what `benchmarks.gpu.first` needs on a bare machine without a package index.

    python -m benchmarks.gpu.prepare --python 3.12 --present packages.txt --out .gpu

DIR/site.tar.xz has the packages that alignedserve needs and that machine lacks, for its Python. (--present: names of
the packages it has, or the output of `pip list --format=freeze` there.) It leaves out what a server never loads: Ray's
libraries and Java, debug symbols. On that machine run `tar xf DIR/site.tar.xz -C SITE`, and put SITE and the tree in
PYTHONPATH. DIR/answers.json has the answers that `serves` compares with, computed in float32 on this CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.serves import write_answers

ROOT = Path(__file__).parents[2]
# torch and its dependencies have to be there already: they are gigabytes, and built for that machine's driver.
HEAVY = ("torch", "triton", "nvidia-", "cuda-", "transformers")
# Needed by the kernel tests.
TESTS = ("pytest", "pytest-xdist", "pytest-rerunfailures", "hypothesis", "trustme")
# Minor versions of glibc 2. If a package has wheels for several, the newest is taken.
GLIBCS = (39, 34, 31, 28, 27, 24, 17)
UNUSED = (
    *(f"ray/{name}" for name in ("jars", "rllib", "data", "tune", "train", "serve", "llm", "cpp", "include")),
    "ray/dashboard/client",
    # For S3, which is not used here.
    "obstore",
)


def needed() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in (*project["dependencies"], *TESTS) if not named(each).startswith(HEAVY)]


def named(requirement: str) -> str:
    return re.split(r"[ =<>!~;\[]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def missing(pinned: Sequence[str], present: Sequence[str]) -> list[str]:
    """Returns those of `pinned` (NAME==VERSION) that are missing there and can be brought along."""
    there = set(map(named, present))
    return [each for each in pinned if named(each) not in there and not named(each).startswith(HEAVY)]


def resolve(python: str) -> list[str]:
    """Returns everything needed there except torch, with versions, from pip's resolver. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile() as report:
        arguments = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", report.name]
        _pip(*arguments, "--target", "/nowhere", *_target(python), *needed())
        return _pins(Path(report.name).read_text())


def _pins(report: str) -> list[str]:
    found = (each["metadata"] for each in json.loads(report)["install"])
    return sorted(f"{each['name']}=={each['version']}" for each in found)


def bring(pinned: Sequence[str], python: str, site: Path) -> None:
    _pip("install", "--quiet", "--no-deps", "--no-compile", "--target", str(site), *_target(python), *pinned)
    for name in UNUSED:
        shutil.rmtree(site / name, ignore_errors=True)
    programs = [path for path in site.rglob("*") if path.is_file() and _is_program(path)]
    subprocess.run(["strip", "--strip-unneeded", *map(str, programs)], check=True)


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _target(python: str) -> list[str]:
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in GLIBCS]
    return ["--only-binary=:all:", "--python-version", python, "--platform=manylinux2014_x86_64", *platforms]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    write_answers(args.out)
    if args.python:
        present = args.present.read_text().split() if args.present else []
        with tempfile.TemporaryDirectory() as directory:
            site = Path(directory) / "site"
            bring(missing(resolve(args.python), present), args.python, site)
            packed = args.out.absolute() / "site.tar.xz"
            subprocess.run(["tar", "-I", "xz -T0", "-cf", packed, "-C", site, "."], check=True)
        print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", help="that machine's, such as 3.12 [default: no packages, only answers]")
    parser.add_argument("--present", type=Path, help="file with the names of what it has")
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
