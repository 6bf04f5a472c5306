"""A file of prompts and answers is read line by line, and unreadable lines are named."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from alignedserve.lengths import corpus
from alignedserve.lengths.corpus import Example, examples

GOOD = json.dumps({"question": "how many?", "output": "two"})


def test_empty_lines_are_none_and_names_are_those_of_common_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(f'{GOOD}\n\n{{"prompt": "é", "answer": ""}}')
    assert [*examples(path)] == [
        Example("how many?", "two", f"{path}, line 1"),
        Example("é", "", f"{path}, line 3"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: Expecting"),
        (b"[1]", "line 2: must be an object with a text prompt"),
        (b'{"prompt": "x"}', "and a text answer"),
        (b'{"prompt": 1, "answer": "y"}', "line 2: must be an object"),
        (b'{"prompt": "\xff", "answer": "y"}', "line 2: .*can't decode"),
        (b"[" * 200_000, "line 2: .*recursion"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + line)
    with pytest.raises(ValueError, match=message):
        list(examples(path))
    # What is not read is no error.
    assert len([*islice(examples(path), 1)]) == 1


def test_a_file_without_line_ends_is_not_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "long.jsonl"
    path.write_text(GOOD + "\n" + " " * 1001)
    with pytest.raises(ValueError, match="line 2: more than 1000 bytes"):
        list(examples(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.jsonl: No such file"):
        list(examples(tmp_path / "none.jsonl"))
