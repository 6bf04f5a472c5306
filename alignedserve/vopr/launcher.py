"""Does what the launcher does: starts processes again that died, and kills a router that hangs."""

from __future__ import annotations

from functools import partial

from alignedserve.sim.island import Island
from alignedserve.sim.process import SimProcess
from alignedserve.sim.router import RouterProcess
from alignedserve.types import InstanceId
from alignedserve.vopr.history import ROUTER, Hang, Kill
from alignedserve.vopr.plan import Plan

# As launch/process_supervisor.py has it: a process that is down for so many seconds and has not ended hangs.
HANG_S = 10.0
# The share of a router's silence after which all processes have left it.
_LEFT_AFTER = 1.4


class Launcher:
    def __init__(self, island: Island, plan: Plan) -> None:
        self._island = island
        self._plan = plan
        self._clock = island.world.clock
        # The number of each process's hangs: it is not woken up from an earlier one.
        self._num_hangs: dict[InstanceId, int] = {}
        island.world.fenced = self._fenced
        self.num_fenced = 0

    def process(self, name: InstanceId) -> SimProcess | RouterProcess:
        return self._island.router if name == ROUTER else self._island.world.processes[name]

    def kill(self, action: Kill) -> None:
        """All of them at the same moment; those that are down already come up when they would have."""
        killed = [name for name in action.processes if self.process(name).is_up]
        for name in killed:
            self._kill(name)
        pool = self._island.pool
        if action.loses_segment and not pool.is_up:
            pool.lose_segment()
        for name in killed:
            self._start_after(action.processes[name], name)

    def hang(self, action: Hang) -> None:
        name, process = action.process, self.process(action.process)
        if not process.is_up or process.is_hung:
            return
        process.hang()
        number = self._num_hangs[name] = self._num_hangs.get(name, 0) + 1
        self._clock.after(action.seconds, partial(self._wake_up, name, number))
        if name == ROUTER:
            patience_s = _LEFT_AFTER * self._plan.silence_s + HANG_S
            self._clock.after(patience_s, partial(self._replace_router, number))

    def calm(self) -> None:
        """Everything is up, and awake."""
        for name in (ROUTER, *self._plan.processes):
            process = self.process(name)
            process.wake_up()
            if not process.is_up:
                process.start()

    def _kill(self, name: InstanceId) -> None:
        self._num_hangs[name] = self._num_hangs.get(name, 0) + 1
        self.process(name).kill()

    def _start_after(self, seconds: float, name: InstanceId) -> None:
        if seconds:
            self._clock.after(seconds, partial(self._start, name))
        else:
            self._start(name)

    def _start(self, name: InstanceId) -> None:
        if not self.process(name).is_up:
            self.process(name).start()

    def _wake_up(self, name: InstanceId, number: int) -> None:
        if self._num_hangs[name] == number:
            self.process(name).wake_up()

    def _replace_router(self, number: int) -> None:
        if self._num_hangs[ROUTER] == number and self._island.router.is_hung:
            self._kill(ROUTER)
            self._start(ROUTER)

    def _fenced(self, process: SimProcess) -> None:
        self.num_fenced += 1
        self._num_hangs[process.instance_id] = self._num_hangs.get(process.instance_id, 0) + 1
        self._start_after(self._plan.restart_s or 1e-4, process.instance_id)
