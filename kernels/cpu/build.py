"""Finds csrc/ as one shared library, or compiles it, once per machine and version of the sources.

A wheel may hold libraries for levels of processors (`levels.py`). One of them is used if the sources have no faster
code for this CPU, or if a faster library can't be compiled and loaded.

A compiled library is in a cache folder. Its name is a hash of everything that its code depends on: sources, flags,
compiler and the CPU's features. It is built for exactly this CPU, or for the one that $ALIGNEDSERVE_CPU names. One
process builds at a time, and the others use what it built. Where the cache can't be locked, several may build at once:
each works in its own folder, and the last rename wins, with the same contents.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from alignedserve.kernels.cpu.levels import LEVELS, Level, best, is_all

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
PREBUILT_DIR = Path(__file__).parent / "prebuilt"

FLAGS = (
    "-std=c++20",
    "-O3",
    # No contraction: a multiplication and an addition are fused only if the source does so explicitly.
    "-ffp-contract=off",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wno-psabi",
)


class NoCompiler(RuntimeError):
    """There is no C++ compiler on this machine."""


class BuildFailed(RuntimeError):
    """The compiler failed. The message is the compiler's."""


def cache_dir() -> Path:
    chosen = os.environ.get("ALIGNEDSERVE_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "alignedserve"


def find_compiler() -> str:
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return path
    tried = f"$CXX ({chosen})" if chosen else "g++, clang++ and c++"
    raise NoCompiler(
        f"the CPU kernels need a C++20 compiler; tried {tried}. "
        "Install one (Debian, Ubuntu: apt-get install g++) or name it in $CXX"
    )


def build(path: Path, again: bool = False) -> Path:
    """Compiles the library into `path` if it is not there, or `again`, and returns the path. Raises NoCompiler or
    BuildFailed."""
    try:
        if again or not path.exists():
            compiler = find_compiler()
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
                raise BuildFailed(
                    f"the CPU kernels can't be loaded from {path.parent}, which is on a file system mounted noexec. "
                    "Set $ALIGNEDSERVE_CACHE_DIR to a folder on another one"
                )
            with (
                _locked(path.parent),
                tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder,
            ):
                if again or not path.exists():
                    logger.warning("Compiling the CPU kernels into %s: once, in a minute or two", path.parent)
                    os.replace(_compile(compiler, _flags(), Path(folder)), path)
    except OSError as error:
        raise BuildFailed(
            f"the CPU kernels can't be stored in {path.parent}: {error}. "
            "Set $ALIGNEDSERVE_CACHE_DIR to a writable folder"
        ) from error
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems lock no folders.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def library_path() -> Path:
    """Returns the path of the fastest library for this CPU. One that has to be compiled may not exist yet. Raises
    NoCompiler if there is none and no compiler."""
    path, is_fastest = _prebuilt()
    if path and is_fastest:
        return path
    return cache_dir() / f"cpu-kernels-{_fingerprint(find_compiler(), _flags())}.so"


def prebuilt() -> Path | None:
    """Returns the path of the wheel's fastest library that this CPU can run; None if the wheel has none."""
    return _prebuilt()[0]


def prebuild(name: str, level: Level, folder: Path) -> Path:
    """Compiles the library of a level into `folder`, under the name by which `library_path` finds it."""
    path = folder / f"{_digest_of_sources().hexdigest()[:12]}-{name}.so"
    with tempfile.TemporaryDirectory() as objects:
        # without symbols, which nothing reads
        shutil.move(_compile(find_compiler(), [*FLAGS, *level.flags], Path(objects), "-Wl,-s"), path)
    return path


def _prebuilt() -> tuple[Path | None, bool]:
    """Returns the wheel's library for this CPU, if it has one, and whether a compiler could make no faster one."""
    machine, begin = platform.machine(), _digest_of_sources().hexdigest()[:12] + "-"
    paths = {path.stem.removeprefix(begin): path for path in PREBUILT_DIR.glob(f"{begin}*.so")}
    if wanted := os.environ.get("ALIGNEDSERVE_CPU"):
        return paths.get(wanted), True
    features = set(cpu_features().split())
    name = best(paths, machine, features)
    return (paths[name], is_all(LEVELS[machine][name], features)) if name else (None, False)


def _flags() -> list[str]:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    wanted = os.environ.get("ALIGNEDSERVE_CPU", "native")
    return [*FLAGS, f"-march={wanted}" if is_x86 else f"-mcpu={wanted}"]


def _fingerprint(compiler: str, flags: list[str]) -> str:
    digest = _digest_of_sources()
    for text in (*flags, _run([compiler, "--version"]), cpu_features()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def _digest_of_sources() -> hashlib._Hash:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest


def cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, flags: list[str], folder: Path, *link_flags: str) -> Path:
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *flags, "-c", str(source), "-o", str(object_)]
        for source, object_ in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        list(threads.map(_run, commands))
    library = folder / "library.so"
    _run([compiler, "-shared", "-pthread", *link_flags, *map(str, objects), "-o", str(library)])
    with library.open("rb") as file:
        # Without this, a crash soon afterwards could leave an incomplete library under its final name.
        os.fsync(file)
    return library


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout
