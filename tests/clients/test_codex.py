"""Codex, OpenAI's agent for a terminal, in one scripted conversation: it runs the command that it is told to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conversation import Conversation, call_of, run_beside
from tests.clients.environments import modules_of
from tests.gateway.served import play

pytestmark = pytest.mark.slow

COMMAND = "echo seen > written.txt && cat written.txt"
CONFIG = """
model = "demo"
model_provider = "alignedserve"
[model_providers.alignedserve]
name = "alignedserve"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


def test_codex_runs_a_command_and_tells_what_came_of_it(tmp_path: Path) -> None:
    program = modules_of("codex") / ".bin/codex"
    call = call_of("exec_command", json.dumps({"cmd": COMMAND}))

    async def scenario() -> None:
        router = Conversation(call, "It says: seen")
        async with router.served() as url:
            said = await codex(program, tmp_path, url)
            items = [event["item"] for event in said if event["type"] == "item.completed"]
            (ran,) = [item for item in items if item["type"] == "command_execution"]
            assert COMMAND in ran["command"] and ran["exit_code"] == 0
            assert [item["text"] for item in items if item["type"] == "agent_message"] == ["It says: seen"]
            assert said[-1]["type"] == "turn.completed" and said[-1]["usage"]["output_tokens"] > 0
            # the second request has the first one's answer, and what came of it
            first, second = router.prompts
            assert COMMAND not in first and COMMAND in second and "seen" in second

    play(scenario)
    assert (tmp_path / "written.txt").read_text() == "seen\n"


async def codex(program: Path, directory: Path, url: str) -> list[Any]:
    """Its events."""
    home = directory / "codex"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=url))
    out = await run_beside(
        *(program, "exec", "--json", "--skip-git-repo-check"),
        # it may run what it is told to without asking; what that is stands above
        *("--dangerously-bypass-approvals-and-sandbox", "Write seen to written.txt."),
        env={"PATH": os.environ["PATH"], "CODEX_HOME": str(home), "OPENAI_API_KEY": "none"},
        cwd=directory,
    )
    return [json.loads(line) for line in out.splitlines()]
