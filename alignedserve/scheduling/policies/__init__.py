"""The policies by name. To add one, write a file here and a line below; docs/policies.md explains the rest."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Protocol

from alignedserve.kv.layout import INPUTS, REVERSED
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.accelgen import Accelgen
from alignedserve.scheduling.policies.alise import Alise
from alignedserve.scheduling.policies.apt import Apt, AptS
from alignedserve.scheduling.policies.bros import Bros
from alignedserve.scheduling.policies.default import Aligned
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policies.priority import Priority
from alignedserve.scheduling.policies.sarathi import Sarathi
from alignedserve.scheduling.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Aligned, Priority, Fcfs, Sarathi, Accelgen, Bros, Alise, Apt, AptS)
}


def make_policy(config: SchedulingConfig) -> Policy:
    """Returns the policy that the configuration names. Raises ValueError if there is none of this name, or if it can't
    do what the configuration asks for."""
    name = config.policy
    found = _import(name) if ":" in name else POLICIES.get(name)
    if found is None:
        raise ValueError(f"policy={name!r}: must be one of {', '.join(POLICIES)}, or package.module:Class")
    if config.preemption_mode == "recompute":
        # Recomputation needs no room in the pool, so nothing has to be ordered ahead: see `evict_ahead`.
        config = replace(config, evict_ahead=1)
    if config.share_blocks and REVERSED not in found.layouts:
        able = ", ".join(each.name for each in POLICIES.values() if REVERSED in each.layouts)
        raise ValueError(f"share_blocks=True: policy {name!r} can't; it must be one of {able}")
    if config.share_blocks and config.preemption_mode == "recompute":
        raise ValueError("share_blocks=True: preemption_mode must be swap or defer, not recompute")
    return found(config)


class EngineSettings(Protocol):
    @property
    def hidden_cache(self) -> bool: ...


def check_policy(policy: Policy, engine: EngineSettings, has_profile: bool) -> None:
    """Raises ValueError unless the policy suits the engine's settings, and there is a profile where they need one."""
    if engine.hidden_cache and INPUTS not in policy.layouts:
        known = ", ".join(each.name for each in POLICIES.values() if INPUTS in each.layouts)
        raise ValueError(f"hidden_cache: policy {policy.name} can't keep inputs; these can: {known}")
    if engine.hidden_cache and not has_profile:
        raise ValueError("hidden_cache: needs a cost_profile, which says what restoring KV costs")


def _import(name: str) -> type[Policy]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        is_own = error.name is not None and (module == error.name or module.startswith(f"{error.name}."))
        hint = "; PYTHONPATH=. finds modules of this directory" if is_own else ""
        raise ValueError(f"policy={name!r}: {error}{hint}") from None
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"policy={name!r}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"policy={name!r}: is not a subclass of {Policy.__module__}.{Policy.__qualname__}")
    return found


__all__ = ["POLICIES", "Policy", "check_policy", "make_policy"]
