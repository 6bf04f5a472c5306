"""Epochs: which start of a process is meant, and when that was."""

from __future__ import annotations

import time

import pytest

from alignedserve.protocol.connection import new_epoch, start_of
from alignedserve.types import Epoch


def test_an_epoch_tells_when_the_process_was_started() -> None:
    before_s = time.time()
    now = new_epoch()
    assert before_s - 1 <= start_of(now) <= time.time() + 1
    assert start_of(now) - start_of(Epoch(now - 3_600_000_000)) == pytest.approx(3600.0, abs=10.0)
