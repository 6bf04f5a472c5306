"""The Ray shell of a prefill instance. It imports the process where it runs: the launcher does not need that
module."""

from __future__ import annotations

import ray

from alignedserve.instance.config import InstanceConfig


@ray.remote
class PrefillActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config

    def prepare(self) -> None:
        """Imports what `run` needs."""
        import alignedserve.prefill_worker.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.prefill_worker.process import PrefillProcess

        PrefillProcess(self._config).run()
