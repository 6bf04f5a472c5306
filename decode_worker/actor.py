"""The Ray shells of decode and colocated instances. They import the processes where they run: the launcher does not
need those modules."""

from __future__ import annotations

import ray

from alignedserve.instance.config import InstanceConfig


@ray.remote
class DecodeActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config

    def prepare(self) -> None:
        """Imports what `run` needs."""
        import alignedserve.decode_worker.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.decode_worker.process import DecodeProcess

        DecodeProcess(self._config).run()


@ray.remote
class ColocatedActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config

    def prepare(self) -> None:
        """Imports what `run` needs."""
        import alignedserve.decode_worker.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.decode_worker.process import ColocatedProcess

        ColocatedProcess(self._config).run()
