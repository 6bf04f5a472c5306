"""Traces with an object a line, and prompts that begin alike because their hash ids do."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from alignedserve.sim.jsonl_trace import read_trace
from alignedserve.sim.model import TOKENS_PER_ID, VOCABULARY, prompt_of
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths
from tests.sim.islands import COST

# As they come: whole milliseconds, and an id also for the last tokens, which are fewer.
MOONCAKE = [
    {"timestamp": 27482, "input_length": 1053, "output_length": 52, "hash_ids": [0, 773, 774]},
    {"timestamp": 30482, "input_length": 898, "output_length": 26, "hash_ids": [0, 1099]},
    {"timestamp": 28982, "input_length": 700, "output_length": 1, "hash_ids": [5, 6]},
]
WANTED = (
    "must hold 'TIMESTAMP', 'ContextTokens', 'GeneratedTokens' (CSV, as Azure's), "
    "'arrival_s', 'prompt_len', 'output_len' (.jsonl), "
    "or 'timestamp', 'input_length', 'output_length' (.jsonl, as Mooncake's)"
)


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_mooncakes_traces_are_read_as_they_are(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, *MOONCAKE)) == [
        Arrival(0.0, Lengths(1053, 52), hash_ids=(0, 773, 774)),
        Arrival(1.5, Lengths(700, 1), hash_ids=(5, 6)),
        Arrival(3.0, Lengths(898, 26), hash_ids=(0, 1099)),
    ]


def test_a_trace_of_our_own_has_classes(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 7.5, "prompt_len": 300, "output_len": 40},
        {"arrival_s": 7, "prompt_len": 30, "output_len": 4, "tier": "be", "window_s": 60},
    ]
    assert read_trace(written(tmp_path, *lines)) == [
        Arrival(0.0, Lengths(30, 4), "be", 60.0),
        Arrival(0.5, Lengths(300, 40)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"timestamp": 5, "input_length": 10}, f"line 2: has 'timestamp', 'input_length': {WANTED}"),
        ({"arrival_s": 5, "output_length": 10}, f"line 2: has 'arrival_s', 'output_length': {WANTED}"),
        ({}, f"line 2: has no fields: {WANTED}"),
        (MOONCAKE[0] | {"input_length": 0}, "line 2: Expected `int` >= 1 - at `$.input_length`"),
        (MOONCAKE[0] | {"hash_ids": [1, -1]}, "line 2: Expected `int` >= 0 - at `$.hash_ids[1]`"),
        (MOONCAKE[0] | {"type": "text"}, "line 2: Object contains unknown field `type`"),
        ([1], "line 2: Expected `object`, got `array`"),
    ],
)
def test_a_line_that_is_not_as_it_must_be_is_told(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_trace(written(tmp_path, MOONCAKE[0], line))
    assert message in str(refused.value)


def test_a_trace_of_no_format_is_told_by_its_fields_and_those_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        read_trace(written(tmp_path, {"question": "why?", "answer": "so"}))
    assert str(refused.value).endswith(f"trace.jsonl, line 1: has 'question', 'answer': {WANTED}")
    table = tmp_path / "trace.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n")
    with pytest.raises(ValueError) as refused:
        read_trace(table)
    assert str(refused.value).endswith(f"has columns 'num_prefill_tokens', 'num_decode_tokens': {WANTED}")


# ---- prompts --------------------------------------------------------------------------------------------------------


def num_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_share_the_pieces_of_their_first_ids_and_no_more() -> None:
    prompt = prompt_of(1, 1300, (0, 773, 774))
    assert len(prompt) == 1300 and all(0 <= token < VOCABULARY for token in prompt)
    assert prompt_of(2, 1300, (0, 773, 774)) == prompt
    assert num_common(prompt, prompt_of(3, 1100, (0, 773, 774))) == 1100
    for other, num_ids in (((0, 773, 775), 2), ((0, 774, 773), 1), ((773, 0, 774), 0)):
        found = num_common(prompt, prompt_of(4, 1300, other))
        # A piece begins with its kind, and then its number.
        assert num_ids * TOKENS_PER_ID < found + 1 <= num_ids * TOKENS_PER_ID + 2


def test_what_no_id_names_is_a_requests_own() -> None:
    assert num_common(prompt_of(1, 600, ()), prompt_of(2, 600, ())) <= 1
    assert num_common(prompt_of(1, 1000, (7,)), prompt_of(2, 1000, (7,))) <= TOKENS_PER_ID + 1
    # A number and a request's key are told apart, and so are numbers larger than the vocabulary.
    assert prompt_of(7, 512, ()) != prompt_of(1, 512, (7,))
    assert (
        prompt_of(1, 512, (7,))
        != prompt_of(1, 512, (7 + VOCABULARY,))
        != prompt_of(1, 512, (7 * VOCABULARY,))
    )


# ---- simulated ------------------------------------------------------------------------------------------------------

SHARED = [
    Arrival(0.0, Lengths(1300, 5), hash_ids=(1, 2, 3)),
    # It begins as the first does, and ends otherwise.
    Arrival(10.0, Lengths(1300, 5), hash_ids=(1, 2, 4)),
    Arrival(20.0, Lengths(1300, 5), hash_ids=(1, 2, 3)),
    Arrival(30.0, Lengths(1300, 5), hash_ids=(9, 2, 3)),
    Arrival(40.0, Lengths(1300, 5)),
]
# By whole blocks of 16, and never the last token.
REUSED = [0, 1024, 1296, 0, 0]


@pytest.mark.parametrize("num_colocated", [0, 1])
def test_a_prefix_is_computed_once(num_colocated: int) -> None:
    scenario = Scenario(COST, num_colocated=num_colocated, enable_prefix_caching=True)
    ran = scenario.simulate(SHARED)
    streams = sorted(ran.streams, key=lambda stream: stream.request.key)
    assert [stream.num_reused for stream in streams] == REUSED
    assert [ran.computed[stream.request.key] for stream in streams] == [1304 - reused for reused in REUSED]
    ttft_s = [stream.times_s[0] - stream.request.arrival_s for stream in streams]
    assert ttft_s[2] < ttft_s[1] < 0.5 * ttft_s[0] and ttft_s[3] == pytest.approx(ttft_s[0])


def test_nothing_is_shared_where_prefixes_are_not_cached() -> None:
    ran = Scenario(COST).simulate(SHARED)
    assert {stream.num_reused for stream in ran.streams} == {0}
    assert {ran.computed[stream.request.key] for stream in ran.streams} == {1304}
