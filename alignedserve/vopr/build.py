"""Makes the island of a plan, and the requests of its clients."""

from __future__ import annotations

from functools import lru_cache
from random import Random

import msgspec
from msgspec.structs import replace

from alignedserve.protocol.messages import AnyMessage, Request
from alignedserve.sim.foresight import Foresee, Roughly, nothing
from alignedserve.sim.island import IslandConfig, SimIsland
from alignedserve.sim.model import VOCABULARY, make_request, num_output_tokens, sample
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.vopr.conditions import Conditions
from alignedserve.vopr.history import Arrive
from alignedserve.vopr.liveness import BoundedClock
from alignedserve.vopr.plan import MAX_MODEL_LEN, Plan
from alignedserve.vopr.speed import cost_of

# Seconds between two ticks of the router: for iterations of live length, and for those about ten times as long.
SHORT_TICK_S, TICK_S = 0.05, 0.5
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(AnyMessage)


def make_island(plan: Plan) -> tuple[SimIsland, Conditions]:
    island = SimIsland(island_config(plan), clock=BoundedClock())
    world = island.world
    conditions = world.faults = Conditions(plan, world.clock)
    world.tick_s = SHORT_TICK_S if plan.is_short else TICK_S
    if plan.is_encoded:
        world.encode = lambda message: _DECODER.decode(_ENCODER.encode(message))
    return island, conditions


def make_request_of(arrive: Arrive, now: float) -> Request:
    request = make_request(
        key=arrive.key,
        prompt_len=1,
        num_output_tokens=arrive.output_len,
        arrival_s=now,
        max_tokens=arrive.max_tokens,
        ttft_s=arrive.ttft_s,
        tbt_s=arrive.tbt_s,
        tier=arrive.tier,
        deadline_s=None if arrive.window_s is None else now + arrive.window_s,
    )
    if arrive.is_structured and arrive.pooling is None:
        request.params.structured_outputs = StructuredOutputsParams(json_object=True)
    return replace(
        request,
        prompt=_prompt(arrive),
        # As gateways do: owners share no KV.
        cache_salt=f"{arrive.owner}/{arrive.salt}" if arrive.owner else arrive.salt,
        pooling=arrive.pooling,
        adapter=arrive.adapter,
        has_next_turn=arrive.window_s is None,
        owner=arrive.owner,
        awaits=("", "tool", "user")[arrive.key % 3],
        brings_results=arrive.earlier is not None and arrive.key % 2 == 0,
    )


def island_config(plan: Plan) -> IslandConfig:
    return IslandConfig(
        cost=cost_of(plan),
        prefill=plan.limits(plan.prefill_blocks),
        decode=plan.limits(plan.decode_blocks),
        pool_blocks=plan.pool_blocks,
        num_prefill=plan.num_prefill,
        num_decode=plan.num_decode,
        num_colocated=plan.num_colocated,
        num_gateways=0 if plan.front else plan.num_gateways,
        router=plan.router,
        scheduling=plan.scheduling,
        staging_share=plan.staging_share,
        enable_prefix_caching=plan.enable_prefix_caching,
        foresee=_foresight(plan),
        check_share=plan.check_share,
    )


def _foresight(plan: Plan) -> Foresee:
    return nothing if plan.length_error is None else Roughly(MAX_MODEL_LEN, plan.length_error)


def _prompt(arrive: Arrive) -> list[int]:
    if arrive.earlier is not None:
        turn = make_request_of(arrive.earlier, 0.0)
        shared = turn.prompt + [
            sample(turn.seed, index) for index in range(num_output_tokens(turn, MAX_MODEL_LEN))
        ]
        return (shared + _family(arrive.family))[: arrive.prompt_len]
    shared = _family(arrive.family)[: arrive.num_shared]
    random = Random(f"prompt of {arrive.key}")
    return shared + [random.randrange(VOCABULARY) for _ in range(arrive.prompt_len - len(shared))]


@lru_cache(maxsize=64)
def _family(family: int) -> list[int]:
    random = Random(f"family {family}")
    return [random.randrange(VOCABULARY) for _ in range(MAX_MODEL_LEN)]
