"""An environment for each client, for Helm, and for real weights, in the user's cache. `make clients` makes them, and
is quick the second time.

    python -m tests.clients.environments [make|lock] [NAME...]

Versions are pinned: for Python in environments/NAME.txt, which `lock` generates from NAME.in, and for Node in
environments/NAME/package-lock.json. Large packages that this server also uses are shared with its environment.

An environment's directory is NAME-HASH, with a hash of its pins and its Python or Node, so checkouts on one machine
share it. ALIGNEDSERVE_CLIENTS_DIR sets another place for these directories. One exists either completely or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
# Absolute, since clients run in other directories.
MADE = Path(os.environ.get("ALIGNEDSERVE_CLIENTS_DIR") or CACHE / "alignedserve-clients").absolute()
PINS = Path(__file__).parent / "environments"
# Made at the same time, because they wait for a registry and a disk.
NUM_AT_ONCE = 3
# Seconds since its last use after which another environment with the same name is removed.
KEPT_S = 14 * 24 * 3600.0
# Seconds before each further attempt, because a registry may be slow for a moment.
WAITS_S = (5, 20, 60)
# Packages that the server's environment also has. Only a client that requires one of them can see that environment.
SHARED = re.compile(r"(torch|triton|ray|nvidia-(?!ml).*|cuda-.*)==")


def python_of(name: str) -> Path:
    return _made(name) / "bin/python"


def command_of(name: str, command: str) -> Path:
    """`name`: the name of a Python environment."""
    return _made(name) / "bin" / command


def packages_of(name: str) -> Path:
    """Returns the packages of a Python environment."""
    (found,) = _made(name).glob("lib/*/site-packages")
    return found


def modules_of(name: str) -> Path:
    """Returns the packages of a Node environment."""
    return _made(name) / "node_modules"


def shared_packages() -> dict[str, str]:
    """Returns the variable through which environments find the shared packages in the server's environment."""
    return {"SHARED_PACKAGES": os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))}


def variables_of(url: str, home: Path) -> dict[str, str]:
    """Returns the environment variables of a client for the server at `url`, with few of this process's own."""
    known = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {"BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "HOME": str(home)}
    return known | own | shared_packages()


def _made(name: str) -> Path:
    """A developer may lack it; in CI that is a failure."""
    directory = directory_of(name)
    if not directory.exists():
        message = f"no environment for {name}: run `make clients`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    _mark_used(directory)
    return directory


# ---- making ---------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    return sorted({path.stem for path in PINS.iterdir()})


def make_all(names: Sequence[str]) -> None:
    """Raises the first failure after all have ended."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        for _ in threads.map(make, names):
            pass


def make(name: str) -> None:
    directory = directory_of(name)
    if not directory.exists():
        MADE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MADE, prefix=f"{name}-", suffix=".part") as part:
            new = Path(part) / "environment"
            if (PINS / name).is_dir():
                _make_node(new, PINS / name)
            else:
                _make_python(new, PINS / f"{name}.txt")
            _move(new, directory)
        print(f"{name}: {directory}", flush=True)
    _mark_used(directory)
    remove_unused(name)


def _mark_used(directory: Path) -> None:
    # Another user's directory can't be marked, and is not removed by this user either.
    with contextlib.suppress(PermissionError):
        os.utime(directory)


def _move(new: Path, directory: Path) -> None:
    try:
        new.rename(directory)
    except OSError:
        # Another checkout has made it meanwhile.
        if not directory.exists():
            raise


def remove_unused(name: str) -> None:
    """Removes environments with other pins, and incomplete ones, once they have not been used for some days."""
    for other in MADE.glob(f"{name}-*"):
        of_this_name = re.fullmatch(rf"{name}-([0-9a-f]{{12}}|\w+\.part)", other.name)
        if of_this_name and other != directory_of(name):
            # Another checkout may remove it at the same time.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - other.stat().st_mtime > KEPT_S:
                    _remove(other, name)


def _remove(directory: Path, name: str) -> None:
    """It is renamed first, so that a partly removed one is never taken for complete."""
    with tempfile.TemporaryDirectory(
        dir=MADE, prefix=f"{name}-", suffix=".part", ignore_cleanup_errors=True
    ) as part:
        directory.rename(Path(part) / "environment")


def _make_python(directory: Path, requirements: Path) -> None:
    # Relocatable, because it is made elsewhere and then moved.
    _run("uv", "venv", "-q", "--relocatable", "--python", sys.executable, str(directory))
    into = ("--python", str(directory / "bin/python"))
    _run("uv", "pip", "install", "-q", "--no-deps", *into, "-r", str(requirements))
    if any(line.startswith("# shared:") for line in requirements.read_text().splitlines()):
        (packages,) = directory.glob("lib/*/site-packages")
        # Its own packages come first. A line that begins with `import` is executed.
        (packages / "shared.pth").write_text(
            "import os, sys; sys.path.extend(filter(None, os.getenv('SHARED_PACKAGES', '').split(os.pathsep)))\n"
        )


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
    alone = ["--no-deps"] if source.read_text().startswith("# without its dependencies") else []
    command = [_found("uv"), "pip", "compile", *options, *alone, str(source)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    shared = [line for line in found if SHARED.match(line)]
    own = [line for line in found if line not in shared]
    head = [f"# shared: {', '.join(line.split('==')[0] for line in shared)}"] if shared else []
    (PINS / f"{name}.txt").write_text("\n".join([*head, *own]) + "\n")


def _run(*command: str) -> None:
    """Raises CalledProcessError if all attempts fail."""
    program = [_found(command[0]), *command[1:]]
    for wait_s in WAITS_S:
        if subprocess.run(program).returncode == 0:
            return
        print(f"{command[0]} failed; once more in {wait_s} s", file=sys.stderr, flush=True)
        time.sleep(wait_s)
    subprocess.run(program, check=True)


def _found(command: str) -> str:
    """Prefers commands of the environment that this runs in."""
    beside = Path(sys.executable).parent / command
    return str(beside) if beside.exists() else command


def directory_of(name: str) -> Path:
    """Returns a different directory for different pins, and for a different Python or Node."""
    is_node = (PINS / name).is_dir()
    files = sorted((PINS / name).iterdir()) if is_node else [PINS / f"{name}.txt"]
    runtime = _node_version() if is_node else f"{sys.base_prefix} {sys.version}"
    content = b"".join([runtime.encode(), *(file.read_bytes() for file in files)])
    return MADE / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"


def _node_version() -> str:
    """Compiled modules depend on the version. Returns an empty string without Node."""
    node = shutil.which(_found("node"))
    asked = [str(node), "-p", "`${process.version} ${process.platform} ${process.arch}`"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout if node else ""


def main(arguments: Sequence[str]) -> None:
    command, *only = arguments or ["make"]
    if command == "make":
        make_all(only or names())
    elif command == "lock":
        for name in only or names():
            lock(name)
    else:
        sys.exit(f"{command} is neither make nor lock")


if __name__ == "__main__":
    main(sys.argv[1:])
