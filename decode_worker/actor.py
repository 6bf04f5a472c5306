"""The Ray shell of a decode instance. Its module is imported where it runs: the launcher needs none of it."""

from __future__ import annotations

import ray

from alignedserve.instance.config import InstanceConfig


@ray.remote
class DecodeActor:
    def __init__(self, config: InstanceConfig) -> None:
        self._config = config

    def run(self) -> None:
        from alignedserve.decode_worker.process import DecodeProcess

        DecodeProcess(self._config).run()
