"""The mutants, and a copy of the packages that contains one of them."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The packages that `alignedserve dev vopr` needs.
_PACKAGES = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels")


@dataclass(frozen=True)
class Mutant:
    name: str
    # The file's path, relative to the root of the repository.
    file: str
    # A text that occurs once in the file, and its replacement.
    old: str
    new: str
    # The only system that executes its line, as for `alignedserve dev vopr --system`.
    system: str | None = None
    # Why it may not be found: what other code compensates for it.
    survives: str = ""

    def applied(self, text: str) -> str:
        """Raises ValueError if the text is not the one that the mutant was made for."""
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
    """The file has this text while the block runs."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def living(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The copy of the packages has the mutant while the block runs."""
    path = copy / mutant.file
    with with_text(path, mutant.applied(path.read_text())):
        yield
