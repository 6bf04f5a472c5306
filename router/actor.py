"""The router's Ray actor. It imports the router only where it runs, because the launcher does not need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from alignedserve.router.process import RouterProcessConfig


@ray.remote
class RouterActor:
    def __init__(self, config: RouterProcessConfig) -> None:
        self._config = config

    def prepare(self) -> None:
        """Imports everything that `run` needs."""
        import alignedserve.router.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.router.process import RouterProcess

        RouterProcess(self._config).run()
