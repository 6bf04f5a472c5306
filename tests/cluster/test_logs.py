"""What the processes of an island log of a call: a file each, one object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.process.logs import LogConfig
from tests.cluster.conftest import FAMILY, Directory
from tests.cluster.house import opened
from tests.cluster.processes import DECODES, GATEWAY, POOL, PREFILLS, Processes, Setup
from tests.playing import play

CALL = {"X-Request-Id": "call-1"}
# no number that is also a key, a port, a time
PROMPT = [151, 153, 157, 163, 167, 173]
NAMES = {"router", POOL, PREFILLS[0], DECODES[0], GATEWAY}

Lines = dict[str, list[dict[str, Any]]]


def lines_of_a_call(tiny_model: Directory, directory: Path, level: str) -> Lines:
    """By process."""
    log = LogConfig("json", level, str(directory / "logs"))
    processes = Processes(Setup(tiny_model(FAMILY), has_gateway=True, log=log), directory)

    async def scenario() -> None:
        async with opened(processes, PREFILLS[0], DECODES[0]) as house:
            body = {
                "prompt": PROMPT,
                "max_tokens": 8,
                "ignore_eos": True,
                "user": "somebody",
                "session": "somebody's",
            }
            answer = await house.http.post("/v1/completions", json=body, headers=CALL)
            assert answer.status_code == 200, answer.text
            await house.until_empty()

    try:
        play(scenario)
        processes.end()
    finally:
        processes.clean_up()
    found = {path.stem: path.read_text().splitlines() for path in (directory / "logs").iterdir()}
    return {name: [json.loads(line) for line in lines] for name, lines in found.items()}


def check_nothing_is_told(lines: Lines) -> None:
    text = json.dumps(lines)
    for said in ("somebody", "tiny", FAMILY, str(PROMPT)[1:-1]):
        assert said not in text


@pytest.mark.slow
def test_each_process_names_the_call_at_debug_level(tiny_model: Directory, tmp_path: Path) -> None:
    lines = lines_of_a_call(tiny_model, tmp_path, "debug")
    assert lines.keys() == NAMES
    keys = set()
    for name in NAMES:
        named = [line for line in lines[name] if line["request_id"] == "call-1" and "key" in line]
        assert named, f"{name} says nothing of the call"
        assert {line["level"] for line in named} == {"debug"}
        keys |= {line["key"] for line in named}
    # what has no id has the key that others name beside it
    (key,) = keys
    assert "Release from the router" in [line["message"] for line in lines[POOL] if line.get("key") == key]
    check_nothing_is_told(lines)


@pytest.mark.slow
def test_only_the_gateway_says_a_line_at_the_default_level(tiny_model: Directory, tmp_path: Path) -> None:
    lines = lines_of_a_call(tiny_model, tmp_path, LogConfig().level)
    assert lines.keys() == NAMES
    check_nothing_is_told(lines)
    # A line about something else may stand beside it.
    said = [line["message"] for line in lines.pop(GATEWAY) if line["request_id"] == "call-1"]
    assert said == ["answered"], said
    assert not any(line["request_id"] or "key" in line for each in lines.values() for line in each)
