"""The common part of the instances' Ray actors. The process is imported only where it runs, since the launcher does not
need it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from alignedserve.instance.config import InstanceConfig

if TYPE_CHECKING:
    from alignedserve.instance.process import InstanceProcess


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
