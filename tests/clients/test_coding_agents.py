"""Claude Code and opencode, agents for a terminal, in scripted conversations of two turns: each runs the command that
it is told to, and goes on in a second process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conversation import Conversation, call_of, run_beside
from tests.clients.environments import modules_of
from tests.gateway.served import play

pytestmark = pytest.mark.slow

COMMAND = "echo seen > written.txt && cat written.txt"
ANSWERS = ("It says: seen", "Nothing else.")
QUESTIONS = ("Write seen to written.txt.", "What else does it say?")
# Each agent is three processes of some ten seconds of a core, which read a hundred megabytes.
LIMIT_S = 600.0
# What all prompts of its conversation have. What it asks for beside that, a title for instance, is asked without tools.
HAS_TOOLS = '"type": "function"'


class AgentConversation(Conversation):
    """Answers prompts with tools in turn, and all others with a title."""

    def answer_to(self, prompt: str) -> str:
        return super().answer_to(prompt) if HAS_TOOLS in prompt else "A file"


def claude_code(url: str, question: str, is_first: bool) -> tuple[list[str], dict[str, str]]:
    """Returns its command, and the variables that it is told the server by."""
    program = modules_of("claude-code") / ".bin/claude"
    more = [] if is_first else ["--continue"]
    command = [str(program), "-p", question, *more, "--model", "demo", "--allowedTools", "Bash"]
    return command, {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
        # neither updates, nor telemetry
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def opencode(url: str, question: str, is_first: bool) -> tuple[list[str], dict[str, str]]:
    packages = modules_of("opencode")
    program = packages / "opencode-linux-x64-baseline/bin/opencode"
    if not program.exists():
        pytest.skip("its package here is for x86-64 alone")
    config = {
        "provider": {
            "alignedserve": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {"demo": {}},
            }
        },
        "small_model": "alignedserve/demo",
        "permission": {"bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    more = [] if is_first else ["--continue"]
    command = [str(program), "run", "--model", "alignedserve/demo", *more, question]
    return command, {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


@pytest.mark.parametrize(
    ("agent", "tool"),
    [pytest.param(claude_code, "Bash", id="claude-code"), pytest.param(opencode, "bash", id="opencode")],
)
def test_an_agent_runs_a_command_and_goes_on(
    agent: Callable[[str, str, bool], tuple[list[str], dict[str, str]]],
    tool: str,
    tmp_path: Path,
) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()

    async def scenario() -> None:
        call = call_of(tool, json.dumps({"command": COMMAND, "description": "Write a file"}))
        router = AgentConversation(call, *ANSWERS)
        async with router.served() as url:
            for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
                command, variables = agent(url, question, question is QUESTIONS[0])
                env = {"PATH": os.environ["PATH"], "HOME": str(home)} | variables
                told = await run_beside(*command, cwd=work, env=env)
                assert answer in told
        first, called, again = [prompt for prompt in router.prompts if HAS_TOOLS in prompt]
        assert QUESTIONS[0] in first and COMMAND not in first
        assert COMMAND in called and ANSWERS[0] not in called
        assert COMMAND in again and again.index(ANSWERS[0]) < again.index(QUESTIONS[1])

    play(scenario, LIMIT_S)
    assert (work / "written.txt").read_text() == "seen\n"
