"""KV in 8 bits, served: the same tokens as the engine alone says with it, also when instances die."""

from __future__ import annotations

import os
import signal

import pytest

from tests.launch.server import serving
from tests.launch.streams import ask_all, engine_alone


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_streams_are_the_engines_own_with_kv_in_8_bits(kv_cache_dtype: str) -> None:
    options = ("--dtype", "float32", "--kv-cache-dtype", kv_cache_dtype, "--pool-memory-bytes", str(64 << 20))
    expected = engine_alone(kv_cache_dtype=kv_cache_dtype)
    with serving(*options) as server:
        assert ask_all(server.url)[0] == expected != engine_alone()
        victims = [each["pid"] for each in server.processes() if each["role"] in ("decode", "prefill")]

        def kill() -> None:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

        assert ask_all(server.url, kill)[0] == expected
