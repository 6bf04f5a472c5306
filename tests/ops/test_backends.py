"""Which backend is chosen, and what happens if the native one can't be built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignedserve.kernels.cpu.library import loaded
from alignedserve.ops import make_ops
from tests.engine.helpers import greedy_params, make_engine, run, tokens
from tests.tiny_models import greedy, prompts

CPU = torch.device("cpu")


def test_auto_is_native_on_a_cpu_and_torch_for_dtypes_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    assert make_ops("auto", CPU, torch.bfloat16, 64).name == "cpu"
    assert not caplog.records
    assert make_ops("auto", CPU, torch.float16, 64).name == "torch"
    assert "float16" in caplog.text


def test_auto_takes_torch_for_heads_that_the_native_kernels_lack(caplog: pytest.LogCaptureFixture) -> None:
    assert make_ops("auto", CPU, torch.float32, 256).name == "cpu"
    for head_dim in (36, 264):
        assert make_ops("auto", CPU, torch.float32, head_dim).name == "torch"
        assert f"head_dim={head_dim}" in caplog.text


def test_without_a_compiler_torch_runs_and_says_why(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setenv("ALIGNEDSERVE_CACHE_DIR", str(tmp_path))
    loaded.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            engine = make_engine(tiny_model("qwen2"))
        assert tokens(run(engine, prompts()[:3], greedy_params())) == greedy(tiny_model("qwen2"))[:3]
    finally:
        monkeypatch.undo()
        loaded.cache_clear()
    assert "no-such-compiler" in caplog.text and "torch" in caplog.text


def test_the_native_backend_is_for_cpus() -> None:
    with pytest.raises(ValueError, match="cuda"):
        make_ops("cpu", torch.device("cuda:0"), torch.float32, 64)
