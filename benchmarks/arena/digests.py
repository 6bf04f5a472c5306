"""Digests of everything that determines a score: the scenario's configuration, and the code of the policy and the
simulator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import alignedserve
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.scheduling.policies import POLICIES
from benchmarks.arena.baselines import BASELINES

ROOT = Path(alignedserve.__file__).parent.parent
_POLICIES = "alignedserve.scheduling.policies"
# Folders of `alignedserve` with code that runs a policy in simulation.
_FOLDERS = (
    *("decode_worker", "engine", "instance", "kvpool", "prefill_worker", "protocol", "router", "scheduling"),
    *("sim", "cli/simulate", "timing", "transport"),
)
# Modules named by a policy's own files, which may have further files.
_IMPORTED = re.compile(r"(?:alignedserve\.scheduling\.policies|benchmarks|research)(?:\.\w+)+")
_DIGITS = 16


@cache
def scenario_digest(config: SimConfig) -> str:
    """Returns the digest of everything but the policies. A trace counts by content, not by name."""
    trace = sha256(Path(config.trace).read_bytes()).hexdigest() if config.trace else None
    told = asdict(replace(config, policy=(), trace=trace))
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:_DIGITS]


@cache
def code_digest(policy: str) -> str:
    """Returns the digest of the policy's files, of those that they import, and of the code that runs every policy."""
    digest = sha256()
    for file in sorted(files_of(policy)):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


def files_of(policy: str) -> set[Path]:
    return {*_shared_files(), *_own_files(policy)}


@cache
def _shared_files() -> tuple[Path, ...]:
    package, policies = ROOT / "alignedserve", ROOT / _POLICIES.replace(".", "/")
    found = [file for folder in _FOLDERS for file in (package / folder).rglob("*.py")]
    return (
        *(file for file in found if policies not in file.parents),
        policies / "__init__.py",
        *(package / "timing" / "cost_presets.json", Path(__file__).with_name("played.py")),
    )


def _own_files(policy: str) -> set[Path]:
    waiting = [(POLICIES | BASELINES)[policy].__module__]
    seen, found = set[str](), set[Path]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        files = [*_files_in(module)]
        found.update(files)
        waiting += [name for file in files for name in _IMPORTED.findall(file.read_text())]
    return found


def _files_in(module: str) -> Iterator[Path]:
    """Yields the module's files. Yields none for the package that lists all policies, which is among the shared
    files."""
    if module == _POLICIES:
        return
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        yield from path.rglob("*.py")
    elif path.with_suffix(".py").is_file():
        yield path.with_suffix(".py")
