"""Weights in fewer bits, served: the same tokens as the engine alone says with them, also when an instance dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from alignedserve import demo
from tests import quantised_checkpoints
from tests.launch.server import serving
from tests.launch.streams import ask_all, engine_alone


@pytest.mark.slow
def test_streams_are_the_engines_own_in_eight_bits() -> None:
    options = ("--dtype", "float32", "--quantization", "int8", "--pool-memory-bytes", str(64 << 20))
    with serving(*options) as server:
        assert ask_all(server.url)[0] == engine_alone("int8") != engine_alone()
        victims = [each["pid"] for each in server.processes() if each["role"] in ("decode", "prefill")]

        def kill() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        assert ask_all(server.url, kill)[0] == engine_alone("int8")


@pytest.mark.slow
def test_a_quantised_checkpoint_says_what_the_engine_says_of_it(tmp_path: Path) -> None:
    form = quantised_checkpoints.FORMATS["awq-128"]
    model, _ = quantised_checkpoints.convert(demo.MODEL_DIR, form, tmp_path)
    options = (str(model), "--dtype", "float32", "--pool-memory-bytes", str(64 << 20))
    with serving(*options) as server:
        assert ask_all(server.url, model=str(model))[0] == engine_alone(model=model) != engine_alone()
