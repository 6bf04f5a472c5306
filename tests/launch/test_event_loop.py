"""A machine may have uvloop, which Ray then installs in its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.server import serving

# As uvloop does it: its event loops start no children in process groups, and have no watcher for asyncio's.
UVLOOP = """
import asyncio


class Policy(asyncio.DefaultEventLoopPolicy):
    def get_child_watcher(self):
        raise NotImplementedError


def install():
    asyncio.set_event_loop_policy(Policy())


def new_event_loop():
    return asyncio.new_event_loop()
"""


def test_the_gateway_starts_its_children_beside_uvloop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvloop.py").write_text(UVLOOP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving() as server:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Count from 5 to 9."}]}
        assert server.post("/v1/chat/completions", chat).status_code == 200
