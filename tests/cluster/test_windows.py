"""A model that mixes layers with a window and without, as processes: its blocks move by groups of layers, and what is
behind the window does not; whoever dies, tokens are those of an engine alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from alignedserve.kvpool.process import segments
from alignedserve.kvpool.segment import Segment
from alignedserve.protocol.kv_span import KvSpan
from alignedserve.types import InstanceId
from tests.cluster.history import History
from tests.cluster.processes import COLOCATED, DECODES, MAX_BLOCKS, PREFILLS, Setup, running
from tests.cluster.scene import Scene

Directory = Callable[[str], Path]


@pytest.mark.parametrize(
    ("options", "victims"),
    [
        ({"link": "ipc"}, (DECODES[0], PREFILLS[0])),
        pytest.param({"link": "gloo"}, (PREFILLS[1], DECODES[1]), marks=pytest.mark.slow),
        pytest.param({"link": "host"}, (DECODES[0], DECODES[1]), marks=pytest.mark.slow),
        pytest.param({"num_colocated": 1, "kv_cache_dtype": "fp8"}, (COLOCATED,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evictions_links_and_deaths_change_nothing(
    tiny_model: Directory, tmp_path: Path, options: dict[str, Any], victims: Sequence[InstanceId]
) -> None:
    span = KvSpan(block_size=16, window=24, max_step=1, num_full_groups=1, num_sliding_groups=2)
    setup = Setup(
        tiny_model("ministral"),
        head_dim=24,
        num_groups=span.num_groups,
        span=span,
        num_decode_blocks=MAX_BLOCKS,
        **options,
    )
    with running(setup, tmp_path) as processes:
        scene = Scene(processes)
        scene.kill_in_turn(victims)
        (name,) = segments(processes.segment_prefix)
        segment = Segment.attach(name)
        assert segment.form == setup.form and segment.blocks.any()
        segment.close()
        history = History(processes.logs)
        assert sum(history.evicted.values())
        # The next router goes by what the pool says, and the pool by what instances keep.
        said = {
            (hello.role, hello.limits.window, hello.fingerprint["window"])
            for hello in history.hellos
            if "window" in hello.fingerprint
        }
        assert {(window, text) for _, window, text in said} == {(24, "24")}
        assert {role for role, _, _ in said} >= {"kvpool", victims[0].split("-")[0]}
