"""What is recorded of a request goes with its phase. `script.py` and the fault tests check that of all requests."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.router.requests import RECORDS, Leaving, Phase, RequestState, Staged
from tests.router.script import DECODE, GATEWAY, PREFILL, request

COPY = Staged(PREFILL, DECODE)


@pytest.mark.parametrize(
    ("phase", "records"),
    [
        (Phase.QUEUED, {"instance_id": PREFILL}),
        (Phase.PREFILLING, {}),
        (Phase.POOLED, {"staged": COPY}),
        (Phase.STAGED, {"instance_id": PREFILL}),
        (Phase.OFFERED, {"instance_id": DECODE, "saving_at": PREFILL}),
        (Phase.RUNNING, {"instance_id": DECODE, "staged": COPY}),
        (Phase.RUNNING, {"instance_id": DECODE, "leaving": Leaving([DECODE])}),
        (Phase.LEAVING, {"staged": COPY}),
    ],
)
def test_a_record_that_does_not_go_with_the_phase_is_an_error(phase: Phase, records: dict[str, Any]) -> None:
    state = RequestState(request(), GATEWAY, phase, 0.0, **records)
    with pytest.raises(RuntimeError, match=f"request 1 is {phase.value}, with these records"):
        state.check()


def test_each_phase_has_its_records() -> None:
    assert RECORDS.keys() == {*Phase}
