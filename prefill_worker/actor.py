"""The Ray shell of a prefill instance. It imports the process where it runs: the launcher does not need that
module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from alignedserve.instance.config import InstanceConfig

if TYPE_CHECKING:
    from alignedserve.instance.process import InstanceProcess


@ray.remote
class PrefillActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._process: InstanceProcess | None = None

    def prepare(self) -> None:
        """Loads the model: `run` goes on from there."""
        from alignedserve.prefill_worker.process import PrefillProcess

        self._process = PrefillProcess(self._config)
        self._process.prepare()

    def run(self) -> None:
        if self._process is None:
            self.prepare()
        assert self._process
        self._process.run()
