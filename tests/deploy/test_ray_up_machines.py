"""`ray up` on two hosts, run for real: what happens to a worker's machine costs no token, and it is an island again.

test_ray_up.py has what happens to processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.deploy.changes import in_turn
from tests.deploy.ray_up import WORKERS, RayUp, cluster

WORKER = WORKERS[0]
# Ray's autoscaler misses a machine after half a minute, and tries in vain to start Ray there.
CUT_S = 45.0


@pytest.fixture
def up() -> Iterator[RayUp]:
    with cluster(num_workers=1) as found:
        yield found


@pytest.mark.slow
@in_turn(4)
def test_a_worker_that_was_away_or_is_another_one_is_an_island_again(up: RayUp) -> None:
    up.come_up()

    # its link
    before = up.islands()
    worker = up.net.hosts[WORKER]
    with up.asking() as asking:
        worker.cut()
        cut_s = time.monotonic()
        up.check_streams(asking, "a worker's link was cut")
    time.sleep(max(0.0, CUT_S - (time.monotonic() - cut_s)))
    worker.mend()
    up.until_back(before)
    # None of those from before serves any more.
    up.until("what was cut off is gone", lambda: len(routers(up)) == 1)
    up.check_answers()

    # another machine in its place
    before = up.islands()
    with up.asking() as asking:
        up.net.hosts[WORKER].destroy()
        up.check_streams(asking, "a worker was switched off")
    up.net.add(WORKER)
    up.until_back(before)
    up.check_answers()
    up.go_down()


def routers(up: RayUp) -> list[str]:
    return up.net.hosts[WORKER].run("pgrep -f 'ray::RouterActor'", check=False).split()
