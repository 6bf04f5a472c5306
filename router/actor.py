"""The Ray shell of the router. Its module is imported where it runs: the launcher needs none of it."""

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
        """Imports what `run` needs."""
        import alignedserve.router.process  # noqa: F401

    def run(self) -> None:
        from alignedserve.router.process import RouterProcess

        RouterProcess(self._config).run()
