"""All attacks of `make attack`, in a share of the runs. CI runs some of them each time (`make attack DRAW=NUMBER`)."""

from __future__ import annotations

import pytest

from benchmarks.attack.__main__ import HANG_S, attack_all
from benchmarks.attack.attacks import all_attacks

# Everything else may take this many times as long. With twice as much, the server's own limits for idle clients could
# end an attack that should end at once.
SLACK = 5.0


@pytest.mark.slow
@pytest.mark.drawn(one_in=8, turn=7, alone=True)
def test_every_attack_is_held_out() -> None:
    attacks = [each for each in all_attacks() if not each.is_timed]
    rows, _ = attack_all(attacks, HANG_S, SLACK)
    assert {row["finding"]["name"]: row["objections"] for row in rows if row["objections"]} == {}
    assert len(rows) == len(attacks)
