"""Finds the attacks: the functions `attack_*` in this folder's modules."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from types import ModuleType

import benchmarks.attack
from benchmarks.attack.target import Finding, Target


@dataclass(frozen=True)
class Attack:
    # Its module and its function.
    name: str
    run: Callable[[Target], Awaitable[Finding]]
    needs_keys: bool
    # Whether its verdict depends on times alone.
    is_timed: bool = False


def all_attacks(only: str = "") -> list[Attack]:
    """Returns the attacks with `only` in their names, those on servers without keys first."""
    found = [attack for module in _modules() for attack in _attacks_of(module)]
    return sorted((each for each in found if only in each.name), key=lambda each: each.needs_keys)


def drawn(number: int) -> list[Attack]:
    """Returns the attacks that a number draws, in the order in which they are run as far as there is time: either those
    on a server with keys or the others, without those that are judged by times."""
    random = Random(number)
    needs_keys = random.random() < 0.5
    found = [each for each in all_attacks() if each.needs_keys == needs_keys and not each.is_timed]
    return random.sample(found, len(found))


def _modules() -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(benchmarks.attack.__path__):
        if not info.name.startswith("__"):
            yield importlib.import_module(f"benchmarks.attack.{info.name}")


def _attacks_of(module: ModuleType) -> Iterator[Attack]:
    place, needs_keys = module.__name__.rpartition(".")[2], bool(getattr(module, "NEEDS_KEYS", False))
    timed = getattr(module, "TIMED", ())
    for name, function in vars(module).items():
        is_own = getattr(function, "__module__", "") == module.__name__
        if name.startswith("attack_") and inspect.iscoroutinefunction(function) and is_own:
            yield Attack(f"{place}.{name.removeprefix('attack_')}", function, needs_keys, function in timed)
