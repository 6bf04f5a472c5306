"""`ray up` on three hosts, run for real: it comes up, heals whatever happens to hosts, and leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from alignedserve.kernels.cpu.build import build, cache_dir
from tests.deploy.hosts import why_not
from tests.deploy.ray_up import HEAD, WORKERS, RayUp, cluster
from tests.launch.streams import engine_alone

# The router, the pool, a prefill and a decode instance.
WHOLE = 4
CUT_S = 60.0
NUM_LINES = 200


@pytest.fixture
def up() -> Iterator[RayUp]:
    if reason := why_not():
        pytest.skip(f"ray up: {reason}")
    # Hosts find the kernels there.
    build()
    with cluster(cache_dir()) as found:
        yield found


@pytest.mark.slow
@pytest.mark.drawn(one_in=8)
def test_a_cluster_that_comes_up_heals_and_goes_down(up: RayUp) -> None:
    start_s = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start_s:6.1f} s  {what}", flush=True)

    up.ray("get-auth-token", "--generate")
    up.ray("up", "-y", "--no-config-cache", str(up.config))
    say("ray up has returned")
    up.until("the service answers", lambda: up.get("/health")[0] == 200)
    check_answers(up)
    say("all questions are answered")
    up.until("three islands", lambda: set(up.islands().values()) == {WHOLE} and len(up.islands()) == 3)
    say("three islands are there")
    assert up.get("/")[0] == 200
    job = up.submit(NUM_LINES)

    # all that runs on a worker
    before = up.islands()
    with up.asking() as asking:
        up.net.hosts[WORKERS[0]].kill_all()
        check(asking.rest(), say, "a worker's processes were killed")
    back(up, before)
    say("it is an island again")

    # a worker's link
    before = up.islands()
    worker = up.net.hosts[WORKERS[1]]
    with up.asking() as asking:
        worker.cut()
        cut_s = time.monotonic()
        check(asking.rest(), say, "a worker's link was cut")
    time.sleep(max(0.0, CUT_S - (time.monotonic() - cut_s)))
    worker.mend()
    back(up, before)
    # None of those from before serves any more.
    up.until("what was cut off is gone", lambda: len(routers(up, WORKERS[1])) == 1)
    check_answers(up)
    say("it is an island again")

    # another machine in the place of one
    before = up.islands()
    with up.asking() as asking:
        up.net.hosts[WORKERS[0]].destroy()
        check(asking.rest(), say, "a worker was switched off")
    up.net.add(WORKERS[0])
    back(up, before)
    check_answers(up)
    say("a new machine in its place is an island")

    # the launcher
    (pid,) = launchers(up)
    up.head.run(f"kill -9 {pid}")
    up.until("the service answers", lambda: launchers(up) != [pid] and up.get("/health")[0] == 200)
    say("the launcher was killed, and the service answers again")
    check_answers(up)
    up.check_job(job, NUM_LINES)
    say("the batch job is done")

    up.ray("down", "-y", str(up.config))
    for number in (HEAD, *WORKERS):
        up.until(f"host {number} is empty", lambda number=number: not up.net.hosts[number].pids())  # type: ignore[misc]
    say("ray down has left nothing")


def check(answered: tuple[list[str], float], say: Callable[[str], None], what: str) -> None:
    texts, silence_s = answered
    assert texts == engine_alone(), what
    say(f"{what}: no stream lost a token, the longest silence was {silence_s:.1f} s")


def check_answers(up: RayUp) -> None:
    with up.asking() as asking:
        assert asking.rest()[0] == engine_alone()


def back(up: RayUp, before: Mapping[int, int]) -> None:
    """A lost island is there again, under another number, and all are whole."""
    up.until(
        "three islands again",
        lambda: (
            (found := up.islands()) and len(found) == 3 and set(found.values()) == {WHOLE} and found != before
        ),
    )
    assert up.get("/health") == (200, {"status": "ok"})


def launchers(up: RayUp) -> list[int]:
    """The processes of `alignedserve serve` on the head, as it numbers them."""
    found = up.head.run("pgrep -f '^[^ ]*python[^ ]* [^ ]*alignedserve serve'", check=False)
    return [int(pid) for pid in found.split()]


def routers(up: RayUp, worker: int) -> list[str]:
    return up.net.hosts[worker].run("pgrep -f 'ray::RouterActor'", check=False).split()
