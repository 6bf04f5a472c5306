"""What a saved profile contains, and how damaged or unrelated files are handled."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.instance.profile.grid import Reach
from alignedserve.instance.profile.saved import POOL_FACT, default_path, load, locked, save
from tests.instance.profile.profiles import FACTS, REACH, profile_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some" / "where" / "profile.json"


def test_what_is_saved_is_found(path: Path) -> None:
    assert load(path, FACTS, REACH) is None
    save(path, profile_of(FACTS))
    assert load(path, FACTS, REACH) == profile_of(FACTS)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_profile_of_sharing_that_saves_nothing_is_found(path: Path) -> None:
    measured = profile_of(FACTS)
    # msgspec omits a default only if it is the same object, so this 0 is written.
    measured = replace(measured, cost=replace(measured.cost, shared_saving=float("0")))
    save(path, measured)
    assert load(path, FACTS, REACH) == measured


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff\x00" + data,
        lambda data: data.replace(b'"version": 1', b'"version": 99'),
        lambda data: data.replace(b'"decode_attention_s": ', b'"decode_attention_s": -'),
        lambda data: data.replace(b'"prefill_token_s"', b'"prefill_tokens"'),
    ],
    ids=["cut off", "empty", "not text", "of another version", "negative", "misspelt"],
)
def test_a_damaged_file_is_set_aside(path: Path, spoil: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(spoil)
    save(path, profile_of(FACTS))
    data = path.read_bytes()
    spoilt = spoil(data)
    assert spoilt != data
    for number in (1, 2):
        path.write_bytes(spoilt)
        assert load(path, FACTS, REACH) is None
        aside = path.with_name(f"{path.name}.aside-{number}")
        assert not path.exists() and aside.read_bytes() == spoilt
        assert str(aside) in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_profile_of_something_else_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(path, profile_of(FACTS))
    assert load(path, FACTS | {"dtype": "bfloat16"}, REACH) is None
    assert not path.exists()
    assert "dtype='float32', not 'bfloat16'" in caplog.text


def test_one_that_does_not_reach_far_enough_stays_and_is_not_used(path: Path) -> None:
    small = Reach(max_num_seqs=8, max_chunk=256, max_model_len=1024, num_kv_tokens=50_000)
    save(path, profile_of(FACTS, small))
    assert load(path, FACTS, REACH) is None and path.exists()
    assert load(path, FACTS, small) is not None


def test_one_of_an_earlier_version_is_read_and_said_to_have_free_copies(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it would have to hold now."""
    old = profile_of(FACTS, has_copies=False)
    save(path, old)
    for facts in (FACTS, FACTS | {POOL_FACT: "int8"}):
        caplog.clear()
        assert load(path, facts, REACH) == old
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "copies of KV are taken to be free" in record.message
    caplog.clear()
    save(path, profile_of(FACTS))
    assert load(path, FACTS, REACH) and not caplog.records


def test_copies_are_of_what_the_pool_keeps(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(path, profile_of(FACTS))
    assert load(path, FACTS | {POOL_FACT: "int8"}, REACH) is None
    assert "pool_kv_dtype=None, not 'int8'" in caplog.text


def test_each_set_of_facts_has_a_file_of_its_own() -> None:
    paths = {default_path(FACTS | {"threads": str(number)}) for number in range(4)}
    assert len(paths) == 4
    odd = default_path(FACTS | {"model": "../../etc/pass wd"})
    assert odd.parent == next(iter(paths)).parent
    assert Path(os.environ["XDG_CACHE_HOME"]) in odd.parents


def _take_turns(path: Path, log: Path) -> None:
    for _ in range(50):
        with locked(path), log.open("a") as file:
            for word in ("in", "out"):
                file.write(f"{word} {os.getpid()}\n")
                file.flush()


def test_two_processes_are_never_in_it_together(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_take_turns, args=(path, log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 200
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.split() == ["in", end.split()[1]] and end.startswith("out")
