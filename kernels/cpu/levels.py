"""Levels of processors. A wheel may hold a library for each (hatch_build.py)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    # for the compiler
    flags: tuple[str, ...]
    # flags of /proc/cpuinfo that a processor must have
    needs: frozenset[str]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_VNNI = _V4 | {"avx512_vnni"}
_V4_VBMI = _V4_VNNI | {"avx512vbmi"}
_V4_BF16 = _V4_VBMI | {"avx512_bf16"}
_NEON = frozenset({"asimd"})

# By machine, the slowest first.
LEVELS: dict[str, dict[str, Level]] = {
    "x86_64": {
        "x86-64-v3": Level(("-march=x86-64-v3",), _V3),
        "x86-64-v4": Level(("-march=x86-64-v4",), _V4),
        # Cascade Lake
        "x86-64-v4-vnni": Level(("-march=x86-64-v4", "-mavx512vnni"), _V4_VNNI),
        # Ice Lake
        "x86-64-v4-vbmi": Level(("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi"), _V4_VBMI),
        # Zen 4
        "x86-64-v4-bf16": Level(
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"), _V4_BF16
        ),
        # Sapphire Rapids
        "x86-64-v4-amx": Level(
            (
                *("-march=x86-64-v4", "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"),
                *("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            ),
            _V4_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
        ),
    },
    "aarch64": {
        "armv8-a": Level(("-march=armv8-a",), _NEON),
        # Neoverse V1
        "armv8.2-a-bf16": Level(
            ("-march=armv8.2-a+bf16+i8mm",), _NEON | {"atomics", "asimdrdm", "crc32", "bf16", "i8mm"}
        ),
    },
}

# The instruction sets that the sources distinguish, by the compiler's macro.
DISTINGUISHED = {
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512BF16__": "avx512_bf16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_BF16__": "amx_bf16",
    "__AMX_INT8__": "amx_int8",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
}


def best(names: Container[str], machine: str, features: set[str]) -> str | None:
    """Returns the fastest of the levels `names` that runs on a processor with these features."""
    levels = LEVELS.get(machine, {})
    return next((name for name in reversed(levels) if name in names and levels[name].needs <= features), None)


def is_all(level: Level, features: set[str]) -> bool:
    """Returns whether the sources have no faster code for a processor with these features than the level's."""
    return features.intersection(DISTINGUISHED.values()) <= level.needs
