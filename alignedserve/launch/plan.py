"""Decides and checks which processes the system has, and their settings, before any of them exists."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.engine.choices import check_model, choose_dtype, choose_max_model_len
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import with_absolute_paths
from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.http.keys import owners_of
from alignedserve.instance.config import NO_PROFILE, QUICK_BYTES, InstanceConfig, TransferConfig
from alignedserve.kv.format import BlockFormat, check_pool_kv_dtype
from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.pool import PoolConfig
from alignedserve.kvpool.process import PoolProcessConfig
from alignedserve.launch.settings import Settings, absolute_path, log_of
from alignedserve.models.locate import Location
from alignedserve.protocol.address import RouterAddress
from alignedserve.router.process import RouterProcessConfig
from alignedserve.scheduling.policies import check_policy, make_policy
from alignedserve.store.homes import DirectoryPlace, parse_place
from alignedserve.transport.choose import AUTO, check_link, choose_transport
from alignedserve.types import GATEWAY, ISLAND_GATEWAY, InstanceId, gateway_ids, island_gateway

logger = logging.getLogger(__name__)

# The pool's default size in bytes, or the size of one request of max_model_len if that is larger. It is at most this
# share of the free memory.
DEFAULT_POOL_BYTES = 1 << 30
DEFAULT_POOL_SHARE = 0.5

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Node:
    """A host that becomes an island."""

    # short, and unique within the system
    name: str
    # Ray's id of the node; None if it is the only one
    node_id: str | None
    num_gpus: int
    free_shm_bytes: int
    router: RouterAddress
    # the island's number, which no other island of the system ever has
    number: int = 0
    # whether it has Ray's resource ISLAND
    is_marked: bool = False
    # whether the launcher runs on it
    is_launchers: bool = False


@dataclass(frozen=True)
class ProcessSpec:
    role: str
    instance_id: InstanceId
    config: Any
    # the number of GPUs of the process; less than one if it shares one
    num_gpus: float = 0
    # whether the autoscaler considers its node in use while the process exists
    holds_node: bool = False


@dataclass(frozen=True)
class IslandPlan:
    node: Node
    processes: tuple[ProcessSpec, ...]
    num_pool_blocks: int
    # the format of the pool's blocks
    form: BlockFormat
    # the island's own gateway, if it has one
    gateway: ProcessSpec | None = None

    @property
    def router(self) -> RouterAddress:
        return self.node.router

    @property
    def shares_gpus(self) -> bool:
        return any(0 < spec.num_gpus < 1 for spec in self.processes)


def check(settings: Settings, model: Location) -> None:
    """Checks all that does not depend on the nodes. Raises ValueError."""
    if settings.engine.device not in DEVICES:
        # Ray decides which GPU an instance has.
        raise ValueError(f"device={settings.engine.device!r}: must be one of {', '.join(DEVICES)}")
    check_link(settings.router.link)
    check_model(settings.engine, model.config)
    has_profile = settings.launch.cost_profile != NO_PROFILE
    check_policy(make_policy(settings.scheduling), settings.engine, has_profile)
    _check_island_gateways(settings)
    check_pool_kv_dtype(settings.launch.pool_kv_dtype, settings.engine.kv_cache_dtype)
    owners_of(*settings.keys.lists)
    settings.webhooks.secrets(os.environ)
    settings.http.check_traces()
    choose_max_model_len(settings.engine, model.config)
    _check_adapters(settings.engine, model)


def _check_adapters(engine: EngineConfig, model: Location) -> None:
    if not engine.adapters:
        return
    # These import torch, which the launcher does not need otherwise.
    from alignedserve.models.listed_weights import check_adapters
    from alignedserve.models.lora import other_bases

    check_adapters(model.config, engine.adapters, engine.max_lora_rank)
    for text in other_bases(model.name, engine.adapters):
        logger.warning("%s", text)


def check_quantised(settings: Settings, model: Location) -> None:
    """Compares the headers of a quantised checkpoint's files with its config.json. Raises ValueError."""
    if model.config.quantised is None or model.directory is None:
        return
    # This imports torch, which the launcher does not need otherwise.
    from alignedserve.models.listed_weights import check_files

    check_files(model.config, model.directory, settings.engine.tensor_parallel_size)


def _check_island_gateways(settings: Settings) -> None:
    host = settings.http.host
    if settings.launch.island_gateways and not settings.http.is_on_all_interfaces:
        raise ValueError(f"island_gateways: host={host!r} is an address of this host; give --host 0.0.0.0")


def plan_island(settings: Settings, model: Location, node: Node, segment_prefix: str) -> IslandPlan:
    """Returns the plan of an island on this node. Raises ValueError for settings that do not fit the node."""
    is_cpu = runs_on_cpu(settings.engine, node.num_gpus)
    num_ranks = settings.engine.tensor_parallel_size
    roles = settings.launch.instances(0 if is_cpu else node.num_gpus // num_ranks)
    settings.check_roles(roles, f"on {node.name} there are {_counted(roles)}")
    num_gpus = 0.0 if is_cpu else _gpus_of_each(sum(roles.values()), num_ranks, node)
    link = _link(settings, roles, num_gpus, node)
    engine = _engine(settings, model, num_gpus)
    form = settings.block_format(model.config, engine.dtype).in_pool(settings.launch.pool_kv_dtype)
    num_pool_blocks = _num_pool_blocks(settings, model, form, node)
    log = log_of(settings)
    if settings.launch.address is not None:
        # Several islands may log to one directory.
        log = replace(log, prefix=f"{node.name}-")
    transfers = TransferConfig(
        link,
        quick_bytes=QUICK_BYTES if is_cpu else 0,
        pool_kv_dtype=settings.launch.pool_kv_dtype,
        verify_blocks=settings.launch.verify_blocks,
    )
    common = (node.router, engine, transfers, log, settings.scheduling, settings.launch.cost_profile)
    instances = []
    for role, count in roles.items():
        for name in (InstanceId(f"{role}-{number}") for number in range(count)):
            config = InstanceConfig(name, *common, settings.router.first_role(role))
            instances.append(ProcessSpec(role, name, config, num_gpus=num_gpus))
    pool_name = InstanceId("kvpool-0")
    pool = PoolProcessConfig(
        pool_name,
        node.router,
        f"{segment_prefix}-{node.name}",
        form,
        num_pool_blocks,
        log,
        _pool_config(settings, model),
    )
    expected = {pool_name: "kvpool"} | {each.instance_id: each.role for each in instances}
    router = RouterProcessConfig(
        node.router,
        replace(settings.router, link=link),
        expected,
        settings.launch.event_log,
        log,
        settings.scheduling,
        (*gateway_ids(settings.launch.gateways), *_names_of_island_gateways(settings)),
    )
    processes = (
        ProcessSpec("router", InstanceId("router"), router, holds_node=node.is_marked),
        ProcessSpec("kvpool", pool_name, pool),
        *instances,
    )
    return IslandPlan(node, processes, num_pool_blocks, form)


def runs_on_cpu(engine: EngineConfig, num_gpus: int) -> bool:
    return engine.device == "cpu" or (engine.device == "auto" and not num_gpus)


def plan_gateways(
    settings: Settings,
    model: Location,
    islands: Sequence[IslandPlan],
    store_url: str,
    launcher: RouterAddress | None = None,
    control: str | None = None,
) -> list[ProcessSpec]:
    engine = _local(settings, model)
    num_decoding = sum(spec.role in ("decode", "colocated") for each in islands for spec in each.processes)
    config = GatewayConfig(
        instance_id=GATEWAY,
        num_gateways=settings.launch.gateways,
        routers=tuple(island.router for island in islands),
        engine=engine,
        model_name=settings.served_name,
        http=settings.http,
        fingerprint={"model": engine.model} | ({"adapters": engine.adapter_names} if engine.adapters else {}),
        limits=settings.limits,
        key_owners=owners_of(*settings.keys.lists),
        keys_may_change=settings.keys.has_files,
        store_url=store_url,
        files_at=_absolute(settings.launch.files_at),
        batches=settings.batches.for_slots(num_decoding * engine.max_num_seqs),
        log=log_of(settings),
        lengths=replace(settings.lengths, corpus=absolute_path(settings.lengths.corpus)),
        slo=settings.slo,
        webhooks=settings.webhooks,
        webhook_secrets=settings.webhooks.secrets(os.environ),
        launcher=launcher,
        control=control,
        has_island_gateways=settings.launch.island_gateways,
    )
    names = gateway_ids(settings.launch.gateways)
    return [ProcessSpec("gateway", name, replace(config, instance_id=name)) for name in names]


def plan_island_gateway(gateway: ProcessSpec, node: Node) -> ProcessSpec:
    """Returns the gateway on the host of an island, which is like `gateway`, that of the launcher's host."""
    name = island_gateway(node.number)
    config = replace(
        gateway.config,
        instance_id=name,
        routers=(node.router,),
        first_island=node.number,
        num_gateways=1,
        control=None,
        log=replace(gateway.config.log, prefix=f"{node.name}-"),
    )
    return ProcessSpec("gateway", name, config)


def _names_of_island_gateways(settings: Settings) -> tuple[InstanceId, ...]:
    return (ISLAND_GATEWAY,) if settings.launch.island_gateways else ()


def _absolute(place: str | None) -> str | None:
    """Returns the place with an absolute path, because the gateway may run in another directory."""
    found = place and parse_place(place)
    return str(found.path) if isinstance(found, DirectoryPlace) else place


def _local(settings: Settings, model: Location) -> EngineConfig:
    """Returns settings with absolute paths of the model and of adapters. Processes on this machine need not look for
    the model again."""
    engine = replace(settings.engine, lora_modules=with_absolute_paths(settings.engine.lora_modules))
    if settings.launch.address is not None or model.directory is None:
        return engine
    return replace(engine, model=str(model.directory), revision=None)


def _counted(roles: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {role}" for role, count in roles.items())


def _link(settings: Settings, roles: Mapping[str, int], num_gpus: float, node: Node) -> str:
    """Returns the transport between instances that have `num_gpus` each. Raises ValueError."""
    link = _choose_transport(settings, is_cpu=not num_gpus)
    if "colocated" in roles:
        # KV does not move between instances.
        return "host"
    if link == "nccl" and num_gpus < 1:
        raise ValueError(
            f"link='nccl': instances would have to share GPUs on {node.name}; host and ipc can do that"
        )
    return link


def _engine(settings: Settings, model: Location, num_gpus: float) -> EngineConfig:
    """Returns the engine's settings for an instance that has `num_gpus`."""
    is_cpu = not num_gpus
    return replace(
        _local(settings, model),
        dtype=choose_dtype(settings.engine, model.config, is_cpu),
        device="cpu" if is_cpu else "cuda",
        use_tqdm=False,
        gpu_memory_utilization=settings.engine.gpu_memory_utilization * (min(num_gpus, 1) or 1),
    )


def _choose_transport(settings: Settings, is_cpu: bool) -> str:
    link, num_ranks = settings.router.link, settings.engine.tensor_parallel_size
    if is_cpu or num_ranks == 1:
        return choose_transport(have_cuda=not is_cpu, same_host=True, override=link)
    if link not in (AUTO, "host"):
        raise ValueError(
            f"link={link!r}: instances of {num_ranks} GPUs each hand KV over through the host's memory so far; "
            "auto and host do that"
        )
    return "host"


def _gpus_of_each(num_instances: int, num_ranks: int, node: Node) -> float:
    """Returns the number of GPUs of each instance: one for each rank or, if there are not enough, an equal share of
    one. Raises ValueError."""
    if not node.num_gpus:
        raise ValueError(f"device='cuda': {node.name} has no GPU")
    if num_ranks > 1:
        needed = num_instances * num_ranks
        if needed > node.num_gpus:
            raise ValueError(
                f"tensor_parallel_size={num_ranks}: {num_instances} instances take {needed} GPUs, "
                f"and {node.name} has {node.num_gpus}"
            )
        return num_ranks
    num_sharing = math.ceil(num_instances / node.num_gpus)
    # Ray counts GPUs in ten-thousandths.
    return math.floor(10_000 / num_sharing) / 10_000


def _pool_config(settings: Settings, model: Location) -> PoolConfig:
    groups = settings.layer_groups(model.config)
    span = KvSpan.of(groups, settings.engine.block_size, max_step=1) if groups.window else None
    return PoolConfig(span=span, promised_share=settings.launch.pool_promised_share)


def _num_pool_blocks(settings: Settings, model: Location, form: BlockFormat, node: Node) -> int:
    free = node.free_shm_bytes
    max_model_len = choose_max_model_len(settings.engine, model.config)
    needed = form.num_columns(max_model_len)
    budget = settings.launch.pool_memory_bytes
    if budget is None:
        budget = min(max(DEFAULT_POOL_BYTES, needed * form.column_bytes), int(free * DEFAULT_POOL_SHARE))
    if budget > free:
        raise ValueError(f"pool_memory_bytes={budget}: {free} bytes of shared memory are free on {node.name}")
    if budget // form.column_bytes < needed:
        raise ValueError(
            f"pool_memory_bytes={budget}: holds {budget // form.column_bytes} blocks of {form.column_bytes} bytes, "
            f"but one request of max_model_len={max_model_len} tokens needs {needed}; "
            f"{free} bytes of shared memory are free on {node.name}"
        )
    return budget // form.column_bytes


def free_shm_bytes(directory: str = "/dev/shm") -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize
