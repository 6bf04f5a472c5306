"""Codex, OpenAI's agent for a terminal, in one scripted conversation: it runs the command that it is told to.

The demo model can't call tools, and its context is too short for what Codex says of itself, so an island answers by
script.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignedserve.protocol.messages import Submit
from alignedserve.types import InstanceId
from tests.clients.environments import modules_of
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import play, served
from tests.gateway.tools.test_tools import TEMPLATE, model_with

pytestmark = pytest.mark.slow

# with all of a call's arguments, whatever the tool
ANY_TOOL = TEMPLATE.replace("{{ call.function.arguments.city }}", "{{ call.function.arguments | tojson }}")
COMMAND = "echo seen > written.txt && cat written.txt"
CALL = {"name": "exec_command", "arguments": {"cmd": COMMAND}}
CONFIG = """
model = "demo"
model_provider = "alignedserve"
[model_providers.alignedserve]
name = "alignedserve"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


class Conversation(ScriptedRouter):
    """Answers each request by the next of `answers`."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self._answers = [answer_of(answer) for answer in answers]

    def _submit(self, gateway: InstanceId, submit: Submit) -> None:
        self.answer = self._answers[len(self.submitted)]
        super()._submit(gateway, submit)


def test_codex_runs_a_command_and_tells_what_came_of_it(tmp_path: Path) -> None:
    program = modules_of("codex") / ".bin/codex"
    call = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"

    async def scenario() -> None:
        router = Conversation(call, "It says: seen")
        model = replace(model_with(ANY_TOOL), max_model_len=200_000)
        async with served(router, model=model) as at:
            said = await codex(program, tmp_path, str(at.http.base_url).rstrip("/"))
            items = [event["item"] for event in said if event["type"] == "item.completed"]
            (ran,) = [item for item in items if item["type"] == "command_execution"]
            assert COMMAND in ran["command"] and ran["exit_code"] == 0
            assert [item["text"] for item in items if item["type"] == "agent_message"] == ["It says: seen"]
            assert said[-1]["type"] == "turn.completed" and said[-1]["usage"]["output_tokens"] > 0
            # the second request has the first one's answer, and what came of it
            first, second = (TOKENIZER.decode(each.request.prompt) for each in router.submitted)
            assert COMMAND not in first and COMMAND in second and "seen" in second

    play(scenario)
    assert (tmp_path / "written.txt").read_text() == "seen\n"


async def codex(program: Path, directory: Path, url: str) -> list[Any]:
    """Its events."""
    home = directory / "codex"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=url))
    process = await asyncio.create_subprocess_exec(
        *(str(program), "exec", "--json", "--skip-git-repo-check"),
        # it may run what it is told to without asking; what that is stands above
        *("--dangerously-bypass-approvals-and-sandbox", "Write seen to written.txt."),
        env={"PATH": os.environ["PATH"], "CODEX_HOME": str(home), "OPENAI_API_KEY": "none"},
        cwd=directory,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out.decode()[-4000:], err.decode()[-4000:])
    return [json.loads(line) for line in out.splitlines()]
