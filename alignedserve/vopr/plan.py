"""The system that a seed makes: its policy, roles, sizes and speeds. All of it follows from the seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
from msgspec.structs import replace

from alignedserve.kv.groups import STATE_WINDOW
from alignedserve.kv.layout import INPUTS, REVERSED
from alignedserve.kv.span import TILE_TOKENS
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import PREEMPTION_MODES, SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.types import InstanceId

LINKS = ("host", "host", "ipc", "gloo", "nccl")
MAX_MODEL_LEN = 256
# Most models attend to all tokens.
WINDOWS = (0, 0, 0, 1, 30, 100, 150)
# The number of layer groups that attend to all tokens, and that of groups with the window. In some models all have it.
GROUPS: tuple[tuple[int, int], ...] = ((0, 1), (1, 1), (1, 3), (2, 3))
# The share of the plans without a window that get one in some layers.
MIXED_SHARE = 0.2
# The share of the plans with a window that have states in its place.
STATE_SHARE = 0.25
# The systems that a seed may make: an island with simulated gateways, or a whole system, with the real gateways in
# front of islands.
SYSTEMS = ("island", "whole")
# The share of the seeds that make a whole system. Such a seed takes about three times as long as another, so whole
# systems get about a quarter of the time.
WHOLE_SHARE = 0.1
# The share of the unaimed seeds with short iterations. Aimed seeds always have them. With short iterations, tokens,
# messages and copies are on their way when something fails.
SHORT_SHARE = 0.3
_SHORT_ITERATIONS_S = (0.02, 0.03, 0.05)
# The share of those in which requests have to leave decode instances for lack of blocks, and the aims that need that.
TIGHT_SHARE = 0.3
OF_LEAVING = ("Evict", "DecodeReport.wants_evicted", "DecodeReport.evicted", "DecodeReport.dropped")

_KEEP_INPUTS = {name for name, policy in POLICIES.items() if INPUTS in policy.layouts}


class FrontPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The front of a whole system: everything before its islands."""

    num_islands: int
    # The most lines of batch jobs, and the most jobs, that a gateway runs at a time.
    batch_lines: int
    batch_jobs: int
    # The most seconds that a store call takes without faults, and the seconds after which a call is given up.
    store_latency_s: float
    store_timeout_s: float
    # The most bytes that arrive on a connection at once.
    piece_bytes: int


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int
    policy: str
    # The kind of clients: "http" in a whole system, otherwise a key of `clients.CLIENTS`.
    clients: str
    num_prefill: int
    num_decode: int
    # Colocated instances, in place of the prefill and decode instances.
    num_colocated: int
    num_gateways: int
    link: str
    block_size: int
    # Whole columns: blocks of all layer groups.
    pool_blocks: int
    prefill_blocks: int
    decode_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    staging_share: float
    enable_prefix_caching: bool
    # The mean relative error of predicted output lengths; None: there are no predictions.
    length_error: float | None
    min_batch_requests: int
    # None: vLLM's watermark.
    admit_ahead: int | None
    be_share: float
    rt_headroom: float
    # The least seconds of an iteration with decodes.
    iteration_s: float
    # Iterations that it takes to copy the KV of 100 tokens.
    copy_iterations: float
    # The most seconds that a message takes without faults.
    max_latency_s: float
    # Whether messages are encoded and decoded on their way.
    is_encoded: bool
    silence_s: float
    orphan_s: float
    # Seconds until a process that the fence has killed is restarted.
    restart_s: float
    # The arriving work, as a share of the instances' capacity.
    load: float
    # The share of the requests that are best effort.
    be_part: float
    # Seconds in which requests arrive and faults happen. After that there is calm.
    duration_s: float
    preemption_mode: str = "swap"
    # None: the system is a single island.
    front: FrontPlan | None = None
    # Whether requests share blocks from both ends.
    share_blocks: bool = False
    # Whether colocated instances may keep inputs of layers in place of KV.
    hidden_cache: bool = False
    # Whether instances change between prefill and decode while they run.
    change_roles: bool = False
    # Whether most prompts have a long beginning in common.
    begin_alike: bool = False
    # Latest tokens to which the model's sliding layers attend; 0: all.
    window: int = 0
    # See LayerGroups.
    num_full_groups: int = 0
    num_sliding_groups: int = 1
    # Blocks behind the window are passed in steps of this many tokens.
    tile_tokens: int = TILE_TOKENS
    # Whether sliding layers have states. The window and the tile are theirs.
    has_state: bool = False
    # Whether its iterations are about as long as live ones.
    is_short: bool = False
    # Whether decode instances run more than fits into their blocks, so that requests have to leave them.
    is_tight: bool = False
    # The aims of its faults, each about as often (places.py).
    aims: tuple[str, ...] = ()
    # The share of the pool's blocks that loads check. With less than 1, requests use blocks that have changed.
    check_share: float = 1.0
    # Whether all sequences of an iteration take as long as the longest. Batches of similar length pay then.
    is_padded: bool = False

    def ids_of(self, role: str) -> list[InstanceId]:
        counts = {"prefill": self.num_prefill, "decode": self.num_decode, "colocated": self.num_colocated}
        counts |= {"kvpool": 1, "gateway": self.num_gateways}
        return [InstanceId(f"{role}-{index}") for index in range(counts[role])]

    @property
    def num_groups(self) -> int:
        return self.num_full_groups + self.num_sliding_groups

    @property
    def instances(self) -> list[InstanceId]:
        return [each for role in ("prefill", "decode", "colocated") for each in self.ids_of(role)]

    @property
    def processes(self) -> list[InstanceId]:
        """All processes but the router."""
        return [*self.ids_of("kvpool"), *self.instances, *self.ids_of("gateway")]

    @property
    def router(self) -> RouterConfig:
        return RouterConfig(
            link=self.link,
            silence_s=self.silence_s,
            orphan_s=self.orphan_s,
            change_roles=self.change_roles,
        )

    @property
    def scheduling(self) -> SchedulingConfig:
        return SchedulingConfig(
            self.policy,
            min_batch_requests=self.min_batch_requests,
            admit_ahead=self.admit_ahead,
            evict_ahead=min(SchedulingConfig.evict_ahead, self.admit_ahead or SchedulingConfig.evict_ahead),
            be_share=self.be_share,
            rt_headroom=self.rt_headroom,
            preemption_mode=self.preemption_mode,
            share_blocks=self.share_blocks,
        )

    def limits(self, num_columns: int) -> InstanceLimits:
        """Returns the limits of an instance with this many columns."""
        return InstanceLimits(
            num_blocks=num_columns * self.num_groups,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            max_restored_blocks=-(-MAX_MODEL_LEN // self.block_size) if self.hidden_cache else 0,
            window=self.window,
            num_full_groups=self.num_full_groups,
            num_sliding_groups=self.num_sliding_groups,
            tile_tokens=self.tile_tokens,
            has_state=self.has_state,
        )


def make_plan(
    seed: int, policies: Sequence[str] = (), systems: Sequence[str] = (), aims: Sequence[str] = ()
) -> Plan:
    """Returns the plan of a seed. Its island is the same for all systems, except for how long everything takes."""
    plan = _with_groups(_island(seed, policies))
    plan = replace(plan, is_padded=Random(f"kernel of {seed}").random() < 0.5)
    if _system_of(seed, systems or SYSTEMS) == "whole":
        plan = _with_front(plan)
    is_short = bool(aims) or Random(f"length of {seed}").random() < SHORT_SHARE
    return _shortened(plan, tuple(aims)) if is_short else plan


def _shortened(plan: Plan, aims: tuple[str, ...]) -> Plan:
    """Returns the plan with short iterations, and as many iterations as other plans or somewhat more."""
    random = Random(f"short iterations of {plan.seed}")
    short = replace(
        plan,
        iteration_s=random.choice(_SHORT_ITERATIONS_S),
        max_latency_s=random.choice([0.0003, 0.0003, 0.002, 0.01]),
        orphan_s=2.0,
        restart_s=min(plan.restart_s, 1.0),
        is_short=True,
        # Gateways' leases and patience are in seconds.
        duration_s=random.choice([15.0, 30.0] if plan.front else [5.0, 10.0, 20.0]),
        aims=aims,
        # The kernels' tile is a quarter of the longest request here.
        tile_tokens=1 if plan.has_state else random.choice([4, 16, TILE_TOKENS]),
    )
    is_tight = random.random() < TIGHT_SHARE or is_about(aims, *OF_LEAVING)
    return _tightened(short, random) if is_tight else short


def _tightened(plan: Plan, random: Random) -> Plan:
    longest = -(-MAX_MODEL_LEN // plan.block_size)
    return replace(
        plan,
        decode_blocks=round(longest * random.choice([1, 1.25, 1.5])),
        max_num_seqs=max(plan.max_num_seqs, 6),
        load=2.5,
        iteration_s=random.choice([0.01, 0.02]),
        be_part=random.choice([0.0, 0.6, 0.6, 1.0]),
        # With a longer window, few requests would get long enough to pass blocks before they have to leave.
        window=min(plan.window, 30),
        # This leaves more tokens on their way to gateways when a router dies.
        max_latency_s=random.choice([plan.max_latency_s, 0.03]),
        preemption_mode=plan.preemption_mode if is_about(plan.aims, "DecodeReport.dropped") else "swap",
        is_tight=True,
    )


def is_about(aims: Sequence[str], *transitions: str) -> bool:
    """Returns whether any of the aims is at one of the transitions."""
    return any(aim.split(":")[0] in transitions for aim in aims)


def _system_of(seed: int, systems: Sequence[str]) -> str:
    if len(set(systems)) == 1:
        return systems[0]
    return "whole" if Random(f"system of {seed}").random() < WHOLE_SHARE else "island"


def _with_groups(plan: Plan) -> Plan:
    if plan.share_blocks or plan.hidden_cache:
        return replace(plan, window=0)  # They keep all KV.
    random = Random(f"groups of {plan.seed}")
    window, choices = plan.window, GROUPS
    if not window and random.random() < MIXED_SHARE:
        window, choices = random.choice([each for each in WINDOWS if each]), GROUPS[1:]
    num_full, num_sliding = random.choice(choices) if window else (0, 1)
    plan = replace(plan, window=window, num_full_groups=num_full, num_sliding_groups=num_sliding)
    has_state = window > 0 and Random(f"states of {plan.seed}").random() < STATE_SHARE
    return replace(plan, window=STATE_WINDOW, tile_tokens=1, has_state=True) if has_state else plan


def _with_front(plan: Plan) -> Plan:
    random = Random(f"front of {plan.seed}")
    front = FrontPlan(
        num_islands=random.choice([1, 1, 2, 3]),
        batch_lines=random.choice([1, 2, 8]),
        batch_jobs=random.choice([1, 2, 8]),
        store_latency_s=random.choice([0.001, 0.02, 0.3]),
        store_timeout_s=random.choice([0.5, 2.0]),
        piece_bytes=random.choice([1 << 18, 1000, 50, 7]),
    )
    return replace(
        plan,
        clients="http",
        num_gateways=random.choice([1, 2, 2, 3]),
        # There may be several islands, with routers and gateways that cost more than their iterations.
        num_prefill=min(plan.num_prefill, 2),
        num_decode=min(plan.num_decode, 2),
        num_colocated=min(plan.num_colocated, 2),
        iteration_s=random.choice([0.05, 0.3, 1.0]),
        max_latency_s=random.choice([0.0003, 0.01, 0.1]),
        duration_s=random.choice([30.0, 60.0, 120.0]),
        front=front,
    )


def _island(seed: int, policies: Sequence[str]) -> Plan:
    random = Random(f"plan of {seed}")
    policy = random.choice(list(policies) or list(POLICIES))
    block_size = random.choice([4, 8, 16, 16, 32])
    # The blocks of the longest request.
    longest = -(-MAX_MODEL_LEN // block_size)
    is_colocated = random.random() < 0.3
    preemption_mode = Random(f"preemption of {seed}").choice(PREEMPTION_MODES)
    begin_alike = Random(f"beginnings of {seed}").random() < 0.4
    may_share = is_colocated and REVERSED in POLICIES[policy].layouts and preemption_mode != "recompute"
    return Plan(
        seed=seed,
        policy=policy,
        clients="direct",
        num_prefill=0 if is_colocated else random.choice([1, 1, 2, 3]),
        num_decode=0 if is_colocated else random.choice([1, 2, 2, 3]),
        num_colocated=random.choice([1, 2, 3]) if is_colocated else 0,
        num_gateways=random.choice([1, 2]),
        link="host" if is_colocated else random.choice(LINKS),
        block_size=block_size,
        pool_blocks=round(longest * random.choice([1, 1.5, 3, 12])),
        prefill_blocks=round(longest * random.choice([2, 2.5, 6])),
        decode_blocks=round(longest * random.choice([1, 1.25, 2.5, 6])),
        max_num_seqs=random.choice([2, 6, 16]),
        max_num_batched_tokens=random.choice([32, 64, 128, 512]),
        staging_share=random.choice([0.1, 0.2, 0.5]),
        enable_prefix_caching=(random.random() < 0.6) or begin_alike,
        length_error=random.choice([None, 0.0, 0.5, 2.0]),
        min_batch_requests=random.choice([1, 4, 12]),
        admit_ahead=random.choice([1, None, 32]),
        be_share=random.choice([0.0, 0.05, 0.3]),
        rt_headroom=random.choice([0.0, 0.05, 0.3]),
        iteration_s=random.choice([0.5, 1.0, 2.0]),
        copy_iterations=random.choice([0.01, 0.3, 2.0]),
        max_latency_s=random.choice([0.0003, 0.01, 0.2]),
        is_encoded=random.random() < 0.25,
        silence_s=random.choice([10.0, 10.0, 30.0]),
        orphan_s=random.choice([2.0, 10.0]),
        restart_s=random.choice([0.0, 1.0, 5.0]),
        load=random.choice([0.6, 1.0, 1.5]),
        be_part=random.choice([0.0, 0.3, 0.6, 1.0]),
        duration_s=random.choice([120.0, 300.0, 600.0]),
        preemption_mode=preemption_mode,
        share_blocks=may_share and Random(f"ends of {seed}").random() < 0.7,
        hidden_cache=is_colocated and policy in _KEEP_INPUTS and Random(f"inputs of {seed}").random() < 0.7,
        change_roles=not is_colocated and Random(f"roles of {seed}").random() < 0.4,
        begin_alike=begin_alike,
        window=Random(f"window of {seed}").choice(WINDOWS),
        check_share=0.3 if Random(f"checks of {seed}").random() < 0.5 else 1.0,
    )
