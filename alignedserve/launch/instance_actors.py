"""The Ray actors of instances. A process is imported only where it runs, since the launcher does not need it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import ray

from alignedserve.instance.config import InstanceConfig

if TYPE_CHECKING:
    from alignedserve.instance.process.base import InstanceProcess


class InstanceShell(ABC):
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._process: InstanceProcess | None = None

    @abstractmethod
    def _make(self) -> InstanceProcess:
        """Imports and makes the process."""

    def prepare(self) -> None:
        """Loads the model. `run` continues from there."""
        self._process = self._make()
        self._process.prepare()

    def run(self) -> None:
        if self._process is None:
            self.prepare()
        assert self._process
        self._process.run()


@ray.remote
class PrefillActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        from alignedserve.prefill_worker.process import PrefillProcess

        return PrefillProcess(self._config)


@ray.remote
class DecodeActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        from alignedserve.decode_worker.process import DecodeProcess

        return DecodeProcess(self._config)


@ray.remote
class ColocatedActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        from alignedserve.decode_worker.process import ColocatedProcess

        return ColocatedProcess(self._config)


@ray.remote
class ChangingActor(InstanceShell):
    """An instance that may change between prefill and decode. See router/role_change.py."""

    def _make(self) -> InstanceProcess:
        return changing_process(self._config)


def changing_process(config: InstanceConfig) -> InstanceProcess:
    """Returns a process in its first role, which may change to the other."""
    from alignedserve.decode_worker.process import DecodeProcess
    from alignedserve.prefill_worker.process import PrefillProcess

    prefill, decode = PrefillProcess(config), DecodeProcess(config)
    first, other = (prefill, decode) if config.first_role == prefill.role else (decode, prefill)
    first.may_become(other)
    return first
