"""Where mixtures of experts can't run yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignedserve.engine import build
from alignedserve.engine.config import EngineConfig

Directory = Callable[[str], Path]


def test_a_mixture_is_refused_where_it_would_be_in_a_cuda_graph(
    tiny_model: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_device", lambda name: torch.device("cuda"))
    with pytest.raises(ValueError, match="a mixture of [0-9]+ experts needs enforce_eager on a GPU"):
        build._build(EngineConfig(str(tiny_model("qwen3-moe"))), lambda form, count: None, False)  # type: ignore[arg-type, return-value]
