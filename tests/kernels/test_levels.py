"""A wheel's kernels: levels say what the compiler does, and each processor gets the best of them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from alignedserve.kernels.cpu import build, library
from alignedserve.kernels.cpu.levels import DISTINGUISHED, LEVELS, best, is_all

X86 = LEVELS["x86_64"]
HASWELL = {"sse4_2", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN_4 = SKYLAKE | {"avx512_vnni", "avx512vbmi", "avx512_bf16", "gfni"}
SAPPHIRE_RAPIDS = ZEN_4 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16"}
CASES = [(machine, name) for machine, levels in LEVELS.items() for name in levels]


def test_the_sources_distinguish_these() -> None:
    text = "\n".join(path.read_text() for path in build.SOURCE_DIR.iterdir())
    found = set(re.findall(r"__AVX\w+__|__AMX_\w+__|__FMA__|__ARM_FEATURE_\w+", text))
    assert found == DISTINGUISHED.keys()


@pytest.mark.parametrize("machine,name", CASES)
def test_a_level_needs_what_its_flags_let_the_compiler_use(machine: str, name: str) -> None:
    compiler = shutil.which(f"{machine}-linux-gnu-g++")
    if not compiler:
        pytest.skip(f"needs {machine}-linux-gnu-g++")
    level = LEVELS[machine][name]
    command = [compiler, *level.flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    defined = re.findall(r"#define (\w+)", subprocess.check_output(command, text=True))
    assert {DISTINGUISHED[macro] for macro in defined if macro in DISTINGUISHED} == {
        flag for flag in level.needs if flag in DISTINGUISHED.values()
    }


@pytest.mark.parametrize(
    "features,expected,is_fastest",
    [
        ({"sse4_2", "avx"}, None, False),
        (HASWELL, "x86-64-v3", True),
        (SKYLAKE, "x86-64-v4", True),
        (SKYLAKE | {"avx512_vnni"}, "x86-64-v4-vnni", True),
        (ZEN_4 - {"avx512_bf16"}, "x86-64-v4-vbmi", True),
        # Cooper Lake
        (ZEN_4 - {"avx512vbmi"}, "x86-64-v4-vnni", False),
        (ZEN_4, "x86-64-v4-bf16", True),
        (SAPPHIRE_RAPIDS, "x86-64-v4-amx", True),
    ],
)
def test_a_processor_has_the_fastest_level_that_it_can_run(
    features: set[str], expected: str | None, is_fastest: bool
) -> None:
    name = best(X86, "x86_64", features)
    assert name == expected
    assert (name is not None and is_all(X86[name], features)) == is_fastest


def test_an_unknown_machine_has_none() -> None:
    assert best(["x86-64-v3"], "riscv64", HASWELL) is None


@pytest.fixture(scope="module")
def compiled() -> bytes:
    """A library that can be loaded."""
    return build.build(build.library_path()).read_bytes()


@pytest.fixture
def prebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that holds a file for x86-64-v4, as in a wheel."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path)
    monkeypatch.delenv("ALIGNEDSERVE_CPU", raising=False)
    path = tmp_path / f"{build._digest_of_sources().hexdigest()[:12]}-x86-64-v4.so"
    path.write_bytes(b"")
    return path


def test_a_wheels_library_is_used_where_it_is_the_fastest(
    monkeypatch: pytest.MonkeyPatch, prebuilt: Path
) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(SKYLAKE))
    assert build.library_path() == prebuilt


def test_a_faster_one_is_compiled_if_there_is_a_compiler(
    monkeypatch: pytest.MonkeyPatch, prebuilt: Path
) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(ZEN_4))
    assert build.library_path().parent == build.cache_dir()
    assert build.prebuilt() == prebuilt


# What a compiler does that makes no library which can be loaded: it is missing, it fails, it writes something else.
COMPILERS = {
    "no-such-compiler": None,
    "exited with 3": "exit 3",
    "can't be loaded": 'for name; do :; done; echo > "$name"',
}


@pytest.mark.parametrize("reason", COMPILERS)
def test_the_wheels_is_used_where_a_faster_one_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
    compiled: bytes,
    prebuilt: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    compiler = tmp_path / "no-such-compiler"
    if text := COMPILERS[reason]:
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{text}\n')
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ALIGNEDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(ZEN_4))
    prebuilt.write_bytes(compiled)
    found = library._load()
    assert found.path == prebuilt and reason in found.why_slower
    assert "The wheel's CPU kernels are used" in caplog.text and reason in caplog.text


def test_one_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, prebuilt: Path) -> None:
    prebuilt.rename(prebuilt.with_name("0123456789ab-x86-64-v4.so"))
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(SKYLAKE))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoCompiler):
        library._load()


def test_a_level_can_be_named(monkeypatch: pytest.MonkeyPatch, prebuilt: Path) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(ZEN_4))
    monkeypatch.setenv("ALIGNEDSERVE_CPU", "x86-64-v4")
    assert build.library_path() == prebuilt
    monkeypatch.setenv("ALIGNEDSERVE_CPU", "x86-64-v3")
    assert build.library_path().parent == build.cache_dir()


def test_one_that_cannot_be_loaded_stays_and_is_an_error(
    monkeypatch: pytest.MonkeyPatch, prebuilt: Path
) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(SKYLAKE))
    with pytest.raises(build.BuildFailed, match="the wheel's CPU kernels can't be loaded"):
        library._load()
    assert prebuilt.exists()
