"""The whole system ends: at a signal while it starts, and when one of its processes can't be started again."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignedserve import demo
from alignedserve.launch.leftovers import descendants
from alignedserve.launch.signals import ENDING
from alignedserve.version import __version__
from benchmarks.footprint import Footprint
from tests.launch import signalled_serve
from tests.launch.server import EXACT, POOL, START_S, Server, program_of, starting, until
from tests.launch.streams import ask_all, engine_alone

pytestmark = pytest.mark.slow


def test_a_part_that_cannot_come_back_ends_it_with_an_error(tmp_path: Path) -> None:
    model = shutil.copytree(demo.MODEL_DIR, tmp_path / "model")
    quantization = ("--quantization", "int8", "--served-model-name", "demo")
    with starting(str(model), *quantization, *EXACT, *POOL) as server:
        server.until_ready()
        # Few other runs serve weights in 8 bits.
        assert ask_all(server.url)[0] == engine_alone("int8") != engine_alone()
        footprint = Footprint(server.pid)
        # The first process kills at its end what is in its session. The remover ends by itself.
        sessions = {os.getsid(pid) for pid, _ in descendants(server.pid) if program_of(pid) != "sh"}
        assert sessions == {server.pid}
        pid = server.pid_of("decode-0")
        shutil.rmtree(model)
        os.kill(pid, signal.SIGKILL)
        server.until_said("decode-0 is down")
        assert server.get("/health").status_code == 503
        assert server.wait(START_S) == 1
        assert re.search(f"Error: decode-0 died .* times in a row: model is '{model}'", server.output)
        footprint.check_gone()


@pytest.mark.parametrize(
    ("said", "number"),
    [
        pytest.param(said, number, marks=pytest.mark.drawn(one_in=3))
        for said, number in (
            ("^Ray is up", signal.SIGINT),
            ("^router is up", signal.SIGTERM),
            ("^Ray is up", signal.SIGTERM),
        )
    ],
    ids=str,
)
def test_a_signal_in_the_middle_of_the_start_leaves_nothing(said: str, number: signal.Signals) -> None:
    with starting(*POOL) as server:
        server.until_said(said)
        footprint = Footprint(server.pid)
        # ctrl-C in a terminal goes to all of the group
        server.signal(number, whole_group=number == signal.SIGINT)
        assert server.wait() == 0, server.output
        assert "Traceback" not in server.output
        # what had been begun may still be said behind it
        assert not {"stopped", "stopping"}.isdisjoint(server.lines)
        footprint.check_gone()


@pytest.mark.drawn(one_in=4)
def test_a_signal_while_ray_starts_leaves_nothing() -> None:
    with starting(*POOL) as server:
        until(lambda: "gcs_server" in server.programs(), lambda: server.output)
        footprint = Footprint(server.pid)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.output
        assert server.lines == [f"starting AlignedServe {__version__}", "stopped"]
        footprint.check_gone()


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=pytest.mark.drawn(one_in=6)) for each in ("deaf_serve", "interrupted_serve")],
)
def test_a_signal_at_an_unlucky_moment_is_not_lost(program: str) -> None:
    """While the launcher plans, and in the middle of making its event loop."""
    with starting(*POOL, program=f"tests.launch.{program}") as server:
        assert server.wait() == 0, server.output
        assert server.lines[-1] == "stopped" and "Traceback" not in server.output


# Shares of the events of the first process, from the first import on, and of those of the launcher until it is ready.
# The number of events differs a little from start to start.
MOMENTS = (*((0, n / 80) for n in range(2, 78, 10)), *((1, n / 200) for n in range(0, 190, 10)))


@contextmanager
def signalled(event: int, number: int, counts: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(signalled_serve.EVENT, str(event))
        patch.setenv(signalled_serve.SIGNAL, str(int(number)))
        patch.setenv(signalled_serve.COUNTS, str(counts))
        counts.touch()
        with starting(*POOL, program=signalled_serve.__name__) as server:
            yield server


@pytest.fixture(scope="module")
def num_events(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """The numbers of events of a start without a signal: until there is a launcher, and until it is ready."""
    counts = tmp_path_factory.mktemp("counts") / "counts"
    with signalled(-1, 0, counts) as server:
        server.until_ready()
        first, launcher = counts.read_text().split()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.output
    return int(first), int(launcher)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(moment, ENDING[place % 3], marks=pytest.mark.drawn(one_in=9))
        for place, moment in enumerate(MOMENTS)
    ],
    ids=str,
)
def test_a_signal_at_any_moment_of_the_start_ends_it_at_once(
    moment: tuple[int, float], number: signal.Signals, num_events: tuple[int, int], tmp_path: Path
) -> None:
    is_launchers, share = moment
    begin, end = (0, *num_events)[is_launchers : is_launchers + 2]
    with signalled(begin + round(share * (end - begin)), number, tmp_path / "counts") as server:
        footprint = Footprint(server.pid)

        def is_over() -> bool:
            footprint.note()
            return not server.is_running or "ready" in server.output

        until(is_over, lambda: server.output)
        assert server.wait() == 0, server.output
        # There is no line about a signal from the first process's own start, and no other line follows.
        assert server.lines[-1:] in ([], ["stopped"]), server.output
        assert {"Traceback", "Aborted", "ready"}.isdisjoint(server.output.split()), server.output
        assert not footprint.left(timeout_s=0.0)
