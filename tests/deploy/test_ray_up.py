"""`ray up` on three hosts, run for real: it comes up, heals when what runs on hosts is killed, and leaves nothing.

test_ray_up_machines.py has what happens to machines.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.changes import in_turn
from tests.deploy.ray_up import WORKERS, RayUp, cluster

NUM_LINES = 200


@pytest.fixture
def up() -> Iterator[RayUp]:
    with cluster(num_workers=2) as found:
        yield found


@pytest.mark.slow
@in_turn(0)
def test_a_cluster_comes_up_heals_and_goes_down(up: RayUp) -> None:
    up.come_up()
    assert up.get("/")[0] == 200
    job = up.submit(NUM_LINES)

    # the launcher
    pid = first_process(up)
    up.head.run(f"kill -9 {pid}")
    up.until(
        "the service answers", lambda: first_process(up) not in ("", pid) and up.get("/health")[0] == 200
    )
    up.say("the launcher was killed, and the service answers again")
    up.until("all islands are whole", lambda: up.are_whole(up.islands()))

    # all that runs on a worker
    before = up.islands()
    with up.asking() as asking:
        up.net.hosts[WORKERS[0]].kill_all()
        up.check_streams(asking, "a worker's processes were killed")
    up.until_back(before)
    up.check_answers()
    up.check_job(job, NUM_LINES)
    up.say("the batch job is done")
    up.go_down()


def first_process(up: RayUp) -> str:
    """The process id of `alignedserve serve` on the head, as it numbers them. Its child, the launcher, ends with it."""
    return up.head.run("pgrep -o -f '^[^ ]*python[^ ]* [^ ]*alignedserve serve'", check=False).strip()
