"""All attacks of `make attack`, in a share of the runs."""

from __future__ import annotations

import pytest

from benchmarks.attack.__main__ import attack_all
from benchmarks.attack.attacks import all_attacks

# Times are judged by `make attack` on a quiet machine. Here a silence of this many seconds is a hang.
HANG_S = 20.0
# Everything else may take this many times as long. With twice as much, the server's own limits for idle clients could
# end an attack that should end at once.
SLACK = 5.0


@pytest.mark.slow
@pytest.mark.drawn(one_in=8, turn=7, alone=True)
def test_every_attack_is_held_out() -> None:
    attacks = all_attacks()
    rows, _ = attack_all(attacks, HANG_S, SLACK)
    assert {row["finding"]["name"]: row["objections"] for row in rows if row["objections"]} == {}
    assert len(rows) == len(attacks)
