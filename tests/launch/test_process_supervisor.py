"""When a process is started again and when it is given up, with an actor that ends as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from alignedserve.launch import process_supervisor as supervisor_module
from alignedserve.launch.console import Alarm
from alignedserve.launch.control import RestartFailed
from alignedserve.launch.islands import first_failure
from alignedserve.launch.process_supervisor import MAX_DEATHS, ProcessFailed, ProcessSupervisor


class ScriptedActor:
    def __init__(self) -> None:
        self.num_runs = 0
        self.num_restarts = 0
        # how often Ray will say that it is unavailable
        self.num_unavailable = 0
        # who takes its place; what prevents it from doing that
        self.next_one: ScriptedActor | None = None
        self.cannot_be: Exception | None = None
        self.is_killed = False
        # how its process ended, if that is known
        self.why: str | None = None
        self._running = asyncio.Event()
        self._ends: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def ready(self) -> None:
        if self.num_unavailable:
            self.num_unavailable -= 1
            raise killed()

    async def run(self) -> None:
        self.num_runs += 1
        self._running.set()
        if error := await self._ends.get():
            raise error

    async def why_ended(self) -> str | None:
        return self.why

    def restart(self) -> None:
        self.num_restarts += 1

    def successor(self) -> ScriptedActor | None:
        return self.next_one

    async def prepare(self) -> None:
        if self.cannot_be:
            raise self.cannot_be

    def kill(self) -> None:
        self.is_killed = True
        self.end(ActorDiedError())

    def end(self, error: Exception | None = None) -> None:
        self._ends.put_nowait(error)

    async def until_runs(self, count: int) -> None:
        while self.num_runs < count:
            self._running.clear()
            await self._running.wait()


def killed() -> Exception:
    return ActorUnavailableError("the process is gone", None)


def failed(cause: Exception) -> Exception:
    # It has no annotations.
    make: Callable[[str, str, Exception], Exception] = RayTaskError
    return make("run", "a traceback\nof many lines", cause)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_RETRY_S", 0.0)


def play(scenario: Callable[[ScriptedActor, ProcessSupervisor, list[str]], Awaitable[None]]) -> None:
    async def within_time() -> None:
        said: list[str] = []
        actor = ScriptedActor()
        async with asyncio.timeout(60):
            await scenario(actor, ProcessSupervisor("decode-0", actor, said.append), said)

    asyncio.run(within_time())


async def failure_of(supervising: asyncio.Task[None]) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        await supervising
    failure = first_failure(caught.value)
    assert isinstance(failure, ProcessFailed)
    return str(failure)


def test_a_part_that_is_told_to_stop_stops() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        supervisor.stopping()
        actor.end()
        await supervising
        assert actor.num_runs == 1
        assert len(said) == 1 and said[0].startswith("decode-0 is up after") and said[0].endswith("pid 1")

    play(scenario)


def test_a_killed_part_runs_again_however_often() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        for count in range(1, 3 * MAX_DEATHS):
            await actor.until_runs(count)
            supervisor.seen("here", "pid")
            supervisor.unseen("here", is_dead=True)
            actor.end(killed())
        await actor.until_runs(3 * MAX_DEATHS)
        assert said.count("decode-0 is down; starting it again") == 3 * MAX_DEATHS - 1
        supervisor.stopping()
        actor.end()
        await supervising

    play(scenario)


def test_how_a_process_ended_is_printed() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid")
        supervisor.unseen("here", is_dead=True)
        actor.end(killed())
        await actor.until_runs(2)
        assert said[1:] == ["decode-0 is down; starting it again", "decode-0: its process died"]
        actor.why = "signal 9 (SIGKILL), perhaps out of memory"
        for _ in range(MAX_DEATHS - 1):
            actor.end(killed())
        message = await failure_of(supervising)
        assert message == f"decode-0 died {MAX_DEATHS} times in a row: its process died: {actor.why}"
        assert said[-1] == f"decode-0: its process died: {actor.why}"

    play(scenario)


def test_a_part_that_never_gets_up_is_given_up() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        for _ in range(MAX_DEATHS):
            actor.end(killed())
        message = f"decode-0 died {MAX_DEATHS} times in a row: its process died"
        assert await failure_of(supervising) == message and actor.num_runs == MAX_DEATHS

    play(scenario)


def test_a_death_counts_once_however_long_ray_takes_to_make_another_process() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        supervisor.unseen("here", is_dead=True)
        actor.num_unavailable = 10 * MAX_DEATHS
        actor.end(killed())
        await actor.until_runs(2)
        assert actor.num_unavailable == 0
        supervisor.stopping()
        actor.end()
        await supervising

    play(scenario)


def test_a_part_that_has_no_process_stops_too() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        actor.num_unavailable = 1_000_000_000
        supervising = asyncio.create_task(supervisor.supervise())
        await asyncio.sleep(0)
        supervisor.stopping()
        await supervising
        assert actor.num_runs == 0

    play(scenario)


def test_a_part_that_gets_no_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_S", 0.0)

    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        actor.num_unavailable = 1_000_000
        supervising = asyncio.create_task(supervisor.supervise())
        assert await failure_of(supervising) == f"decode-0 died {MAX_DEATHS} times in a row: its process died"
        assert actor.num_runs == 0

    play(scenario)


def test_the_end_that_a_restart_brings_about_is_no_death_and_no_reason() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        supervisor.seen("here", "pid 1")
        supervisor.unseen("here", is_dead=True)
        for _ in range(MAX_DEATHS - 1):
            actor.end(failed(ValueError("the model is gone")))
            actor.end(killed())
        actor.end(killed())
        message = f"decode-0 died {MAX_DEATHS} times in a row: the model is gone"
        assert await failure_of(supervising) == message
        assert (actor.num_runs, actor.num_restarts) == (2 * MAX_DEATHS - 1, MAX_DEATHS - 1)

    play(scenario)


def test_what_a_part_complains_of_at_its_first_start_is_said_in_a_line() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        actor.end(failed(ValueError("dtype='int3': must be one of ...")))
        assert await failure_of(supervising) == "decode-0: dtype='int3': must be one of ..."

    play(scenario)


def test_an_error_later_on_takes_a_new_process() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid")
        actor.end(failed(RuntimeError("5 blocks free, 4 counted")))
        await actor.until_runs(2)
        assert actor.num_restarts == 1 and said[-1] == "decode-0 failed: 5 blocks free, 4 counted"
        supervisor.stopping()
        actor.end()
        await supervising

    play(scenario)


def test_what_ray_gives_up_is_given_up() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        actor.end(ActorDiedError())
        assert (await failure_of(supervising)).startswith("decode-0 can't be started again: ")

    play(scenario)


def test_a_part_that_is_missed_and_has_not_ended_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "HANG_S", 0.05)

    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        supervisor.unseen("here", is_dead=True)
        while not actor.num_restarts:
            await asyncio.sleep(0.01)
        actor.end(killed())
        await actor.until_runs(2)
        supervisor.seen("here", "pid 2")
        assert said[1:3] == ["decode-0 is down; starting it again", "decode-0 hangs; killing it"]
        supervisor.stopping()
        actor.end()
        await supervising
        assert actor.num_restarts == 1

    play(scenario)


def test_a_part_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_S", 0.05)
    monkeypatch.setattr(supervisor_module, "HANG_S", 0.05)

    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid")
        supervisor.unseen("here", is_dead=False)
        assert await failure_of(supervising) == "decode-0 did not come back within 0 s"
        # that its router is gone says nothing about the process
        assert len(said) == 1

    play(scenario)


def test_a_part_is_up_as_long_as_one_router_has_it() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        for island in ("a", "b"):
            supervisor.seen(island, "pid")
        supervisor.unseen("a", is_dead=True)
        assert len(said) == 1
        supervisor.unseen("b", is_dead=True)
        assert said[-1] == "decode-0 is down; starting it again"

    play(scenario)


# ---- replaced ----


def test_another_one_takes_the_place_of_one_that_is_killed() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        actor.next_one = ScriptedActor()
        replacing = asyncio.create_task(supervisor.replace())
        while not actor.is_killed:
            await asyncio.sleep(0)
        # Not as long as the old one is connected.
        for _ in range(20):
            await asyncio.sleep(0)
        assert not actor.next_one.num_runs
        supervisor.unseen("here", is_dead=True)
        await actor.next_one.until_runs(1)
        assert not replacing.done()
        supervisor.seen("here", "pid 2")
        await replacing
        assert not any("down" in line for line in said) and "pid 2" in said[-1]
        # The new one is supervised as the old one was.
        supervisor.unseen("here", is_dead=True)
        actor.next_one.end(killed())
        await actor.next_one.until_runs(2)
        supervisor.seen("here", "pid 3")
        assert any("down" in line for line in said)
        supervisor.stopping()
        actor.next_one.end()
        await supervising

    play(scenario)


def test_one_that_has_no_other_is_started_again_in_its_place() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        replacing = asyncio.create_task(supervisor.replace())
        while not actor.num_restarts:
            await asyncio.sleep(0)
        actor.end(killed())
        await actor.until_runs(2)
        supervisor.unseen("here", is_dead=True)
        supervisor.seen("here", "pid 2")
        await replacing
        assert actor.num_restarts == 1 and not actor.is_killed
        supervisor.stopping()
        actor.end()
        await supervising

    play(scenario)


def test_when_there_can_not_be_another_one_this_one_goes_on() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        actor.next_one = ScriptedActor()
        actor.next_one.cannot_be = killed()
        with pytest.raises(RestartFailed, match="another process for decode-0: its process died"):
            await supervisor.replace()
        assert actor.next_one.is_killed and not actor.is_killed and supervisor.is_up
        supervisor.stopping()
        actor.end()
        await supervising

    play(scenario)


def test_a_death_is_a_warning_and_a_replaced_process_has_its_real_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("alignedserve.launch.process_supervisor.time.monotonic", lambda: now_s)

    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        nonlocal now_s
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        new = actor.next_one = ScriptedActor()
        replacing = asyncio.create_task(supervisor.replace())
        while not actor.is_killed:
            await asyncio.sleep(0)
        now_s = 12.8
        supervisor.unseen("here", is_dead=True)
        await new.until_runs(1)
        supervisor.seen("here", "pid 2")
        await replacing
        assert said == ["decode-0 is up after 0.0 s: pid 1", "decode-0 is up after 12.8 s: pid 2"]
        supervisor.unseen("here", is_dead=True)
        assert said[2:] == ["decode-0 is down; starting it again"] and isinstance(said[2], Alarm)
        supervisor.stopping()
        new.end()
        await supervising

    async def within_time() -> None:
        said: list[str] = []
        actor = ScriptedActor()
        await scenario(actor, ProcessSupervisor("decode-0", actor, said.append), said)

    asyncio.run(within_time())


def test_one_that_is_not_up_is_not_replaced() -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        actor.next_one = ScriptedActor()
        with pytest.raises(RestartFailed, match="decode-0 is not up"):
            await supervisor.replace()
        assert actor.next_one.is_killed and not actor.is_killed
        supervisor.stopping()
        actor.end()
        await supervising

    play(scenario)


def test_another_one_that_takes_its_time_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "HANG_S", 0.01)

    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        actor.next_one = ScriptedActor()
        replacing = asyncio.create_task(supervisor.replace())
        while not actor.is_killed:
            await asyncio.sleep(0)
        supervisor.unseen("here", is_dead=True)
        await asyncio.sleep(0.1)
        assert actor.next_one.num_runs == 1 and not actor.next_one.num_restarts
        supervisor.seen("here", "pid 2")
        await replacing
        supervisor.stopping()
        actor.next_one.end()
        await supervising

    play(scenario)


def test_another_one_that_does_not_come_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(actor: ScriptedActor, supervisor: ProcessSupervisor, said: list[str]) -> None:
        supervising = asyncio.create_task(supervisor.supervise())
        await actor.until_runs(1)
        supervisor.seen("here", "pid 1")
        monkeypatch.setattr(supervisor_module, "RESTART_S", 0.05)
        actor.next_one = ScriptedActor()
        replacing = asyncio.create_task(supervisor.replace())
        while not actor.is_killed:
            await asyncio.sleep(0)
        supervisor.unseen("here", is_dead=True)
        with pytest.raises(RestartFailed, match="does not come up"):
            await replacing
        # It may come up later.
        supervisor.seen("here", "pid 2")
        supervisor.stopping()
        actor.next_one.end()
        await supervising

    play(scenario)
