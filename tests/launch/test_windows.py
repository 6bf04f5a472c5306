"""A model of which some layers slide, served: the same tokens as the engine alone says, also when instances die."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from alignedserve import demo
from tests.launch.server import serving
from tests.launch.streams import ask_all, engine_alone


def with_windows(to: Path) -> Path:
    """The demo model, whose layers see the latest 48 tokens, one excepted."""
    directory = shutil.copytree(demo.MODEL_DIR, to / "windows")
    config = json.loads((directory / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config |= {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": 48,
        "layer_types": kinds,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("instances", [("--link", "ipc"), ("--colocated-instances", "1")], ids=str)
def test_streams_are_the_engines_own(tmp_path: Path, instances: tuple[str, ...]) -> None:
    model = with_windows(tmp_path)
    options = (str(model), "--dtype", "float32", "--pool-memory-bytes", str(64 << 20), *instances)
    expected = engine_alone(model=model)
    assert expected != engine_alone()
    with serving(*options) as server:
        assert ask_all(server.url, models=(str(model),))[0] == expected
        roles = ("decode", "prefill", "colocated")
        victims = [each["pid"] for each in server.processes() if each["role"] in roles]

        def kill() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        assert ask_all(server.url, kill, models=(str(model),))[0] == expected
