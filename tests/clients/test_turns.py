"""Clients in scripted conversations of two turns, each with a call of a tool and its result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.clients.conversation import Conversation, call_of, run_beside
from tests.clients.environments import modules_of, python_of, variables_of
from tests.gateway.served import play

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
# Some load for half a minute on a busy machine.
LIMIT_S = 300.0
SOMETIMES = pytest.mark.drawn(one_in=4)
CALL, RESULT = call_of("weather", '{"city": "Rome"}'), "21 degrees"
ANSWER = "It is 21 degrees in Rome."
QUESTIONS = ("user: How warm is it in Rome?", "user: And in Milan?")
# What all prompts have after a call.
CALLED = f'assistant: {{"city": "Rome"}}tool: {RESULT}'


@pytest.mark.parametrize(
    ("script", "environment", "num_conversations"),
    [
        ("turns_openai.py", "openai", 4),
        ("turns_anthropic.py", "anthropic", 2),
        pytest.param("turns_litellm.py", "litellm", 3, marks=SOMETIMES),
        pytest.param("turns_langchain.py", "langchain", 3, marks=SOMETIMES),
        pytest.param("openai_agents_session.py", "agents", 2, marks=SOMETIMES),
        ("turns_openai_node.mjs", "node", 2),
        ("turns_ai_sdk.mjs", "node", 4),
        ("turns_ai_sdk.mjs", "ai-sdk-7", 4),
    ],
)
def test_two_turns(script: str, environment: str, num_conversations: int, tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / script, tmp_path)
    is_node = script.endswith(".mjs")
    if is_node:
        # A module's imports are looked for beside it.
        (tmp_path / "node_modules").symlink_to(modules_of(environment))
    command = ("node" if is_node else python_of(environment), tmp_path / script)

    async def scenario() -> None:
        router = Conversation(*[CALL, ANSWER] * 2 * num_conversations)
        async with router.served_with_store() as url:
            await run_beside(*command, cwd=tmp_path, env=variables_of(url, tmp_path))
        check(router.prompts, num_conversations)

    play(scenario, LIMIT_S)


def check(prompts: list[str], num_conversations: int) -> None:
    """Checks that each prompt has all that was said before it, in order."""
    said = [QUESTIONS[0], CALLED, f"{ANSWER}{QUESTIONS[1]}", CALLED]
    assert len(prompts) == num_conversations * len(said)
    for number, prompt in enumerate(prompts):
        rest = prompt
        for text in said[: number % len(said) + 1]:
            _, found, rest = rest.partition(text)
            assert found, (number, text, prompt)
