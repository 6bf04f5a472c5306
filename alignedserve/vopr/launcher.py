"""Does the launcher's work: restarts processes that died, and kills a router that hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from alignedserve.process import HANG_S
from alignedserve.sim.clock import Clock
from alignedserve.sim.pool import SimPool
from alignedserve.types import InstanceId
from alignedserve.vopr.history import ROUTER, Hang, Kill, Stop
from alignedserve.vopr.plan import Plan

# The share of a router's silence after which all processes have left it.
_LEFT_AFTER = 1.4
# Seconds after which a process that was asked to stop is killed, and seconds between two checks of it.
STOP_S, LOOK_S = 45.0, 0.5


class LaunchedProcess(Protocol):
    @property
    def is_up(self) -> bool: ...

    @property
    def is_hung(self) -> bool: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def hang(self) -> None: ...

    def wake_up(self) -> None: ...


class Stoppable(LaunchedProcess, Protocol):
    def stop(self) -> None: ...


class Launcher:
    def __init__(
        self,
        clock: Clock,
        plan: Plan,
        processes: Mapping[InstanceId, LaunchedProcess],
        pools: Sequence[SimPool],
        stoppable: Mapping[InstanceId, Stoppable] | None = None,
    ) -> None:
        self.processes = processes
        self._clock = clock
        self._plan = plan
        self._pools = pools
        self._stoppable = stoppable or {}
        # The number of each process's deaths and hangs, so that it is not woken up from an earlier one.
        self._num_hangs: Counter[InstanceId] = Counter()
        # The number of its starts and deaths here. A process that was asked to stop is awaited until it ends, hung or
        # not.
        self._num_turns: Counter[InstanceId] = Counter()
        self.num_fenced = 0

    def kill(self, action: Kill) -> None:
        """Kills all of them at the same moment. Those that are already down come up as planned before."""
        killed = [name for name in action.processes if self.processes[name].is_up]
        for name in killed:
            self._kill(name)
        for pool in self._pools:
            if action.loses_segment and not pool.is_up:
                pool.lose_segment()
        for name in killed:
            self._start_after(action.processes[name], name)

    def hang(self, action: Hang) -> None:
        name, process = action.process, self.processes[action.process]
        if not process.is_up or process.is_hung:
            return
        process.hang()
        self._num_hangs[name] += 1
        number = self._num_hangs[name]
        self._clock.after(action.seconds, partial(self._wake_up, name, number))
        if name.endswith(ROUTER):
            patience_s = _LEFT_AFTER * self._plan.silence_s + HANG_S
            self._clock.after(patience_s, partial(self._replace_router, name, number))

    def stop(self, action: Stop) -> None:
        """Lets it end by itself when it has finished its work. It is then restarted."""
        if (process := self._stoppable[action.process]).is_up:
            process.stop()
            self._await_end(action, self._num_turns[action.process], self._clock.now + STOP_S)

    def fenced(self, name: InstanceId) -> None:
        """Restarts a process that a router has killed."""
        self.num_fenced += 1
        self._count_death(name)
        self._start_after(self._plan.restart_s or 1e-4, name)

    def calm(self) -> None:
        """Starts or wakes everything."""
        for name, process in self.processes.items():
            process.wake_up()
            self._start(name)

    def _kill(self, name: InstanceId) -> None:
        self._count_death(name)
        self.processes[name].kill()

    def _count_death(self, name: InstanceId) -> None:
        self._num_hangs[name] += 1
        self._num_turns[name] += 1

    def _await_end(self, action: Stop, number: int, limit_s: float) -> None:
        name = action.process
        if self._num_turns[name] != number:
            # It was killed or started meanwhile.
            return
        if self.processes[name].is_up and self._clock.now < limit_s:
            self._clock.after(LOOK_S, partial(self._await_end, action, number, limit_s))
        else:
            self._kill(name)
            self._start_after(action.seconds, name)

    def _start_after(self, seconds: float, name: InstanceId) -> None:
        if seconds:
            self._clock.after(seconds, partial(self._start, name))
        else:
            self._start(name)

    def _start(self, name: InstanceId) -> None:
        if not self.processes[name].is_up:
            self._num_turns[name] += 1
            self.processes[name].start()

    def _wake_up(self, name: InstanceId, number: int) -> None:
        if self._num_hangs[name] == number:
            self.processes[name].wake_up()

    def _replace_router(self, name: InstanceId, number: int) -> None:
        if self._num_hangs[name] == number and self.processes[name].is_hung:
            self._kill(name)
            self._start(name)
