"""The live agents' counts, and a few agents on a server, with and without a kill."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from alignedserve.text.tokenizer import Tokenizer
from benchmarks.agents_live import CALL, TOOL, Answer, Seen, Turn, letters, main, make_agent_model

NUM_AGENTS, NUM_TURNS, NUM_LETTERS = 3, 8, 20
TINY = ["--agents", str(NUM_AGENTS), "--turns", str(NUM_TURNS), "--common", "200", "--new", "60"]
TINY += ["--letters", str(NUM_LETTERS), "--memory-mib", "128"]


def test_only_what_no_full_block_has_must_be_computed_again() -> None:
    # 48 tokens have KV, which are three full blocks, and 49 were said
    turn = Turn(0, 1, num_prompt=80, num_known=49, num_said=49, num_cached=48, num_answer=9, ttft_s=0.1)
    assert (turn.num_again, turn.num_of_block) == (1, 1)
    # 47 have KV, so the third block is not full
    turn = Turn(0, 2, num_prompt=80, num_known=48, num_said=48, num_cached=16, num_answer=9, ttft_s=0.1)
    assert (turn.num_again, turn.num_of_block) == (32, 16)


def test_answers_are_not_prompt_tokens_and_instructions_are_new_once() -> None:
    first = [Turn(agent, 0, 100, 64 * agent, 0, 64 * agent, 9, ttft_s=5.0) for agent in (0, 1)]
    # the second agent's second turn has changed what was said, and found less of it
    second = [Turn(0, 1, 150, 109, 109, 96, 9, 0.1), Turn(1, 1, 150, 100, 109, 80, 9, 0.2)]
    seen = Seen([*first, *second], num_computed=260 + 32, said={1: [7], 0: [5]})
    found = seen.figures()
    assert found["num_new"] == 100 + 36 + 41 + 50
    assert found["num_again_first"] == 0
    assert found["num_computed"] == found["num_not_cached"] == 260
    assert found["not_found"] == [(1, 1, 16)] and found["num_retold"] == 1
    assert (found["again_per_turn"], found["of_block_per_turn"]) == (16.5, 8.5)
    assert (found["ttft_p50_s"], found["ttft_p99_s"]) == (pytest.approx(0.15), 0.2)
    same = Seen([*second, *first], said={0: [5], 1: [7]}).figures()
    other = Seen([*second, *first], said={0: [5], 1: [8]}).figures()
    assert found["digest"] == same["digest"] != other["digest"]


def test_the_next_prompt_has_the_tokens_of_a_call(tmp_path: Path) -> None:
    make_agent_model(tmp_path / "model")
    tokenizer = Tokenizer.from_directory(tmp_path / "model")
    query = letters(random.Random(0), NUM_LETTERS)
    said = f'<tool_call>{{"name":"search","arguments":{{"query": "{query}"}}}}</tool_call>'
    assert re.fullmatch(CALL.format(NUM_LETTERS), said)
    call: Any = Answer(call_id="1", name="search", arguments=f'{{"query": "{query}"}}').message()
    # as the gateway gives them to templates
    call["tool_calls"][0]["function"]["arguments"] = {"query": query}
    chat: Any = [{"role": "system", "content": "Search."}, {"role": "user", "content": "What?"}]
    before = tokenizer.apply_chat_template(chat, tools=[TOOL])
    assert '"name": "search"' in before
    after = tokenizer.apply_chat_template([*chat, call, {"role": "tool", "content": "This."}], tools=[TOOL])
    assert after == f"{before}{said}<|end|><|user|>This.<|end|><|assistant|>"


def run(out: Path, *options: str) -> dict[str, Any]:
    main([*TINY, "--out", str(out), *options])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("instances", ["1+1", "2+2", "2"])
def test_agents_compute_what_is_new_and_get_the_same_tokens_beside_a_kill(
    instances: str, tmp_path: Path
) -> None:
    plain = run(tmp_path / "plain.json", "--instances", instances)
    killed = run(tmp_path / "killed.json", "--instances", instances, "--kill", "1", "--max-kills", "1")
    assert (len(plain["killed"]), len(killed["killed"])) == (0, 1)
    for found in (plain, killed):
        assert (found["num_turns"], found["failures"]) == (NUM_AGENTS * NUM_TURNS, [])
        # every prompt repeats all that was said
        assert found["num_retold"] == 0
    assert plain["digest"] == killed["digest"] and plain["num_new"] == killed["num_new"]
    assert plain["num_computed"] == plain["num_not_cached"]
    # Without a cache the ratio is about 12. A turn that is very early does not find the last answer.
    assert plain["ratio"] < 6 and len(plain["not_found"]) < NUM_AGENTS * (NUM_TURNS - 1)
