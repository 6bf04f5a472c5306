"""What is kept of a response is what was sent."""

from __future__ import annotations

import time

import pytest

from alignedserve.gateway.generation.generation import Delta, Usage
from alignedserve.gateway.generation.prepared import Answering
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder
from alignedserve.gateway.tools.readers import TextReader
from tests.gateway.scripted import MODEL


def test_a_response_has_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = ResponsesBuilder(Answering(MODEL, Service(), [[5]], created=0), {}, TextReader)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    builder.add(Delta(0, "x", [30], [], "stop"))
    kept = builder.finished(Usage(1, 1))
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    assert builder.finished(Usage(1, 1)) == kept and kept["completed_at"] == 1000
