"""The Ray shells of decode and colocated instances. They import the processes where they run: the launcher does not
need those modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from alignedserve.instance.config import InstanceConfig

if TYPE_CHECKING:
    from alignedserve.instance.process import InstanceProcess


@ray.remote
class DecodeActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._process: InstanceProcess | None = None

    def prepare(self) -> None:
        """Loads the model: `run` goes on from there."""
        from alignedserve.decode_worker.process import DecodeProcess

        self._process = DecodeProcess(self._config)
        self._process.prepare()

    def run(self) -> None:
        if self._process is None:
            self.prepare()
        assert self._process
        self._process.run()


@ray.remote
class ColocatedActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._process: InstanceProcess | None = None

    def prepare(self) -> None:
        """Loads the model: `run` goes on from there."""
        from alignedserve.decode_worker.process import ColocatedProcess

        self._process = ColocatedProcess(self._config)
        self._process.prepare()

    def run(self) -> None:
        if self._process is None:
            self.prepare()
        assert self._process
        self._process.run()
