"""Stores profiles: one JSON file per model, device, dtype and other facts that determine the speed.

Instances that start together need the same profile. The first one makes it under a lock. The others wait and then read
it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from alignedserve.instance.profile.fit import Error
from alignedserve.instance.profile.grid import Reach
from alignedserve.timing.cost import CostModel
from alignedserve.timing.cost_presets import checked

logger = logging.getLogger(__name__)

# Profiles of other versions were made differently, and are measured again.
VERSION = 1
# The fact that names the pool's KV format if it is not the instances' own. It affects the times of copies.
POOL_FACT = "pool_kv_dtype"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    # The facts for which the profile is valid; see facts.py.
    facts: dict[str, str]
    reach: Reach
    num_points: int
    # Errors on held-out points, by kind.
    errors: dict[str, Error]
    # Share of the measuring time in which this process waited for a core.
    waited_share: float
    cost: CostModel


def default_path(facts: dict[str, str]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._]+", "-", facts["model"]).strip("-.") or "model"
    return Path(base) / "alignedserve" / "profiles" / f"{name}-{digest}.json"


def load(path: Path, facts: dict[str, str], reach: Reach) -> Profile | None:
    """Returns None if no profile fits. A damaged profile, or one with other facts, is set aside."""
    try:
        profile = decode(path.read_bytes(), str(path))
        check_is_of(profile, facts)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("The cost model's profile can't be read: %s", error)
        return None
    except ValueError as error:
        _set_aside(path, error)
        return None
    if not profile.reach.covers(reach):
        logger.info("%s was measured for smaller iterations: it is measured again", path)
        return None
    if profile.cost.has_free_copies:
        logger.warning(
            "%s holds no channels: copies of KV are taken to be free; `alignedserve profile` measures them",
            path,
        )
    return profile


def decode(data: bytes, name: str) -> Profile:
    """Returns the profile. Raises ValueError if the data is not one."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {error}") from None
    if profile.version != VERSION:
        raise ValueError(f"{name}: version={profile.version}: must be {VERSION}")
    checked(profile.cost, name)
    return profile


def check_is_of(profile: Profile, facts: dict[str, str]) -> None:
    """Raises ValueError with the first difference between the facts. The pool's format is ignored for a profile with
    free copies."""
    names = facts.keys() | profile.facts.keys()
    for name in sorted(names - {POOL_FACT} if profile.cost.has_free_copies else names):
        if profile.facts.get(name) != facts.get(name):
            raise ValueError(f"it is of {name}={profile.facts.get(name)!r}, not {facts.get(name)!r}")


def _set_aside(path: Path, why: ValueError) -> None:
    try:
        aside = _free_name(path)
        os.rename(path, aside)
    except OSError as error:
        logger.warning("The cost model's profile is of no use (%s), and stays: %s", why, error)
    else:
        logger.warning("The cost model's profile is of no use (%s): it is now %s", why, aside)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return aside


def save(path: Path, profile: Profile) -> None:
    """Writes the whole file or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of this path, also against other processes. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
