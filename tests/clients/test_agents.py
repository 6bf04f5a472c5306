"""Libraries for agents, each in scripted conversations: docs/clients.md has a row for each.

The model makes broken calls: one of a tool that does not exist, and one whose arguments are no JSON. The library sends
each back to the model, with an error. Later prompts must hold both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.conversation import Conversation, call_of, run_beside
from tests.clients.environments import python_of, variables_of
from tests.gateway.served import play

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
SOMETIMES = pytest.mark.drawn(one_in=4)


@dataclass(frozen=True)
class Turn:
    """What the model says, and what all later prompts of the conversation have of it."""

    said: str
    kept: tuple[str, ...] = ()


def unknown(error: str) -> Turn:
    """Returns a call of a tool that does not exist. `error`: the beginning of its result."""
    return Turn(call_of("clock", "{}"), (f"assistant: {{}}tool: {error}",))


def no_json(then: str) -> Turn:
    """Returns a call whose arguments are no JSON. `then`: the beginning of the next message."""
    arguments = '{"city": Rome}'
    return Turn(call_of("weather", arguments), (arguments.replace('"', '\\"') + f'"}}{then}',))


QUESTION = "user: How warm is it in Rome?"
CALL = Turn(call_of("weather", '{"city": "Rome"}'), ('assistant: {"city": "Rome"}tool: 21 degrees',))
ANSWER = Turn("It is 21 degrees in Rome.")
RIGHT, WRONG = ('{"city": "Rome", "degrees": 21}', '{"city": "Rome", "degrees": 210}')


def given_back(unknown_error: str, after_no_json: str) -> list[Turn]:
    return [unknown(unknown_error), no_json(after_no_json), CALL, ANSWER]


def corrected(form: str) -> list[list[Turn]]:
    """Returns a conversation in which an object is asked for again, and one in which it is right."""
    wrong = Turn(form.format(WRONG), (WRONG, "Value error, nowhere is it that warm"))
    right = Turn(form.format(RIGHT))
    return [[wrong, right], [right]]


# row of docs/clients.md -> script, environment, its conversations
AGENTS: dict[str, tuple[str, str, list[list[Turn]]]] = {
    "anthropic (Python), `tool_runner`": (
        "anthropic_tool_runner",
        "anthropic",
        [given_back("Error: Tool 'clock' not found", "tool: ValueError('Invalid arguments")] * 2,
    ),
    "openai-agents": (
        "openai_agents",
        "agents",
        [given_back("Tool 'clock' not found.", "tool: An error occurred while running the tool.")] * 4,
    ),
    "pydantic-ai": (
        "pydantic_ai_agents",
        "agents",
        [given_back("Unknown tool name: 'clock'.", "tool: 1 validation error:")] * 4,
    ),
    "langgraph": (
        "langgraph_agents",
        "agents",
        [given_back("Error: clock is not a valid tool", QUESTION)] * 2,
    ),
    "instructor": (
        "instructor_modes",
        "agents",
        corrected("{}") * 5 + corrected("```json\n{}\n```"),
    ),
}
# The first one always runs: it is the quickest.
CASES = [
    pytest.param(name, id=AGENTS[name][0], marks=SOMETIMES if number else ())
    for number, name in enumerate(AGENTS)
]


@pytest.mark.parametrize("name", CASES)
def test_an_agent(name: str, tmp_path: Path) -> None:
    script, environment, conversations = AGENTS[name]
    command = (python_of(environment), SCRIPTS / f"{script}.py")
    turns = [turn for conversation in conversations for turn in conversation]

    async def scenario() -> None:
        router = Conversation(*(turn.said for turn in turns))
        async with router.served() as url:
            await run_beside(*command, cwd=tmp_path, env=variables_of(url, tmp_path))
        prompts = router.prompts
        assert len(prompts) == len(turns)
        for conversation in conversations:
            kept = [QUESTION]
            for turn in conversation:
                prompt = prompts.pop(0)
                assert not [text for text in kept if text not in prompt], prompt
                kept += turn.kept

    play(scenario)


@SOMETIMES
def test_an_agent_whose_conversation_is_kept_here(tmp_path: Path) -> None:
    command = (python_of("agents"), SCRIPTS / "openai_agents_session.py")

    async def scenario() -> None:
        router = Conversation(*[CALL.said, ANSWER.said] * 4)
        async with router.served_with_store() as url:
            await run_beside(*command, cwd=tmp_path, env=variables_of(url, tmp_path))
        prompts = router.prompts
        for first, called, again, last in (prompts[:4], prompts[4:]):
            (of_call,) = CALL.kept
            assert QUESTION in first and QUESTION in called and of_call in called
            for later in (again, last):
                assert QUESTION in later and of_call in later and f"{ANSWER.said}user: And in Milan?" in later
            assert last.count(of_call) == 2

    play(scenario)


def test_each_is_listed() -> None:
    page = (ROOT / "docs/clients.md").read_text()
    assert not [name for name in AGENTS if f"\n| {name} | " not in page]
