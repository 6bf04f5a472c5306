"""An environment for each client, below .clients: `make clients` makes them, and is quick the second time.

    python -m tests.clients.environments [make|lock] [NAME...]

Versions are pinned: those of Python in environments/NAME.txt, which `lock` writes from NAME.in, those of Node in
environments/NAME/package-lock.json. What is large, and the same here, is the one that this server runs with.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = ROOT / ".clients"
PINS = Path(__file__).parent / "environments"
# the seconds before each further attempt: a registry may be slow for a moment
WAITS_S = (5, 20, 60)
# Packages that the environment of the server has too; only a client that asks for one of them sees that environment.
SHARED = re.compile(r"(torch|triton|ray|nvidia-(?!ml).*|cuda-.*)==")


def python_of(name: str) -> Path:
    return _made(name) / "bin/python"


def command_of(name: str, command: str) -> Path:
    """`name`: of an environment of Python."""
    return _made(name) / "bin" / command


def modules_of(name: str) -> Path:
    """The packages of an environment of Node."""
    return _made(name) / "node_modules"


def _made(name: str) -> Path:
    """A developer may have none; in CI that is a failure."""
    directory = MADE / name
    if not _is_made(directory, name):
        message = f"no environment for {name}: run `make clients`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return directory


# ---- making ---------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    return sorted({path.stem for path in PINS.iterdir()})


def make(name: str) -> None:
    directory = MADE / name
    if _is_made(directory, name):
        return
    shutil.rmtree(directory, ignore_errors=True)
    if (PINS / name).is_dir():
        _make_node(directory, PINS / name)
    else:
        _make_python(directory, PINS / f"{name}.txt")
    (directory / "pins").write_text(_pins(name))
    print(f"{name}: {directory}", flush=True)


def _make_python(directory: Path, requirements: Path) -> None:
    _run("uv", "venv", "-q", "--python", sys.executable, str(directory))
    into = ("--python", str(directory / "bin/python"))
    _run("uv", "pip", "install", "-q", "--no-deps", *into, "-r", str(requirements))
    if any(line.startswith("# shared:") for line in requirements.read_text().splitlines()):
        packages = next(directory.glob("lib/*/site-packages"))
        ours = [path for path in sys.path if path.endswith("site-packages")]
        # its own packages come first
        (packages / "shared.pth").write_text("\n".join(ours) + "\n")


def _make_node(directory: Path, pins: Path) -> None:
    directory.mkdir(parents=True)
    for file in pins.iterdir():
        shutil.copy(file, directory)
    _run("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(directory))


def lock(name: str) -> None:
    source = PINS / f"{name}.in"
    if not source.exists():
        return
    options = ("-q", "--python-version", "3.11", "--no-header", "--no-annotate", "--no-emit-index-url")
    command = [_found("uv"), "pip", "compile", *options, str(source)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    shared = [line for line in found if SHARED.match(line)]
    own = [line for line in found if line not in shared]
    head = [f"# shared: {', '.join(line.split('==')[0] for line in shared)}"] if shared else []
    (PINS / f"{name}.txt").write_text("\n".join([*head, *own]) + "\n")


def _run(*command: str) -> None:
    """Raises CalledProcessError when it fails each time."""
    program = [_found(command[0]), *command[1:]]
    for wait_s in WAITS_S:
        if subprocess.run(program).returncode == 0:
            return
        print(f"{command[0]} failed; once more in {wait_s} s", file=sys.stderr, flush=True)
        time.sleep(wait_s)
    subprocess.run(program, check=True)


def _found(command: str) -> str:
    """Those of the environment that this runs in come first."""
    beside = Path(sys.executable).parent / command
    return str(beside) if beside.exists() else command


def _is_made(directory: Path, name: str) -> bool:
    stamp = directory / "pins"
    return stamp.exists() and stamp.read_text() == _pins(name)


def _pins(name: str) -> str:
    """Tells environments of other pins, or of another Python, apart from those that are wanted."""
    node = PINS / name
    files = sorted(node.iterdir()) if node.is_dir() else [PINS / f"{name}.txt"]
    content = b"".join(file.read_bytes() for file in files)
    return f"{sys.version_info[:2]} {hashlib.sha256(content).hexdigest()}"


def main(arguments: Sequence[str]) -> None:
    command, *only = arguments or ["make"]
    for name in only or names():
        {"make": make, "lock": lock}[command](name)


if __name__ == "__main__":
    main(sys.argv[1:])
