"""The Ray actor of a prefill instance. See instance/actor.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from alignedserve.instance.actor import InstanceShell

if TYPE_CHECKING:
    from alignedserve.instance.process import InstanceProcess


@ray.remote
class PrefillActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        from alignedserve.prefill_worker.process import PrefillProcess

        return PrefillProcess(self._config)
