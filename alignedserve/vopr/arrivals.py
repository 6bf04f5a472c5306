"""The requests of a plan, and which of their clients leave before they have their answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from alignedserve.protocol.pooling import POOLINGS
from alignedserve.router.requests import Phase
from alignedserve.types import RequestKey
from alignedserve.vopr.history import Arrive, Leave
from alignedserve.vopr.plan import MAX_MODEL_LEN, Plan
from alignedserve.vopr.speed import prefill_token_s

NUM_FAMILIES = 4


@dataclass(frozen=True)
class _Lengths:
    """The usual lengths. One request in ten has other lengths."""

    prompt: int
    output: int


def make_arrivals(random: Random, plan: Plan) -> Iterator[Arrive | Leave]:
    usual = _Lengths(random.choice([20, 60, 150]), random.choice([5, 20, 60]))
    if plan.is_tight:
        usual = _Lengths(random.choice([10, 20, 60]), 120)
    burst_len = random.choice([1, 1, 4, 12])
    mean_gap_s = burst_len / (plan.load * _requests_per_s(plan, usual))
    leaving = random.choice([0.0, 0.05, 0.3])
    at_s, key, earlier = 0.0, 0, list[Arrive]()
    while at_s < plan.duration_s:
        for _ in range(burst_len):
            key += 1
            arrive = _next_turn(earlier, _arrival(random, plan, RequestKey(key), at_s, usual))
            if arrive.earlier is None:
                earlier.append(arrive)
            yield arrive
            if random.random() < leaving:
                yield _departure(random, RequestKey(key), at_s)
        at_s += random.expovariate(1.0 / mean_gap_s)


def _requests_per_s(plan: Plan, usual: _Lengths) -> float:
    """Returns roughly the instances' capacity: prompts are computed one after the other, answers side by side."""
    num_prefill = plan.num_prefill or plan.num_colocated
    num_decode = plan.num_decode or plan.num_colocated
    num_blocks = -(-(usual.prompt + usual.output) // plan.block_size)
    most_running = max(1, min(plan.max_num_seqs, plan.decode_blocks // num_blocks))
    prompts_per_s = num_prefill / (usual.prompt * prefill_token_s(plan) + 0.5 * plan.iteration_s)
    answers_per_s = num_decode * most_running / (usual.output * plan.iteration_s)
    return min(prompts_per_s, answers_per_s)


def _arrival(random: Random, plan: Plan, key: RequestKey, at_s: float, usual: _Lengths) -> Arrive:
    is_odd = random.random() < 0.1
    prompt_len = random.randint(1, MAX_MODEL_LEN - 1) if is_odd else _around(random, usual.prompt)
    output_len = random.randint(1, MAX_MODEL_LEN) if is_odd else _around(random, usual.output)
    is_rt = random.random() >= plan.be_part
    objective_s = random.choice([None, 0.1, 2.0, 20.0])
    arrive = Arrive(
        at_s=at_s,
        key=key,
        gateway=random.choice(plan.ids_of("gateway")),
        family=random.randrange(NUM_FAMILIES),
        num_shared=random.choice([0, prompt_len // 2, prompt_len]),
        prompt_len=prompt_len,
        output_len=output_len,
        max_tokens=random.choice([None, 1 + output_len // 2, 2 * output_len]),
        salt=random.choice(["", "", "a", "b"]),
        tier="rt" if is_rt else "be",
        ttft_s=objective_s if is_rt else None,
        tbt_s=random.choice([None, 0.1, 3.0]) if is_rt else None,
        window_s=None if is_rt else random.choice([None, 1.0, 100.0, 86400.0]),
        is_structured=random.random() < 0.05,
        pooling=_pooling(key, at_s),
        adapter=_adapter(key, at_s),
        owner=_owner(plan, key, at_s),
    )
    if not plan.begin_alike:
        return arrive
    salt = arrive.salt if arrive.salt == "a" else ""
    num_shared = max(arrive.num_shared, 2 * prompt_len // 3)
    return replace(arrive, family=arrive.family // 2, num_shared=num_shared, salt=salt)


def _next_turn(earlier: Sequence[Arrive], arrive: Arrive) -> Arrive:
    """Makes one request in four the next turn of the chat that began shortly before, if that is any."""
    random = Random(f"chat of {arrive.key} at {arrive.at_s}")
    last = earlier[-random.choice([1, 2, 5, 20]) :][:1]
    if not last or random.random() < 0.75:
        return arrive
    (turn,) = last
    num_before = turn.prompt_len + min(turn.output_len, turn.max_tokens or turn.output_len)
    prompt_len = min(num_before + random.randint(1, 40), MAX_MODEL_LEN - 1)
    return replace(
        arrive,
        earlier=turn,
        prompt_len=prompt_len,
        salt=turn.salt,
        adapter=turn.adapter,
        owner=turn.owner,
    )


def _pooling(key: RequestKey, at_s: float) -> str | None:
    """Returns the pooling of one request in ten, which asks for an embedding; None for the others."""
    random = Random(f"pooling of {key} at {at_s}")
    return random.choice(POOLINGS) if random.random() < 0.1 else None


def _adapter(key: RequestKey, at_s: float) -> str:
    """Returns one of two adapters for one request in four; "" for the others."""
    return Random(f"adapter of {key} at {at_s}").choice(["", "", "", "", "", "", "a", "b"])


def _owner(plan: Plan, key: RequestKey, at_s: float) -> str:
    """Returns one of two or three owners in half of the plans, of which one may have most requests; "" in others."""
    owners = Random(f"owners of {plan.seed}").choice(
        [[""], [""], ["", "a"], ["a", "a", "a", "a", "b"], ["", "a", "b"]]
    )
    return Random(f"owner of {key} at {at_s}").choice(owners)


def _around(random: Random, mean: int) -> int:
    return min(max(1, round(random.lognormvariate(0.0, 0.6) * mean)), MAX_MODEL_LEN // 2)


def _departure(random: Random, key: RequestKey, at_s: float) -> Leave:
    if random.random() < 0.6:
        phase = random.choice([phase.value for phase in Phase])
        return Leave(at_s=at_s, key=key, phase=phase, delay_s=random.choice([0.0, 0.001, 1.0]))
    return Leave(at_s=at_s + random.expovariate(0.1), key=key)
