"""The Ray actor of the pool. The process is imported only where it runs, since the launcher does not need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from alignedserve.kvpool.process import PoolProcessConfig


@ray.remote
class PoolActor:
    def __init__(self, config: PoolProcessConfig) -> None:
        self._config = config

    def prepare(self) -> None:
        """Imports what `run` needs."""
        import alignedserve.kvpool.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.kvpool.process import PoolProcess

        PoolProcess(self._config).run()
