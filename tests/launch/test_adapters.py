"""Adapters, served: the same tokens as the engine alone says with them, also when instances die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from alignedserve import demo
from tests.launch.server import serving
from tests.launch.streams import ask_all, engine_alone
from tests.tiny_adapters import write_adapter

MODELS = ("demo", "one", "two")


@pytest.mark.slow
def test_streams_of_several_models_are_the_engines_own(tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / name, demo.MODEL_DIR, seed) for seed, name in enumerate(MODELS[1:])]
    modules = tuple(f"{name}={path}" for name, path in zip(MODELS[1:], paths, strict=True))
    expected = engine_alone(lora_modules=modules, models=MODELS)
    # Every answer with an adapter is another one.
    assert [ours == plain for ours, plain in zip(expected, engine_alone(), strict=True)] == [
        number % 3 == 0 for number in range(len(expected))
    ]
    options = ("--dtype", "float32", "--pool-memory-bytes", str(64 << 20), "--lora-modules", *modules)
    with serving(*options) as server:
        listed = server.get("/v1/models").json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [
            *(("demo", None), ("one", "demo"), ("two", "demo"))
        ]
        assert ask_all(server.url, models=MODELS)[0] == expected
        victims = [each["pid"] for each in server.processes() if each["role"] in ("decode", "prefill")]

        def kill() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        assert ask_all(server.url, kill, models=MODELS)[0] == expected
