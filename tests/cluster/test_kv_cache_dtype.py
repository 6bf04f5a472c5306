"""Instances that have KV in 8 bits, as processes: what moves between them and the pool is those bytes, and so tokens
are the ones that an engine of that kind says alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from alignedserve.kvpool.process import segments
from alignedserve.kvpool.segment import Segment
from alignedserve.types import InstanceId
from tests.cluster.history import History
from tests.cluster.processes import COLOCATED, DECODES, PREFILLS, Setup, running
from tests.cluster.scene import Scene

Directory = Callable[[str], Path]


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"kv_cache_dtype": "int8", "link": "ipc"}, (DECODES[0], PREFILLS[0])),
        pytest.param(
            {"kv_cache_dtype": "fp8", "link": "gloo"}, (PREFILLS[1], DECODES[1]), marks=pytest.mark.slow
        ),
        pytest.param(
            {"kv_cache_dtype": "int8", "link": "host"}, (DECODES[0], DECODES[1]), marks=pytest.mark.slow
        ),
        pytest.param({"kv_cache_dtype": "fp8", "num_colocated": 1}, (COLOCATED,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evictions_links_and_deaths_change_nothing(
    tiny_model: Directory, tmp_path: Path, options: dict[str, Any], victims: Sequence[InstanceId]
) -> None:
    setup = Setup(tiny_model("llama-gqa-tied"), **options)
    with running(setup, tmp_path) as processes:
        scene = Scene(processes)
        scene.kill_in_turn(victims)
        (name,) = segments(processes.segment_prefix)
        segment = Segment.attach(name)
        assert segment.form == setup.form and segment.form.encoding != "kv" and segment.blocks.any()
        segment.close()
        assert History(processes.logs).evicted[COLOCATED if "num_colocated" in options else DECODES[0]]
