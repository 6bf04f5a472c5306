"""Ray actors of decode and colocated instances. See instance/actor.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from alignedserve.instance.actor import InstanceShell

if TYPE_CHECKING:
    from alignedserve.instance.process import InstanceProcess


@ray.remote
class DecodeActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        from alignedserve.decode_worker.process import DecodeProcess

        return DecodeProcess(self._config)


@ray.remote
class ColocatedActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        from alignedserve.decode_worker.process import ColocatedProcess

        return ColocatedProcess(self._config)
