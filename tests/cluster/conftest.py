"""What several tests of real processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import Processes, Setup, running

SLOW_FAMILY = "llama-gqa-tied"


@pytest.fixture(scope="module", params=[0, 1], ids=["apart", "colocated"])
def slow_processes(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Processes]:
    """Prefill and decode instances, then a colocated one: so slow that one can be killed in the middle."""
    setup = Setup(tiny_model(SLOW_FAMILY), num_colocated=request.param, is_slow=True)
    with running(setup, tmp_path_factory.mktemp("events")) as found:
        yield found
