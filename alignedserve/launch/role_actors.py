"""The Ray actors of all roles. A process is imported only where it runs, since the launcher does not need it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import ray

if TYPE_CHECKING:
    from alignedserve.gateway.process import GatewayProcess
    from alignedserve.instance.config import InstanceConfig
    from alignedserve.instance.process.base import InstanceProcess
    from alignedserve.kvpool.process import PoolProcess
    from alignedserve.router.process import RouterProcess


class Process(Protocol):
    def run(self) -> None: ...


class Shell(ABC):
    def __init__(self, config: Any) -> None:
        self._config = config

    @abstractmethod
    def _import(self) -> Callable[[Any], Process]:
        """Imports what makes the process from its config."""

    def prepare(self) -> None:
        """Imports everything that `run` needs."""
        self._import()

    def run(self) -> None:
        self._import()(self._config).run()


@ray.remote
class RouterActor(Shell):
    def _import(self) -> type[RouterProcess]:
        from alignedserve.router.process import RouterProcess

        return RouterProcess


@ray.remote
class PoolActor(Shell):
    def _import(self) -> type[PoolProcess]:
        from alignedserve.kvpool.process import PoolProcess

        return PoolProcess


@ray.remote
class GatewayActor(Shell):
    def _import(self) -> type[GatewayProcess]:
        from alignedserve.gateway.process import GatewayProcess

        return GatewayProcess


class InstanceShell(Shell):
    _process: InstanceProcess | None = None

    @abstractmethod
    def _import(self) -> Callable[[InstanceConfig], InstanceProcess]: ...

    def prepare(self) -> None:
        """Loads the model. `run` continues from there."""
        self._process = self._import()(self._config)
        self._process.prepare()

    def run(self) -> None:
        if self._process is None:
            self.prepare()
        assert self._process
        self._process.run()


@ray.remote
class PrefillActor(InstanceShell):
    def _import(self) -> type[InstanceProcess]:
        from alignedserve.prefill_worker.process import PrefillProcess

        return PrefillProcess


@ray.remote
class DecodeActor(InstanceShell):
    def _import(self) -> type[InstanceProcess]:
        from alignedserve.decode_worker.process import DecodeProcess

        return DecodeProcess


@ray.remote
class ColocatedActor(InstanceShell):
    def _import(self) -> type[InstanceProcess]:
        from alignedserve.decode_worker.process import ColocatedProcess

        return ColocatedProcess


@ray.remote
class ChangingActor(InstanceShell):
    """An instance that may change between prefill and decode. See router/role_change.py."""

    def _import(self) -> Callable[[InstanceConfig], InstanceProcess]:
        return changing_process


def changing_process(config: InstanceConfig) -> InstanceProcess:
    """Returns a process in its first role, which may change to the other."""
    from alignedserve.decode_worker.process import DecodeProcess
    from alignedserve.prefill_worker.process import PrefillProcess

    if config.first_role == PrefillProcess.role:
        return PrefillProcess(config, DecodeProcess(config))
    return DecodeProcess(config, PrefillProcess(config))
