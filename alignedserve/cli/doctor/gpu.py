"""Checks of GPUs: whether they are usable, and how KV moves between them."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.finding import Finding, counted, fail, in_bytes, note, ok, warn
from alignedserve.cli.doctor.gpu_facts import Gpu, GpuFacts
from alignedserve.ops import MIN_CAPABILITY


def check_gpus(case: Case) -> Iterator[Finding]:
    num_wanted = case.num_instances * case.engine.tensor_parallel_size
    return gpu_findings(case.gpus, case.engine.device, num_wanted, case.settings.router.link)


def gpu_findings(facts: GpuFacts, device: str, num_instances: int, link: str) -> Iterator[Finding]:
    if device == "cpu":
        yield note("GPUs are not used: --device cpu")
    elif facts.gpus:
        yield from _gpus(facts, num_instances, link)
    else:
        yield _no_gpu(facts, device)


def _no_gpu(facts: GpuFacts, device: str) -> Finding:
    if facts.num_driver_gpus and facts.cuda_version is None:
        text = f"the driver {facts.driver} has {facts.num_driver_gpus} GPUs, but torch is built for CPUs only"
        return fail(text, "install a torch that is built for CUDA, or use --device cpu")
    if facts.num_driver_gpus:
        text = f"torch, built for CUDA {facts.cuda_version}, can't use the GPUs of the driver {facts.driver}"
        return fail(
            text, "a newer driver or a torch for an older CUDA; CUDA_VISIBLE_DEVICES; or --device cpu"
        )
    if device == "cuda":
        return fail("device='cuda': this machine has no GPU", "see nvidia-smi; or use --device cpu")
    return note("no GPU: runs on the CPU")


def _gpus(facts: GpuFacts, num_instances: int, link: str) -> Iterator[Finding]:
    for number, gpu in enumerate(facts.gpus):
        yield _gpu(number, gpu)
    if facts.triton_version is None:
        yield warn(
            "Triton can't be imported: the backend is plain torch, which is slower", "pip install triton"
        )
    else:
        yield ok(f"driver {facts.driver}, torch for CUDA {facts.cuda_version}, Triton {facts.triton_version}")
    if len(facts.gpus) < facts.num_driver_gpus:
        yield note(f"{len(facts.gpus)} of {facts.num_driver_gpus} GPUs are visible: see CUDA_VISIBLE_DEVICES")
    if len(facts.gpus) < num_instances:
        yield note(
            f"{counted(len(facts.gpus), 'GPU')} for {counted(num_instances, 'instance')}: "
            "they share GPUs and their memory"
        )
    if facts.unreachable and link in ("auto", "ipc", "nccl"):
        yield _unreachable(facts.unreachable[0], link)


def _gpu(number: int, gpu: Gpu) -> Finding:
    major, minor = gpu.capability
    text = f"{number}: {gpu.name}, compute capability {major}.{minor}, "
    text += f"{in_bytes(gpu.num_free_bytes)} of {in_bytes(gpu.num_total_bytes)} free"
    if gpu.capability >= MIN_CAPABILITY:
        return ok(text)
    return warn(
        f"{text}: too old for the Triton kernels: the backend is plain torch, which is slower",
        f"a GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer",
    )


def _unreachable(pair: tuple[int, int], link: str) -> Finding:
    text = f"link={link!r}: GPU {pair[0]} can't reach the memory of GPU {pair[1]}"
    if link == "auto":
        return warn(f"{text}: KV moves through host memory instead", "--link host")
    if link == "ipc":
        return fail(text, "--link host")
    return warn(f"{text}, KV moves through host memory", "--link host may be as fast")
