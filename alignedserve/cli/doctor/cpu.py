"""Checks of the CPU: available cores and kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.cgroup import cpu_quota
from alignedserve.cli.doctor.finding import Finding, counted, fail, note, ok, warn
from alignedserve.engine.choices import choose_backend
from alignedserve.kernels.cpu.build import PREBUILT_DIR, cpu_features
from alignedserve.kernels.cpu.library import LoadedLibrary, loaded
from alignedserve.ops import UNAVAILABLE, fastest, make_ops

# The instruction sets for which the kernels have code, the fastest first.
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "fma", "asimd")


def check_cores(case: Case) -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    # Instances on GPUs do not compute on the cores.
    num_instances = case.num_instances if case.is_cpu else 0
    yield cores_finding(num_cores, cpu_quota(), num_instances, os.environ.get("OMP_NUM_THREADS"))


def cores_finding(
    num_cores: int, quota: float | None, num_instances: int, num_threads: str | None
) -> Finding:
    """Returns what was found about the cores.

    `num_instances` is the number of instances that compute on them. `num_threads` is OMP_NUM_THREADS, if it is set.
    """
    text = counted(num_cores, "core")
    if quota is not None and quota < num_cores:
        return warn(
            f"{text}, but a quota of {quota:g}: threads are throttled",
            "raise the container's CPU limit, pin it to as many cores as its quota, or set OMP_NUM_THREADS",
        )
    if num_cores < num_instances:
        return warn(
            f"{text} for {counted(num_instances, 'instance')}: they take turns",
            "fewer instances, or more cores",
        )
    if num_threads is not None and num_instances:
        return note(
            f"{text} for {counted(num_instances, 'instance')}, OMP_NUM_THREADS={num_threads} for each"
        )
    return ok(f"{text} for {counted(num_instances, 'instance')}" if num_instances else text)


def check_backend(case: Case) -> Iterator[Finding]:
    """Makes the backend as an instance does. Native kernels that are not built yet are built now."""
    name, head_dim = case.engine.attention_backend, case.model.config.head_dim
    chosen = choose_backend(case.engine, case.model.config)
    wanted = fastest(case.device) if chosen == "auto" else chosen
    begun_s = time.monotonic()
    try:
        make_ops(wanted, case.device, case.torch_dtype, head_dim, quantization=case.engine.quantization)
    except UNAVAILABLE as error:
        if name == "auto":
            yield warn(f"backend torch, which is slow, in place of {wanted}: {error}", "follow the message")
        else:
            yield fail(str(error), "follow the message, or use --attention-backend auto")
        return
    if wanted == "cpu":
        yield from library_findings(loaded(), time.monotonic() - begun_s)
    else:
        yield ok(f"backend {wanted}")


def library_findings(library: LoadedLibrary, took_s: float) -> Iterator[Finding]:
    built = "built before" if library.was_there else f"built in {took_s:.1f} s"
    if library.path.parent == PREBUILT_DIR:
        built = f"from the wheel ({library.path.stem.partition('-')[2]})"
    if library.why_slower:
        yield warn(
            f"backend cpu, {built}, which is slower on this CPU: {library.why_slower}", "follow the message"
        )
    else:
        yield native_finding(built, cpu_features(), library.is_refused_amx)


def native_finding(built: str, features: str, is_refused_amx: bool = False) -> Finding:
    found = [each for each in INSTRUCTIONS if each in features.split()]
    if is_refused_amx:
        return warn(
            f"backend cpu, {built}, without AMX, which the system does not let this process use",
            "Linux 5.16 or later, in a sandbox that lets processes ask for AMX",
        )
    if not found:
        return warn(
            f"backend cpu, {built}, without vector instructions, which is slow", "a CPU with FMA or AVX-512"
        )
    return ok(f"backend cpu, {built}, with {', '.join(found)}")
