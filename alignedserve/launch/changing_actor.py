"""The Ray actor of an instance that may change between prefill and decode. See router/role_change.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from alignedserve.instance.actor import InstanceShell

if TYPE_CHECKING:
    from alignedserve.instance.config import InstanceConfig
    from alignedserve.instance.process import InstanceProcess


@ray.remote
class ChangingActor(InstanceShell):
    def _make(self) -> InstanceProcess:
        return changing_process(self._config)


def changing_process(config: InstanceConfig) -> InstanceProcess:
    """Returns a process in its first role, which may change to the other."""
    from alignedserve.decode_worker.process import DecodeProcess
    from alignedserve.prefill_worker.process import PrefillProcess

    prefill, decode = PrefillProcess(config), DecodeProcess(config)
    first, other = (prefill, decode) if config.first_role == prefill.role else (decode, prefill)
    first.may_become(other)
    return first
