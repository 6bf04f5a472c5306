"""How profiles of real engines are made in tests."""

from __future__ import annotations

from alignedserve.engine.engine import Engine
from alignedserve.instance.profile.copies import PoolEnd
from alignedserve.instance.profile.make import Effort
from alignedserve.kvpool.segment import scratch_blocks

# Measures what a fit needs, and nothing more.
QUICK = Effort(is_brief=True, budget_s=1e-6, slow_budget_s=1e-6, max_rounds=1, beside_s=0.0)


def pool_of(engine: Engine, pool_kv_dtype: str = "auto") -> PoolEnd:
    """Returns memory like a pool's, for copies of the engine's KV."""
    return PoolEnd(engine.format.in_pool(pool_kv_dtype), scratch_blocks)
