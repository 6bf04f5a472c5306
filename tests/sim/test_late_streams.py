"""What becomes of prompts where streams beside them are late."""

from __future__ import annotations

import pytest

from alignedserve.cli.simulate.compare import Comparison
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.timing.cost_presets import load_cost_model


class Silent:
    def begin(self, name: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def tried(self, name: str, rate: float, attainment: float) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 3])
def test_streams_that_are_late_hold_up_no_prompts(seed: int) -> None:
    """Prompts crawled by a block an iteration as long as one stream was late: 22.5 % of real time was in time with seed
    7, and 95.5 % in order of arrival."""
    config = SimConfig(
        policy=("fcfs", "aligned"),
        num_prompts=120,
        request_rate=3.0,
        input_len=600,
        output_len=150,
        spread=2.2,
        seed=seed,
        colocated_instances=(1,),
    )
    engine, scheduling = EngineConfig("simulated"), SchedulingConfig()
    comparison = Comparison(
        config, load_cost_model(config.cost), engine, RouterConfig(link="host"), scheduling
    )
    fcfs, aligned = (row.outcome for row in comparison.rows(Silent()))
    assert fcfs and aligned
    assert aligned.mixture.rt.attainment >= fcfs.mixture.rt.attainment - 0.02
