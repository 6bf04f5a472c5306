"""Makes a profile of an engine, or loads an earlier one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from alignedserve.engine.build import BuiltEngine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.engine import Engine
from alignedserve.instance.profile.copies import PoolEnd, PoolMemory, measure_channels
from alignedserve.instance.profile.crowd import Crowd
from alignedserve.instance.profile.facts import experts_of, facts_of
from alignedserve.instance.profile.fit import fit_held_out
from alignedserve.instance.profile.grid import grid
from alignedserve.instance.profile.measure import measure, reach_of
from alignedserve.instance.profile.restoring import lacks_restoring, with_restoring
from alignedserve.instance.profile.saved import VERSION, Profile, default_path, load, locked, save
from alignedserve.instance.profile.sharing import measure_sharing
from alignedserve.timing.cost import CostModel, ExpertCounts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Effort:
    is_brief: bool
    # Seconds for measuring. The smallest points are measured even if they take longer.
    budget_s: float
    # The same for a model that takes longer than SLOW_S for the smallest point.
    slow_budget_s: float
    max_rounds: int
    # Seconds for copies, and the same for restoring KV from kept inputs, and for shared KV.
    beside_s: float


SLOW_S = 5e-3
FULL = Effort(is_brief=False, budget_s=22.0, slow_budget_s=50.0, max_rounds=8, beside_s=1.0)
# For an instance that is starting.
BRIEF = Effort(is_brief=True, budget_s=1.2, slow_budget_s=3.0, max_rounds=3, beside_s=0.15)
# Share of waiting from which on the processor counts as crowded.
CROWDED_SHARE = 0.05


def make(
    engine: Engine,
    facts: dict[str, str],
    effort: Effort,
    pool: PoolEnd,
    progress: Callable[[float], None] = lambda share: None,
    experts: ExpertCounts | None = None,
) -> Profile:
    """Measures and fits. `engine` must be idle, and is left idle. `pool`: the other end of copies. `experts`: those of
    a mixture."""
    reach, form = reach_of(engine), engine.cache.format
    points, crowd = grid(reach, effort.is_brief), Crowd()
    is_slow = measure(engine, points[:1], 0.0, 1)[0].seconds > SLOW_S
    budget_s = effort.slow_budget_s if is_slow else effort.budget_s
    measured = measure(engine, points, budget_s, effort.max_rounds, progress)
    cost, errors = fit_held_out(
        measured, int(form.token_bytes), reach.num_kv_tokens, _source(facts), experts, engine.window
    )
    cost = with_restoring(_with_channels(cost, engine, pool, effort.beside_s), engine, effort.beside_s)
    cost = _with_sharing(cost, engine, effort.beside_s)
    return Profile(VERSION, facts, reach, len(measured), errors, crowd.waited_share, cost)


def _with_channels(cost: CostModel, engine: Engine, pool: PoolEnd, budget_s: float) -> CostModel:
    try:
        found = measure_channels(engine, pool, budget_s)
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning("Copies of KV can't be measured, and are taken to be free: %s", error)
        return cost
    source = f"{cost.source}; {found.note}"
    return msgspec.structs.replace(cost, source=source, channels=found.channels)


def _with_sharing(cost: CostModel, engine: Engine, budget_s: float) -> CostModel:
    """On GPUs, kernels read KV for each request, and what their caches save of that is no property of the kernel."""
    if engine.cache.blocks.is_cuda:
        return cost
    return msgspec.structs.replace(cost, shared_saving=measure_sharing(engine, cost, budget_s))


def find_or_make(
    engine: Engine, facts: dict[str, str], path: Path, pool: PoolEnd, experts: ExpertCounts | None = None
) -> Profile:
    """Returns the saved profile. If none fits, makes and saves a brief one. Problems with the file never prevent an
    instance from starting."""
    try:
        with locked(path):
            found = load(path, facts, reach_of(engine))
            if found and lacks_restoring(found.cost, engine):
                logger.info("%s was measured without kept inputs: it is measured again", path)
                found = None
            return found or _make_and_save(engine, facts, path, pool, experts)
    except OSError as error:
        logger.warning("The cost model's profile can't be kept: %s", error)
        return make(engine, facts, BRIEF, pool, experts=experts)


def cost_of(
    built: BuiltEngine, config: EngineConfig, pool_kv_dtype: str, memory: PoolMemory, path: str | None
) -> CostModel:
    """Returns an instance's cost model, from a saved or a new profile. `path`: the profile's file; None means the
    default. `memory` makes memory like the pool's, with KV in `pool_kv_dtype`."""
    facts, form = facts_of(built, config, pool_kv_dtype), built.engine.format.in_pool(pool_kv_dtype)
    where = Path(path) if path else default_path(facts)
    profile = find_or_make(built.engine, facts, where, PoolEnd(form, memory), experts_of(built.model_config))
    return profile.cost.with_pool(form.token_bytes)


def _make_and_save(
    engine: Engine, facts: dict[str, str], path: Path, pool: PoolEnd, experts: ExpertCounts | None
) -> Profile:
    begun_s = time.monotonic()
    profile = make(engine, facts, BRIEF, pool, experts=experts)
    logger.debug("Profiled %d iterations in %.1f s: %s", profile.num_points, time.monotonic() - begun_s, path)
    # A measurement that failed may succeed next time.
    if not profile.cost.has_free_copies:
        save(path, profile)
    return profile


def _source(facts: dict[str, str]) -> str:
    return f"measured: {facts['model']}, {facts['dtype']}, {facts['device']}"
