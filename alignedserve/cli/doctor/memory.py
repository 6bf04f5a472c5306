"""Checks of memory: whether weights, KV and the pool fit the machine, its GPUs and its shared memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from alignedserve.cli.doctor import cgroup
from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, NotChecked, counted, fail, in_bytes, note, ok, warn
from alignedserve.cli.doctor.model import num_weight_bytes
from alignedserve.engine.choices import (
    DEFAULT_CPU_KV_BYTES,
    check_ranks,
    choose_num_blocks,
    span_of_requests,
)
from alignedserve.engine.gpu_memory import MemoryUse, kv_share
from alignedserve.kv.span import KvSpan
from alignedserve.launch.plan import free_shm_bytes

# Largest number of ranks to suggest: most machines have at most eight GPUs.
_MOST_RANKS = 8


def check_kv(case: Case) -> Iterator[Finding]:
    try:
        num_blocks = _num_kv_blocks(case)
    except ValueError as error:
        num_gpus = None if case.is_cpu else num_gpus_that_fit(case)
        if num_gpus is None:
            raise
        yield fail(str(error), f"--tensor-parallel-size {num_gpus}, with as many GPUs like these")
        return
    num_tokens = num_blocks // case.form.num_groups * case.form.block_size
    per_token = case.form.column_bytes // case.form.block_size
    is_known = case.is_cpu or case.engine.kv_cache_memory_bytes
    has_window = _span(case).window > 0
    about = "" if is_known else "about " if has_window else "at most "
    more = " or more" if has_window else ""
    yield ok(
        f"{in_bytes(per_token)} a token{_kind(case)}; each instance: {about}{num_tokens} tokens{more} "
        f"({in_bytes(num_blocks * case.form.block_bytes)}), "
        f"{counted(num_blocks // _blocks_of_longest(case), 'request')} of {case.max_model_len}{_window(case)}"
    )


def num_gpus_that_fit(case: Case) -> int | None:
    """Returns the smallest number of GPUs like these that an instance fits on; None if it exceeds eight."""
    size = case.engine.tensor_parallel_size
    while (size := 2 * size) <= _MOST_RANKS:
        divided = Case(replace(case.settings, engine=replace(case.engine, tensor_parallel_size=size)))
        divided.gpus = case.gpus
        try:
            check_ranks(divided.engine, case.model.config)
            _num_kv_blocks(divided)
        except ValueError:
            continue
        return size
    return None


def _span(case: Case) -> KvSpan:
    """Returns the blocks that a decoding request holds."""
    groups = case.settings.layer_groups(case.model.config)
    return span_of_requests(case.engine, groups, has_whole_prompts=False)


def _blocks_of_longest(case: Case) -> int:
    return _span(case).num_held(0, case.max_model_len)


def _window(case: Case) -> str:
    span = _span(case)
    if _blocks_of_longest(case) == span.num_groups * span.num_columns(case.max_model_len):
        return ""
    if span.has_state:
        return "; layers with a state hold only the last one while decoding"
    layers = "; sliding-window layers" if span.num_full_groups else "; they"
    return f"{layers} hold only the last {span.window} tokens while decoding"


def _kind(case: Case) -> str:
    return "" if case.form.encoding == "kv" else f" in {case.engine.kv_cache_dtype}"


def check_plan(case: Case) -> Iterator[Finding]:
    """Checks the plan as `serve` does before it starts a process, above all the pool's memory."""
    num_bytes = case.island.num_pool_blocks * case.island.form.column_bytes
    yield ok(
        f"{counted(case.num_instances, 'instance')}, link {case.instance.transfers.transport}; "
        f"a pool of {in_bytes(num_bytes)}{_pool_tokens(case)}, {in_bytes(free_shm_bytes())} free in /dev/shm"
    )


def _pool_tokens(case: Case) -> str:
    form = case.island.form
    encoding = ", as int8" if form.encoding == "kv-int8" else ""
    return f" for {case.island.num_pool_blocks * form.block_size} tokens{encoding}"


def check_memory(case: Case) -> Iterator[Finding]:
    num_instances = case.num_instances if case.is_cpu else 0
    num_weights = num_kv = num_pool = 0
    try:
        num_weights = num_weight_bytes(case)
        num_kv = _num_kv_blocks(case) * case.form.block_bytes
        num_pool = case.island.num_pool_blocks * case.island.form.column_bytes
    except ValueError:
        # Another check reports the error. The known bytes may already be too many.
        if not num_weights:
            raise NotChecked("complete weights") from None
    yield memory_finding(_num_available(), num_instances * num_weights, num_instances * num_kv, num_pool)


def memory_finding(num_available: int, num_weights: int, num_kv: int, num_pool: int) -> Finding:
    """Compares the needed memory with the available. KV is allocated on first use, everything else at the start."""
    parts = {"weights": num_weights, "pool": num_pool, "KV up to": num_kv}
    text = f"{in_bytes(num_available)} available: "
    text += ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size)
    if num_weights + num_pool > num_available:
        return fail(text, "fewer instances, a smaller --pool-memory-bytes, or more memory")
    if num_weights + num_pool + num_kv > num_available:
        return warn(
            f"{text}: more than available when all KV is in use",
            "a smaller --kv-cache-memory-bytes or --pool-memory-bytes",
        )
    return ok(text)


def check_limits(case: Case) -> Iterator[Finding]:
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield files_finding(num_files, case.settings.limits.max_requests())
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if not case.is_cpu and locked != resource.RLIM_INFINITY:
        yield note(
            f"locked memory is limited to {in_bytes(locked)}: raise ulimit -l if pinning the pool fails"
        )


def files_finding(num_files: int, max_requests: int) -> Finding:
    if num_files == resource.RLIM_INFINITY:
        return ok("open files: no limit")
    if num_files < max_requests:
        return warn(
            f"{num_files} open files, and each client needs one: fewer than --max-requests-per-key={max_requests}",
            f"ulimit -n {2 * max_requests}",
        )
    return ok(f"{num_files} open files")


def _num_kv_blocks(case: Case) -> int:
    """Returns the number of KV blocks of each instance. Raises ValueError if one request does not fit."""
    budget = case.engine.kv_cache_memory_bytes or (
        DEFAULT_CPU_KV_BYTES if case.is_cpu else _gpu_kv_bytes(case)
    )
    groups = case.settings.layer_groups(case.model.config)
    span = span_of_requests(case.engine, groups, "prefill" in case.roles)
    return choose_num_blocks(case.engine, case.form, case.max_model_len, budget, span)


def _gpu_kv_bytes(case: Case) -> int:
    """Returns the bytes that the weights leave.

    An instance also subtracts the memory of a step, which it measures at its start.
    """
    num_ranks = case.engine.tensor_parallel_size
    gpu, num_weights = (
        min(case.gpus.gpus, key=lambda gpu: gpu.num_free_bytes),
        num_weight_bytes(case) // num_ranks,
    )
    use = MemoryUse(gpu.num_total_bytes, gpu.num_free_bytes - num_weights, num_weights)
    # Instances on several GPUs do not share a GPU.
    utilization = case.engine if num_ranks > 1 else case.instance.engine
    return num_ranks * kv_share(use, num_work=0, utilization=utilization.gpu_memory_utilization)


def _num_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    of_machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(of_machine, cgroup.num_free_bytes() or of_machine)
