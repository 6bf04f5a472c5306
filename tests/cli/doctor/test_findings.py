"""Findings for facts that this machine can't be given."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from alignedserve import demo
from alignedserve.cli.doctor.case import Case
from alignedserve.cli.doctor.cgroup import cpu_quota, num_free_bytes
from alignedserve.cli.doctor.command import summary
from alignedserve.cli.doctor.cpu import cores_finding, library_findings, native_finding
from alignedserve.cli.doctor.finding import Check, Finding, Level, NotChecked, findings_of, in_bytes, ok
from alignedserve.cli.doctor.gpu import gpu_findings
from alignedserve.cli.doctor.gpu_facts import Gpu, GpuFacts
from alignedserve.cli.doctor.installation import check_extras, extra_finding, packages_finding, python_finding
from alignedserve.cli.doctor.memory import check_kv, files_finding, memory_finding
from alignedserve.cli.doctor.model import check_adapters
from alignedserve.cli.doctor.network import check_access
from alignedserve.cli.doctor.profile import profile_finding
from alignedserve.kernels.cpu.build import PREBUILT_DIR
from alignedserve.kernels.cpu.library import LoadedLibrary
from alignedserve.launch.settings import settings_of
from tests.tiny_adapters import write_adapter

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), 130 * GIB, 140 * GIB)
TWO = GpuFacts("13.0", "580.65.06", 2, (H200, H200), (), "3.6.0")
NONE = GpuFacts("13.0", "", 0, (), (), None)


def found(facts: GpuFacts, device: str = "auto", num_instances: int = 2, link: str = "host") -> list[Finding]:
    return list(gpu_findings(facts, device, num_instances, link))


def texts(findings: list[Finding], level: str) -> str:
    return "; ".join(each.text for each in findings if each.level == level)


# ---- GPUs ----


def test_gpus_that_can_be_used() -> None:
    assert {each.level for each in found(TWO)} == {"ok"}
    assert "1: NVIDIA H200, compute capability 9.0, 130.0 GiB of 140.0 GiB free" in texts(found(TWO), "ok")
    assert "driver 580.65.06, torch for CUDA 13.0, Triton 3.6.0" in texts(found(TWO), "ok")


def test_no_gpu_is_fine_unless_one_was_asked_for() -> None:
    assert found(NONE) == [Finding("note", "no GPU: runs on the CPU")]
    assert texts(found(NONE, "cuda"), "fail") == "device='cuda': this machine has no GPU"
    assert [each.level for each in found(TWO, "cpu")] == ["note"]


def test_a_gpu_that_torch_can_not_use_fails() -> None:
    unused = replace(TWO, gpus=())
    assert "can't use the GPUs of the driver 580.65.06" in texts(found(unused), "fail")
    assert "is built for CPUs only" in texts(found(replace(unused, cuda_version=None)), "fail")
    assert [each.level for each in found(unused, "cpu")] == ["note"]


def test_what_makes_gpus_slow_is_a_warning() -> None:
    old = replace(TWO, gpus=(replace(H200, capability=(7, 5)), H200))
    assert "compute capability 7.5" in texts(found(old), "warn")
    assert "Triton can't be imported" in texts(found(replace(TWO, triton_version=None)), "warn")


def test_fewer_gpus_than_instances_share() -> None:
    assert "2 GPUs for 3 instances" in texts(found(TWO, num_instances=3), "note")
    one = replace(TWO, gpus=(H200,))
    assert "1 of 2 GPUs are visible" in texts(found(one), "note")


def test_links_need_gpus_that_reach_each_other() -> None:
    apart = replace(TWO, unreachable=((0, 1), (1, 0)))
    assert {each.level for each in found(apart, link="host")} == {"ok"}
    assert "GPU 0 can't reach the memory of GPU 1" in texts(found(apart, link="ipc"), "fail")
    assert "KV moves through host memory instead" in texts(found(apart, link="auto"), "warn")
    assert "link='nccl'" in texts(found(apart, link="nccl"), "warn")


# ---- cores and memory ----


@pytest.mark.parametrize(
    ("quota", "num_instances", "num_threads", "level", "text"),
    [
        (None, 2, None, "ok", "4 cores for 2 instances"),
        (None, 0, None, "ok", "4 cores"),
        (4.0, 2, None, "ok", "4 cores for 2 instances"),
        (1.5, 2, None, "warn", "a quota of 1.5"),
        (None, 5, None, "warn", "they take turns"),
        (None, 2, "1", "note", "OMP_NUM_THREADS=1"),
    ],
)
def test_cores(
    quota: float | None, num_instances: int, num_threads: str | None, level: str, text: str
) -> None:
    finding = cores_finding(4, quota, num_instances, num_threads)
    assert finding.level == level and text in finding.text


def test_instructions_that_kernels_have_code_for() -> None:
    assert native_finding("built before", "flags : fma avx2").text == "backend cpu, built before, with fma"
    assert native_finding("built before", "flags : sse2").level == "warn"
    features = "flags : fma amx_bf16"
    assert native_finding("built before", features).text.endswith("with amx_bf16, fma")
    refused = native_finding("built before", features, is_refused_amx=True)
    assert refused.level == "warn" and "without AMX" in refused.text


def test_kernels_that_are_not_the_fastest_are_named_with_the_reason() -> None:
    path = PREBUILT_DIR / "0123456789ab-x86-64-v3.so"
    (finding,) = library_findings(LoadedLibrary(CDLL(None), path, why_slower="tried g++"), took_s=0.1)
    assert finding.level == "warn"
    assert finding.text == "backend cpu, from the wheel (x86-64-v3), which is slower on this CPU: tried g++"


def written(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_control_groups_of_the_second_version(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/pod/container\n")
    written(root, cpu__max="max 100000")
    written(root / "pod", cpu__max="250000 100000", memory__max="1000", memory__current="700")
    written(root / "pod/container", cpu__max="max 100000", memory__max="max", memory__current="500")
    written(root / "pod", memory__stat="anon 5\ninactive_file 100\n")
    assert cpu_quota(root, own) == 2.5 and num_free_bytes(root, own) == 400


def test_limits_of_control_groups_of_the_first_version(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("4:memory:/pod\n3:cpu,cpuacct:/pod\n0::/\n")
    written(root / "cpu/pod", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    written(root / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    written(root / "memory/pod", memory__limit_in_bytes="1000", memory__usage_in_bytes="900")
    assert cpu_quota(root, own) == 1.5 and num_free_bytes(root, own) == 100


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert (
        cpu_quota(tmp_path, tmp_path / "own") is None and num_free_bytes(tmp_path, tmp_path / "own") is None
    )


def test_memory() -> None:
    assert memory_finding(10 * GIB, 4 * GIB, 4 * GIB, GIB).level == "ok"
    assert memory_finding(10 * GIB, 4 * GIB, 6 * GIB, GIB).level == "warn"
    assert memory_finding(10 * GIB, 10 * GIB, 0, GIB).level == "fail"


def test_open_files() -> None:
    assert files_finding(1024, 4096).remedy == "ulimit -n 8192"
    assert files_finding(-1, 4096) == ok("open files: no limit")


def test_bytes_are_said_in_their_unit() -> None:
    sizes = (0, 1, 1023, 1024, 1536, 1 << 20, 3 * GIB, 5000 * GIB)
    said = ["0 bytes", "1 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 GiB", "5000.0 GiB"]
    assert list(map(in_bytes, sizes)) == said


# ---- the installation, a profile, a check ----


def test_versions_are_held_to_their_bounds() -> None:
    assert python_finding("3.11.7", ">=3.11").level == "ok"
    assert python_finding("3.10.1", ">=3.11").level == "fail"
    assert packages_finding(["torch>=2.0", "no-such-package; extra == 'dev'"]).text.startswith(
        "1 as required"
    )
    wrong = packages_finding(["torch>=99", "no-such-package>=1", "click"])
    assert wrong.level == "fail" and "must be >=99; no-such-package is not installed" in wrong.text


def test_packages_of_an_extra_are_held_to_their_bounds_where_an_option_needs_it() -> None:
    lines = ["torch>=2.0", "no-such-package>=1; extra == 'otel'", "click>=8; extra == 'plot'"]
    wrong = extra_finding(lines, "otel", "--otlp-endpoint")
    assert wrong.text == "--otlp-endpoint: no-such-package is not installed"
    assert (wrong.level, wrong.remedy) == ("fail", "pip install 'alignedserve[otel]'")
    assert extra_finding(lines, "plot", "--plot").level == "ok"
    with_traces = settings_of(None, {"otlp_endpoint": "http://127.0.0.1:4318"})
    assert [each.text.partition(":")[0] for each in check_extras(with_traces)] == ["--otlp-endpoint"]
    assert not [*check_extras(settings_of(None, {}))]


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        (["ok", "note"], "2 ok, 0 warnings, 0 failures: it will run"),
        (["ok", "warn"], "1 ok, 1 warning, 0 failures: it will run, see the warnings"),
        (["fail", "warn"], "0 ok, 1 warning, 1 failure: it will not run like this"),
    ],
)
def test_a_line_sums_the_findings_up(levels: list[Level], said: str) -> None:
    assert click.unstyle(summary(levels)) == said


def test_a_profile_that_is_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert profile_finding(path, {}).level == "note"
    path.write_text("{}")
    assert profile_finding(path, {}).level == "warn"
    assert path.exists()


def raising(error: Exception) -> Iterator[Finding]:
    yield ok("so far")
    raise error


def test_a_check_that_raises_is_a_finding() -> None:
    def of(error: Exception) -> Finding:
        first, second = findings_of(Check("area", lambda: raising(error), "this helps"))
        assert first == ok("so far")
        return second

    assert of(ValueError("no room")) == Finding("fail", "no room", "this helps")
    assert of(KeyError("x")).text == "the check failed: KeyError: 'x'" and of(KeyError("x")).level == "fail"
    assert of(NotChecked("the model")) == Finding("note", "not checked: needs the model")


@pytest.mark.parametrize(
    ("kv_cache_dtype", "said"),
    [
        ("auto", "2.0 KiB a token; "),
        ("fp8", "1.0 KiB a token in fp8; "),
        ("int8", "1.1 KiB a token in int8; "),
    ],
)
def test_kv_in_8_bits_takes_as_many_bytes_as_it_does(kv_cache_dtype: str, said: str) -> None:
    """Of the demo model: 4 layers, k and v, 2 heads, 64 values of two bytes, or of one, and four for a scale."""
    case = Case(settings_of(None, {"kv_cache_dtype": kv_cache_dtype, "device": "cpu"}))
    (finding,) = check_kv(case)
    assert finding.text.startswith(said)
    assert (
        case.form.block_bytes // case.form.block_size
        == {"auto": 2048, "fp8": 1024, "int8": 1088}[kv_cache_dtype]
    )


# ---- adapters ----


def test_adapters_are_looked_at_one_by_one(tmp_path: Path) -> None:
    def of(*options: tuple[str, dict[str, Any]]) -> list[Finding]:
        paths = [
            (name, write_adapter(tmp_path / name, demo.MODEL_DIR, 1, **config)) for name, config in options
        ]
        modules = tuple(f"{name}={path}" for name, path in paths)
        case = Case(settings_of(None, {"lora_modules": modules}))
        return list(findings_of(Check("adapters", partial(check_adapters, case), "its files")))

    assert of() == []
    assert of(("a", {}), ("b", {"r": 16})) == [ok("a, b: each fits the model")]
    (fits, other) = of(("c", {"base_model_name_or_path": "org/else"}))
    assert (fits.level, other.level) == ("ok", "warn")
    assert "names org/else as its base model, but the model is" in other.text
    (wrong,) = of(("a", {}), ("d", {"r": 17}))
    assert wrong.level == "fail" and "d: its rank r is 17; must be at most" in wrong.text


def test_operators_keys_are_counted_apart_and_missed_where_there_are_several_owners() -> None:
    def of(*keys: str, operator_key: tuple[str, ...] = ()) -> list[Finding]:
        return list(check_access(Case(settings_of(None, {"api_key": keys, "operator_key": operator_key}))))

    assert of("one") == [ok("1 API key")]
    assert of("one", "two", operator_key=("three",)) == [ok("2 API keys, 1 operator's key")]
    assert of(operator_key=("three",)) == [ok("1 operator's key")]
    counted, missed = of("one", "two")
    assert counted == ok("2 API keys")
    assert (missed.level, missed.remedy) == ("warn", "--operator-key-file") and "/metrics" in missed.text


def test_a_model_that_takes_several_gpus_is_told_how_many() -> None:
    def of(model: str, **options: Any) -> Finding:
        common = {"load_format": "dummy", "max_model_len": 2048, "device": "cuda"}
        case = Case(settings_of(model, common | options))
        case.gpus = replace(TWO, gpus=(H200,) * 8)
        (finding,) = check_kv(case)
        return finding

    alone = of("llama-3.1-70b")
    assert alone.level == "fail" and "but one request of max_model_len=2048 tokens needs 128" in alone.text
    assert alone.remedy == "--tensor-parallel-size 2, with as many GPUs like these"
    both = of("llama-3.1-70b", tensor_parallel_size=2)
    assert both.level == "ok" and "320.0 KiB a token" in both.text
    assert of("llama-3.1-8b").level == "ok"
