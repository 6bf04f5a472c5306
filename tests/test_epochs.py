from __future__ import annotations

import time

import pytest

from alignedserve.protocol.connection import new_epoch


def test_epochs_rise_even_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now_ns = new_epoch(), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - 30 * 10**9)
    monkeypatch.setattr(time, "time", lambda: now_ns / 1e9 - 30)
    after = new_epoch()
    assert before < after < 2**53
    assert len(str(before)) == len(str(2**53))
