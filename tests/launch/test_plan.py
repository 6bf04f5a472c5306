"""What is planned and what is refused, before any process exists."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.kv.span import KvSpan
from alignedserve.launch.config import LaunchConfig
from alignedserve.launch.plan import (
    DEFAULT_POOL_BYTES,
    IslandPlan,
    Node,
    check,
    check_quantised,
    plan_gateways,
    plan_island,
    plan_island_gateway,
)
from alignedserve.launch.settings import Settings, settings_of
from alignedserve.models.locate import Location, locate_model
from alignedserve.models.presets import PRESETS
from alignedserve.protocol.address import RouterAddress
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from tests import quantised_checkpoints
from tests.quantised_checkpoints import FORMATS
from tests.tiny_adapters import write_adapter

MODEL = str(demo.MODEL_DIR)
FOUND = locate_model(MODEL)
GIB = 1 << 30
NODE = Node("here", None, num_gpus=0, free_shm_bytes=8 * GIB, router=RouterAddress("127.0.0.1", 1, "secret"))
# of the demo model: 4 layers, k and v, 2 heads, 16 slots, 64 values of two bytes
BLOCK_BYTES = 4 * 2 * 2 * 16 * 64 * 2


def told(engine: EngineConfig | None = None, **options: object) -> Settings:
    """`options` are flags' names and values."""
    settings = settings_of(MODEL, options)
    return replace(settings, engine=engine) if engine else settings


def island(settings: Settings, node: Node = NODE) -> IslandPlan:
    return plan_island(settings, FOUND, node, "prefix")


def test_an_island_has_a_router_a_pool_and_the_instances() -> None:
    plan = island(told(prefill_instances=2, decode_instances=3))
    names = ["router", "kvpool-0", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [spec.instance_id for spec in plan.processes] == names
    router, pool, *instances = plan.processes
    assert router.config.expected == {spec.instance_id: spec.role for spec in (pool, *instances)}
    assert pool.config.segment_prefix == "prefix-here"
    assert plan.num_pool_blocks == DEFAULT_POOL_BYTES // BLOCK_BYTES == pool.config.num_blocks


def test_adapters_are_checked_before_any_process_is_there(tmp_path: Path) -> None:
    """And every process finds them, wherever it runs."""
    adapter = write_adapter(tmp_path / "adapter", demo.MODEL_DIR, 1)
    other = write_adapter(tmp_path / "other", demo.MODEL_DIR, 1, use_dora=True)
    relative = os.path.relpath(adapter)
    settings = told(lora_modules=(f"mine={relative}",))
    check(settings, FOUND)
    plan = island(settings)
    (gateway,) = plan_gateways(settings, FOUND, [plan], "unix:///redis.sock")
    for spec in (gateway, *plan.processes[2:]):
        assert spec.config.engine.adapters == (("mine", str(adapter)),)
    assert gateway.config.fingerprint["adapters"] == "mine"
    with pytest.raises(ValueError, match="use_dora is True"):
        check(told(lora_modules=(f"mine={relative}", f"other={other}")), FOUND)
    with pytest.raises(ValueError, match="its rank r is 8; must be at most max_lora_rank=4"):
        check(told(lora_modules=(f"mine={adapter}",), max_lora_rank=4), FOUND)
    with pytest.raises(ValueError, match="lora_modules: 'mine' is what the model itself is served as"):
        told(lora_modules=(f"mine={adapter}",), served_model_name="mine")


def test_all_parts_agree_on_what_was_left_open() -> None:
    plan = island(told())
    engines = {spec.config.engine for spec in plan.processes[2:]}
    assert len(engines) == 1
    engine = engines.pop()
    assert (engine.model, engine.dtype, engine.device, engine.use_tqdm) == (MODEL, "bfloat16", "cpu", False)
    (gateway,) = plan_gateways(told(), FOUND, [plan], "unix:///redis.sock")
    assert gateway.config.fingerprint == {"model": engine.model}
    assert gateway.config.routers == (NODE.router,) and gateway.config.model_name == MODEL


@pytest.mark.parametrize(
    ("given", "num_lines"),
    [
        ({}, 512),
        ({"decode_instances": 3, "prefill_instances": 2}, 1536),
        ({"colocated_instances": 2, "max_num_seqs": 100}, 400),
        ({"max_num_seqs": 3}, 64),
        ({"max_num_seqs": 40000}, 65536),
        ({"batch_max_num_lines": 7}, 7),
    ],
)
def test_jobs_run_twice_the_lines_that_instances_run(given: dict[str, Any], num_lines: int) -> None:
    settings = told(**given)
    (gateway,) = plan_gateways(settings, FOUND, [island(settings)], "unix:///redis.sock")
    assert gateway.config.batches.num_lines == num_lines


def test_the_gateway_is_told_whose_pages_may_call() -> None:
    wanted = told(allowed_origins=("https://a.example",), allowed_hosts=("a.example",))
    (gateway,) = plan_gateways(wanted, FOUND, [island(wanted)], "unix:///redis.sock")
    assert gateway.config.http.allowed_origins == ("https://a.example",)
    assert gateway.config.http.allowed_hosts == ("a.example",)


def test_instances_are_told_of_the_link_that_the_router_stages_for() -> None:
    plan = island(replace(told(), router=RouterConfig(link="gloo")))
    assert [spec.config.transfers.transport for spec in plan.processes[2:]] == ["gloo", "gloo"]
    assert plan.processes[0].config.router.link == "gloo"


def test_the_plan_chooses_a_link_and_says_its_name_to_all() -> None:
    for options, node, link in (
        ({}, NODE, "host"),
        ({}, replace(NODE, num_gpus=2), "ipc"),
        ({"prefill_instances": 1}, replace(NODE, num_gpus=1), "ipc"),
        ({}, replace(NODE, num_gpus=1), "host"),
        ({"link": "ipc"}, NODE, "ipc"),
        ({"link": "ipc", "colocated_instances": 2}, NODE, "host"),
    ):
        plan = island(told(**options), node)
        assert {spec.config.transfers.transport for spec in plan.processes[2:]} == {link}
        assert plan.processes[0].config.router.link == link


def test_instances_that_share_a_gpu_can_map_each_others_memory() -> None:
    apart = told(EngineConfig(MODEL, device="cuda"), prefill_instances=1)
    wanted = replace(apart, router=RouterConfig(link="ipc"))
    plan = island(wanted, replace(NODE, num_gpus=1))
    assert [(spec.num_gpus, spec.config.transfers.transport) for spec in plan.processes[2:]] == [
        (0.5, "ipc")
    ] * 2


def test_a_gpu_each_where_there_are_gpus() -> None:
    plan = island(told(prefill_instances=2), replace(NODE, num_gpus=3))
    assert [spec.num_gpus for spec in plan.processes] == [0, 0, 1, 1, 1]
    assert {spec.config.engine.device for spec in plan.processes[2:]} == {"cuda"}
    on_cpu = island(told(EngineConfig(MODEL, device="cpu")), replace(NODE, num_gpus=8))
    assert {spec.num_gpus for spec in on_cpu.processes} == {0}


@pytest.mark.parametrize(
    ("num_instances", "num_gpus", "each"),
    [(2, 2, 1.0), (2, 1, 0.5), (3, 2, 0.5), (3, 1, 0.3333), (4, 3, 0.5)],
)
def test_instances_share_gpus_where_there_are_too_few(num_instances: int, num_gpus: int, each: float) -> None:
    engine = EngineConfig(MODEL, gpu_memory_utilization=0.9)
    plan = island(told(engine, prefill_instances=num_instances - 1), replace(NODE, num_gpus=num_gpus))
    instances = plan.processes[2:]
    assert [spec.num_gpus for spec in instances] == [each] * num_instances
    assert plan.shares_gpus == (each < 1)
    for spec in instances:
        assert spec.config.engine.gpu_memory_utilization == pytest.approx(0.9 * each)
        assert spec.config.engine.device == "cuda"


def test_instances_of_several_ranks_have_a_gpu_for_each() -> None:
    engine = EngineConfig(MODEL, gpu_memory_utilization=0.9, tensor_parallel_size=4)
    plan = island(told(engine), replace(NODE, num_gpus=8))
    assert [(spec.role, spec.num_gpus) for spec in plan.processes[2:]] == [("prefill", 4), ("decode", 4)]
    for spec in plan.processes[2:]:
        assert spec.config.engine.gpu_memory_utilization == 0.9
        assert spec.config.transfers.transport == "host"
    alone = island(told(engine), replace(NODE, num_gpus=4))
    assert [(spec.role, spec.num_gpus) for spec in alone.processes[2:]] == [("colocated", 4)]
    on_cpu = told(replace(engine, device="cpu"), link="ipc")
    assert island(on_cpu, replace(NODE, num_gpus=4)).processes[2].config.transfers.transport == "ipc"

    few = replace(NODE, name="here", num_gpus=7)
    with pytest.raises(ValueError, match="tensor_parallel_size=4: 2 instances take 8 GPUs, and here has 7"):
        island(told(engine, prefill_instances=1), few)
    with pytest.raises(
        ValueError, match="link='ipc': instances of 4 GPUs each hand KV over through the host"
    ):
        island(told(engine, link="ipc"), replace(NODE, num_gpus=8))


def test_one_gpu_alone_is_one_colocated_instance() -> None:
    plan = island(told(), replace(NODE, num_gpus=1))
    assert [(spec.role, spec.num_gpus) for spec in plan.processes[2:]] == [("colocated", 1.0)]
    assert plan.processes[0].config.expected == {"kvpool-0": "kvpool", "colocated-0": "colocated"}
    assert [spec.role for spec in island(told()).processes[2:]] == ["prefill", "decode"]


def test_colocated_instances_are_instead_of_the_others() -> None:
    wanted = replace(told(colocated_instances=3), router=RouterConfig(link="gloo"))
    instances = island(wanted).processes[2:]
    assert [spec.instance_id for spec in instances] == ["colocated-0", "colocated-1", "colocated-2"]
    assert {spec.config.transfers.transport for spec in instances} == {"host"}
    with pytest.raises(ValueError, match="colocated_instances=1 and decode_instances=2: choose one"):
        told(colocated_instances=1, decode_instances=2)


def test_on_a_cpu_nothing_is_shared() -> None:
    plan = island(told(EngineConfig(MODEL, gpu_memory_utilization=0.9)))
    assert not plan.shares_gpus
    assert {spec.config.engine.gpu_memory_utilization for spec in plan.processes[2:]} == {0.9}


def test_no_gpu_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="device='cuda': here has no GPU"):
        island(told(EngineConfig(MODEL, device="cuda")))


def test_instances_that_change_roles_are_told_in_which_they_start() -> None:
    changing = RouterConfig(change_roles=True)
    wanted = replace(told(prefill_instances=2, decode_instances=1), router=changing)
    plan = island(wanted)
    assert [spec.config.first_role for spec in plan.processes[2:]] == ["prefill", "prefill", "decode"]
    assert plan.processes[0].config.router.change_roles
    fixed = island(told(prefill_instances=2, decode_instances=1))
    assert {spec.config.first_role for spec in fixed.processes[2:]} == {None}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prefill_instances": 1, "decode_instances": 1}, "on here there are 1 prefill and 1 decode$"),
        ({"colocated_instances": 4}, "on here there are 4 colocated$"),
        ({"prefill_instances": 2, "cost_profile": "none"}, "change_roles: needs a cost_profile"),
    ],
)
def test_roles_that_can_not_change_are_refused(options: dict[str, Any], complaint: str) -> None:
    wanted = replace(told(**options), router=RouterConfig(change_roles=True))
    with pytest.raises(ValueError, match=complaint):
        island(wanted)


def test_nccl_needs_a_gpu_for_each() -> None:
    wanted = replace(told(prefill_instances=1), router=RouterConfig(link="nccl"))
    assert island(wanted, replace(NODE, num_gpus=2)).processes[2].config.transfers.transport == "nccl"
    with pytest.raises(ValueError, match="link='nccl': instances would have to share GPUs on here"):
        island(wanted, replace(NODE, num_gpus=1))


@pytest.mark.parametrize(
    ("wanted", "free", "message"),
    [
        (4 * GIB, 2 * GIB, f"pool_memory_bytes={4 * GIB}: {2 * GIB} bytes of shared memory are free on here"),
        (BLOCK_BYTES * 9, GIB, "holds 9 blocks .* one request of max_model_len=2048 tokens needs 128"),
        # as in a container with little shared memory
        (None, 1 << 21, "holds 32 blocks .*; 2097152 bytes of shared memory are free on here"),
    ],
)
def test_too_little_shared_memory_is_refused_with_the_numbers(
    wanted: int | None, free: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        island(told(pool_memory_bytes=wanted), replace(NODE, free_shm_bytes=free))


def test_the_pool_takes_no_more_than_half_of_what_is_free_unasked() -> None:
    plan = island(told(), replace(NODE, free_shm_bytes=GIB))
    assert plan.num_pool_blocks == GIB // 2 // BLOCK_BYTES


def test_a_pool_that_nobody_sized_holds_one_request_of_the_longest_kind() -> None:
    large = Location("llama-3.1-70b", PRESETS["llama-3.1-70b"], directory=None, is_dummy=True)
    engine = EngineConfig(large.name, load_format="dummy", device="cpu", max_model_len=4096)
    # 80 layers, k and v, 8 heads, 16 slots, 128 values of two bytes: 1.25 GiB
    num_bytes = 4096 // 16 * (80 * 2 * 8 * 16 * 128 * 2)
    assert plan_island(told(engine), large, NODE, "prefix").num_pool_blocks == 4096 // 16
    # What is set stays, and so does the share.
    for wanted, free, found in (
        (GIB, 8 * GIB, GIB),
        (None, 2 * num_bytes - 2, num_bytes - 1),
    ):
        with pytest.raises(ValueError, match=f"pool_memory_bytes={found}: holds .* tokens needs 256"):
            plan_island(
                told(engine, pool_memory_bytes=wanted), large, replace(NODE, free_shm_bytes=free), "prefix"
            )


def test_a_block_of_the_pool_has_those_of_all_groups_and_the_pool_knows_what_decodes_hold() -> None:
    gemma = Location("gemma-3-4b", PRESETS["gemma-3-4b"], directory=None, is_dummy=True)
    engine = EngineConfig(gemma.name, load_format="dummy", device="cpu", max_model_len=4096)
    plan = plan_island(told(engine), gemma, NODE, "prefix")
    # 7 groups of 5 layers, k and v, 4 heads, 16 slots, 256 values of two bytes
    assert plan.form.num_groups == 7 and plan.form.column_bytes == 7 * 5 * 2 * 4 * 16 * 256 * 2
    assert plan.num_pool_blocks == DEFAULT_POOL_BYTES // plan.form.column_bytes
    pool = plan.processes[1].config
    assert (pool.form, pool.pool.span) == (plan.form, KvSpan(16, 1024, 1, 1, 6))
    with pytest.raises(ValueError, match="holds 255 blocks of 2293760 bytes, .* needs 256"):
        wanted = told(engine, pool_memory_bytes=256 * plan.form.column_bytes - 1)
        plan_island(wanted, gemma, NODE, "prefix")


def test_a_pool_whose_model_has_no_window_counts_what_it_has() -> None:
    assert island(told()).processes[1].config.pool.span is None


def test_a_pool_of_bytes_holds_more_blocks_and_all_parts_know() -> None:
    # for each of 4 x 2 x 2 x 64 channels a byte a slot, and two bounds of two bytes
    block_bytes = 4 * 2 * 2 * 64 * (16 + 2 * 2)
    plan = island(told(pool_kv_dtype="int8"))
    assert (
        plan.num_pool_blocks == DEFAULT_POOL_BYTES // block_bytes > 1.59 * (DEFAULT_POOL_BYTES // BLOCK_BYTES)
    )
    _, pool, *instances = plan.processes
    assert pool.config.form == plan.form and plan.form.block_bytes == block_bytes
    assert [each.config.transfers.pool_kv_dtype for each in instances] == ["int8", "int8"]


def test_all_instances_check_the_same_share_of_blocks() -> None:
    _, _, *instances = island(told(verify_blocks=0.25)).processes
    assert [each.config.transfers.verify_blocks for each in instances] == [0.25, 0.25]


def test_instances_and_pool_have_kv_in_8_bits_alike() -> None:
    plan = island(told(EngineConfig(MODEL, kv_cache_dtype="int8")))
    _, pool, *instances = plan.processes
    # for each of 4 x 2 x 2 heads of 64 a byte a value, and a scale of four
    assert pool.config.form.block_bytes == plan.form.block_bytes == 4 * 2 * 2 * 16 * (64 + 4)
    assert [each.config.engine.kv_cache_dtype for each in instances] == ["int8", "int8"]
    with pytest.raises(
        ValueError, match="^pool_kv_dtype='int8' and kv_cache_dtype='fp8': one of them must be"
    ):
        check(told(EngineConfig(MODEL, kv_cache_dtype="fp8"), pool_kv_dtype="int8"), FOUND)


def test_blocks_are_shared_by_colocated_instances_under_bros_only() -> None:
    plan = island(told(policy="bros", share_blocks=True, colocated_instances=2))
    assert all(each.config.scheduling.share_blocks for each in plan.processes[2:])
    with pytest.raises(ValueError, match="prefill and decode instances can't; give --colocated-instances"):
        island(told(policy="bros", share_blocks=True))
    with pytest.raises(ValueError, match="pool_kv_dtype='int8': must be auto then"):
        island(told(policy="bros", share_blocks=True, colocated_instances=1, pool_kv_dtype="int8"))
    with pytest.raises(ValueError, match="policy 'priority' can't; it must be one of bros"):
        check(told(policy="priority", share_blocks=True), FOUND)


def test_a_model_is_looked_for_once_on_this_machine_and_by_name_on_others(tmp_path: Path) -> None:
    by_name = told(EngineConfig("org/name"))
    assert island(by_name).processes[2].config.engine.model == MODEL
    joined = replace(by_name, launch=LaunchConfig(address="auto"))
    assert island(joined).processes[2].config.engine.model == "org/name"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("port", 0, "port=0: must be from 1 to 65535"),
        ("prefill_instances", 0, "prefill_instances=0: must be from 1"),
        ("decode_instances", -1, "decode_instances=-1: must be from 1"),
        ("pool_memory_bytes", 0, "pool_memory_bytes=0: must be from 1"),
        ("pool_kv_dtype", "fp8", "pool_kv_dtype='fp8': must be one of auto, int8"),
        ("verify_blocks", 1.5, "verify_blocks=1.5: must be from 0 to 1"),
        ("verify_blocks", math.nan, "verify_blocks=nan: must be from 0 to 1"),
        ("min_islands", 0, "min_islands=0: must be from 1"),
        ("max_islands", 0, "max_islands=0: must be from 1"),
        ("min_islands", 2, "min_islands=2: this machine is one island; give the --address"),
        ("served_model_name", "", "served_model_name='': must not be empty"),
        ("length_predictor", "luck", "length_predictor='luck': must be one of hash, sentence, none"),
        ("length_predictor_entries", 0, "length_predictor_entries=0: must be from 1"),
    ],
)
def test_options_have_ranges(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        told(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_num_queued_reqs", 0, "max_num_queued_reqs=0: must be from 1"),
        ("batch_share", math.nan, "batch_share=nan: must be from 0.001 to 1"),
        ("near_share", -1.0, "near_share=-1.0: must be from 0.001 to 1"),
        ("orphan_s", -1.0, "orphan_s=-1.0: must be from 0 "),
        ("silence_s", 0.0, "silence_s=0.0: must be from 0.1"),
        ("prefill_window", 0, "prefill_window=0: must be from 1"),
    ],
)
def test_options_of_the_router_and_of_scheduling_have_ranges(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind = RouterConfig if option in {field.name for field in fields(RouterConfig)} else SchedulingConfig
        kind(**{option: value})


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (RouterConfig(link="rope"), "link='rope': must be one of auto, nccl, gloo, ipc, host$"),
        (RouterConfig(link="nccl"), "link='nccl': both instances need a GPU"),
    ],
)
def test_links_that_cannot_be_are_refused(router: RouterConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        island(replace(told(), router=router))


def test_what_needs_no_place_is_checked_before_there_is_one() -> None:
    check(told(), FOUND)
    with pytest.raises(ValueError, match="policy='best': must be one of aligned, priority, fcfs"):
        check(replace(told(), scheduling=SchedulingConfig("best")), FOUND)
    with pytest.raises(ValueError, match="link='rope': must be one of auto, nccl, gloo, ipc, host$"):
        check(told(link="rope"), FOUND)
    with pytest.raises(ValueError, match="slo_tbt_ms=0.5: must be 0 or from 1 to 60000"):
        told(slo_tbt_ms=0.5)
    with pytest.raises(ValueError, match="max_model_len=9999: the model was made for at most 2048"):
        check(told(EngineConfig(MODEL, max_model_len=9999)), FOUND)
    with pytest.raises(ValueError, match="device='cuda:1': must be one of auto, cpu, cuda$"):
        check(told(EngineConfig(MODEL, device="cuda:1")), FOUND)


def test_a_checkpoint_that_is_not_what_its_config_says_is_refused(tmp_path: Path) -> None:
    """Before any process starts: the launcher looks at the files' headers."""
    directory, plain = quantised_checkpoints.build("llama", FORMATS["awq-64"], tmp_path)
    settings = told(EngineConfig(str(directory), skip_tokenizer_init=True))
    check(settings, locate_model(directory))
    check_quantised(settings, locate_model(directory))
    plan_island(settings, locate_model(directory), replace(NODE, num_gpus=2), "prefix")
    quantised_checkpoints.change_config(directory, group_size=128)
    with pytest.raises(ValueError, match=r"q_proj\.qzeros has shape \(2, 16\); must be \(1, 16\)"):
        check_quantised(settings, locate_model(directory))
    (directory / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.qweight is missing"):
        check_quantised(settings, locate_model(directory))


def test_weights_in_fewer_bits_run_on_gpus_those_of_mixtures_too() -> None:
    quantised = EngineConfig(MODEL, quantization="int8", max_model_len=2048)
    for model in (FOUND, locate_model("mixtral-8x7b", "dummy", None)):
        check(told(quantised), model)
        plan_island(told(quantised), model, replace(NODE, num_gpus=2), "prefix")


# A K for each head, as OPT has.
OPT = replace(
    FOUND, config=replace(FOUND.config, num_kv_heads=FOUND.config.hidden_size // FOUND.config.head_dim)
)


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"policy": "apt"}, FOUND, "hidden_cache: this model's K is 128 values wide"),
        ({"policy": "fcfs"}, OPT, "hidden_cache: policy fcfs can't keep inputs; these can: apt"),
        ({"policy": "apt", "cost_profile": "none"}, OPT, "hidden_cache: needs a cost_profile"),
    ],
    ids=str,
)
def test_a_hidden_cache_that_cannot_be_is_refused(
    options: dict[str, Any], model: Location, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(told(hidden_cache=True, **options), model)


def test_a_hidden_cache_takes_colocated_instances() -> None:
    check(told(hidden_cache=True, policy="apt"), OPT)
    with pytest.raises(
        ValueError, match="hidden_cache: needs colocated instances; on here there are 1 prefill"
    ):
        plan_island(told(hidden_cache=True, policy="apt"), OPT, NODE, "prefix")
    plan = plan_island(told(hidden_cache=True, policy="apt", colocated_instances=2), OPT, NODE, "prefix")
    assert [spec.config.engine.hidden_cache for spec in plan.processes[2:]] == [True, True]


ON_ISLANDS: dict[str, Any] = {
    "address": "auto",
    "redis_url": "redis://10.0.0.9",
    "island_gateways": True,
    "host": "0.0.0.0",  # noqa: S104
    "allow_no_auth": True,
}


def test_the_gateway_of_an_island_is_like_the_others_but_for_what_is_of_its_host() -> None:
    settings = told(**ON_ISLANDS, gateways=2)
    check(settings, FOUND)
    node = replace(NODE, name="node-3", node_id="id", number=3)
    plan = island(settings, node)
    launcher = RouterAddress("10.0.0.1", 1, "secret")
    first, _ = plan_gateways(settings, FOUND, [plan], "redis://10.0.0.9", launcher, "/tmp/control")
    gateway = plan_island_gateway(first, node)
    assert (gateway.role, gateway.instance_id) == ("gateway", "gateway-of-island-3")
    config = gateway.config
    assert (config.routers, config.first_island, config.num_gateways) == ((NODE.router,), 3, 1)
    assert (config.control, config.launcher, config.store_url) == (None, launcher, "redis://10.0.0.9")
    router = plan.processes[0].config
    assert router.gateways == ("gateway-0", "gateway-1", "gateway-of-island")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"address": None}, "island_gateways: this machine is one island"),
        ({"redis_url": None}, "island_gateways: the private Redis is for one host; give a --redis-url"),
        ({"host": "127.0.0.1"}, "island_gateways: host='127.0.0.1' is an address of this host"),
    ],
)
def test_gateways_on_islands_need_what_all_hosts_have(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(told(**ON_ISLANDS | changes), FOUND)


def test_traces_without_opentelemetry_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(None, {"otlp_endpoint": "http://127.0.0.1:4318"})
    check(settings, FOUND)
    monkeypatch.delitem(sys.modules, "alignedserve.gateway.telemetry.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ValueError, match=r"otlp_endpoint: needs OpenTelemetry; pip install 'alignedserve\[otel\]'"
    ):
        check(settings, FOUND)
