"""How decode batches are made, by name."""

from __future__ import annotations

from alignedserve.router.config import RouterConfig
from alignedserve.router.policies.aligned import AlignedPolicy
from alignedserve.router.policies.base import Assign, BatchPolicy
from alignedserve.router.policies.fcfs import FcfsPolicy
from alignedserve.router.policies.priority import PriorityPolicy

POLICIES: dict[str, type[BatchPolicy]] = {
    policy.name: policy for policy in (AlignedPolicy, PriorityPolicy, FcfsPolicy)
}


def make_policy(config: RouterConfig) -> BatchPolicy:
    if config.policy not in POLICIES:
        raise ValueError(f"policy={config.policy!r}: must be one of {', '.join(POLICIES)}")
    return POLICIES[config.policy](config)


__all__ = ["POLICIES", "Assign", "BatchPolicy", "make_policy"]
