"""The mutants, and a copy of the packages in which one of them lives."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What `alignedserve vopr` needs of this repository.
_PACKAGES = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels")


@dataclass(frozen=True)
class Mutant:
    name: str
    # The path of the file, from the root of the repository.
    file: str
    # What occurs in it once, and what stands there instead.
    old: str
    new: str
    # The systems in which it is looked for, as for `alignedserve vopr --system`: its line runs in no others.
    system: str | None = None
    # Why it may not be found: what else makes up for it.
    survives: str = ""

    def applied(self, text: str) -> str:
        """Raises ValueError if the text is not what the mutant was made of."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has its line {text.count(self.old)} times, and must once"
            )
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    text = (Path(__file__).parent / "mutants.toml").read_text()
    return [Mutant(**each) for each in tomllib.loads(text)["mutant"]]


def copy_packages(to: Path) -> None:
    for package in _PACKAGES:
        shutil.copytree(
            ROOT / package, to / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )


@contextmanager
def with_text(path: Path, text: str) -> Iterator[None]:
    """While the block runs, the file has this text."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def living(mutant: Mutant, copy: Path) -> Iterator[None]:
    """While the block runs, the mutant is in the copy of the packages."""
    path = copy / mutant.file
    with with_text(path, mutant.applied(path.read_text())):
        yield
