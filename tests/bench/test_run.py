"""What a run refuses before it asks anything."""

from __future__ import annotations

import sys

import pytest

from alignedserve.bench.config import BenchConfig
from alignedserve.bench.run import run


def test_a_plot_without_matplotlib_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    # no server listens there
    config = BenchConfig(base_url="http://127.0.0.1:1", plot="run.png", num_prompts=1)
    with pytest.raises(ValueError, match=r"plot: needs matplotlib; pip install 'alignedserve\[plot\]'"):
        run(config, said.append)
    assert said == []
