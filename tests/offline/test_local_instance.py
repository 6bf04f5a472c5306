"""An instance without a router: it waits for what others do, and never for what it has to do itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from alignedserve.offline.local_instance import LocalInstance
from tests.engine.helpers import EvictEveryStep, greedy_params, make_instance, run, tokens
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"


class Wake(threading.Event):
    """An event that may be waited for only while it is set, or something is under way that will set it."""

    def __init__(self, instance: LocalInstance) -> None:
        super().__init__()
        self._instance = instance

    def wait(self, timeout: float | None = None) -> bool:
        worker = self._instance._worker
        assert self.is_set() or worker._num_copies or len(worker._compiling), (
            "it waits, and nothing is under way"
        )
        return super().wait(timeout)


def test_a_preempted_request_is_not_waited_for(tiny_model: Directory) -> None:
    """Its copies are so small that they are over when they begin: no thread is there to wake anybody."""
    instance = make_instance(tiny_model(FAMILY), EvictEveryStep)
    instance._wake = Wake(instance)
    instance.reset()
    assert tokens(run(instance, prompts(), greedy_params())) == greedy(tiny_model(FAMILY))
    assert instance.num_evictions > 10
