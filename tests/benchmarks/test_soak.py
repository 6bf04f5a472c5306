"""What `make soak` does to a server and reports about it, and a whole soak of half a minute."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import main
from benchmarks.soak.faults import GRACE_S, NO_ROUTER_S, Fault, FaultLog
from benchmarks.soak.plan import MAX_KILLS_OF_ROLE, Episode, Strike, episodes
from benchmarks.soak.questions import Answer, make_questions
from benchmarks.soak.report import Row, Spread, growth_objections, rows_of, strikes_of, write
from benchmarks.soak.silences import Silence, Silences
from benchmarks.soak.tally import Tally
from benchmarks.soak.transcript import DONE, Transcript
from benchmarks.soak.victims import Memory

ROLES = ("router", "kvpool", "gateway", "store", "prefill", "decode")
ANSWER = Answer("1, 2, 3", 5, "stop")


# ---- the plan --------------------------------------------------------------------------------------------------------


def some(seed: int, count: int = 200) -> list[Episode]:
    return list(itertools.islice(episodes(seed, ROLES), count))


def test_a_seed_decides_what_is_done() -> None:
    assert some(7) == some(7)
    assert some(7) != some(8)
    assert make_questions(7, 20) == make_questions(7, 20) != make_questions(8, 20)


def test_each_round_kills_and_stops_every_role_and_has_the_other_kinds() -> None:
    num = 3 * len(ROLES)
    planned = some(7, 4 * num)
    for begin in range(0, len(planned), num):
        episodes_of_round = planned[begin : begin + num]
        alone = [each.strikes[0] for each in episodes_of_round if each.kind == "alone"]
        assert Counter((strike.role, strike.stop_s is None) for strike in alone) == {
            (role, is_kill): 1 for role in ROLES for is_kill in (True, False)
        }
        kinds = Counter(each.kind for each in episodes_of_round)
        assert kinds["together"] == kinds["again"] == len(ROLES) // 2


def test_no_process_is_killed_so_often_that_the_launcher_gives_up() -> None:
    for each in some(3, 500):
        assert max(Counter(strike.role for strike in each.strikes).values()) <= MAX_KILLS_OF_ROLE
        assert each.strikes[0].delay_s == 0.0
        if each.kind == "together":
            assert len(each.roles) == 2 and not any(strike.delay_s for strike in each.strikes)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def chunk(text: str | None = None, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def usage(num_tokens: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}}).encode()


RIGHT = [chunk("1, "), chunk("2, 3", "stop"), usage(5), DONE]


def heard(*events: bytes) -> Transcript:
    transcript = Transcript(ANSWER)
    for event in events:
        transcript.take(event)
    return transcript


def test_the_right_answer_is_right_however_it_is_cut() -> None:
    for events in (RIGHT, [chunk("1, 2, 3"), chunk(None, "stop"), usage(5), DONE]):
        transcript = heard(*events)
        assert transcript.is_done and not transcript.wrong and not transcript.error


@pytest.mark.parametrize(
    "events",
    [
        # one piece twice, one left out, another one, all of them once more
        [chunk("1, "), chunk("1, ")],
        [chunk("1, "), chunk("3")],
        [chunk("1; ")],
        [chunk("1, 2, 3, 4")],
        # too short, without its end, with another count or reason
        [chunk("1, ", "stop"), usage(5), DONE],
        [chunk("1, 2, 3"), usage(5), DONE],
        [chunk("1, 2, 3", "stop"), usage(4), DONE],
        [chunk("1, 2, 3", "length"), usage(5), DONE],
        # an end twice
        [chunk("1, 2, 3", "stop"), chunk(None, "stop")],
        [*RIGHT, DONE],
    ],
)
def test_what_is_not_exactly_the_answer_is_wrong(events: list[bytes]) -> None:
    assert heard(*events).wrong


def test_an_error_is_no_wrong_answer_but_tokens_before_it_may_be() -> None:
    error = json.dumps({"error": {"message": "generation failed: no router"}}).encode()
    transcript = heard(chunk("1, "), error, DONE)
    assert transcript.error == "generation failed: no router" and not transcript.wrong
    assert heard(chunk("2, "), error, DONE).wrong


# ---- excuses ---------------------------------------------------------------------------------------------------------


def episode(*strikes: Strike) -> Episode:
    return Episode("alone" if len(strikes) == 1 else "together", 1.0, strikes)


def log_of(role: str, at_s: float, whole_s: float | None, grace_s: float = GRACE_S) -> FaultLog:
    log = FaultLog(grace_s)
    log.add(episode(Strike(0.0, role, 0)), at_s).whole_s = whole_s
    return log


def test_only_the_gateways_fault_breaks_connections() -> None:
    assert log_of("gateway", 10, 15).excuses_lost(5, 11)
    assert log_of("gateway", 10, None).excuses_lost(12, 13)
    assert not log_of("gateway", 10, 15).excuses_lost(5, 9)
    assert not log_of("gateway", 10, 15).excuses_lost(15.1 + GRACE_S, 30)
    assert log_of("gateway", 10, 15, grace_s=20).excuses_lost(34.9, 36)
    assert not log_of("gateway", 10, 15, grace_s=20).excuses_lost(35.1, 36)
    assert not log_of("router", 10, 15).excuses_lost(5, 11)


@pytest.mark.parametrize(
    ("role", "status", "uses_store", "is_excused"),
    [
        ("router", 503, False, True),
        ("store", 503, True, True),
        ("store", 503, False, False),
        ("decode", 503, True, False),
        ("gateway", 408, False, True),
        ("store", 500, True, False),
        ("gateway", 500, False, False),
        ("router", 400, False, False),
    ],
)
def test_errors_have_the_reasons_that_are_documented(
    role: str, status: int, uses_store: bool, is_excused: bool
) -> None:
    assert log_of(role, 10, 15).excuses_status(status, 9, 12, uses_store) == is_excused


def test_a_request_may_fail_after_a_minute_without_a_router() -> None:
    assert log_of("router", 10, None).excuses_status(500, 9, 10 + NO_ROUTER_S)
    assert not log_of("router", 10, None).excuses_status(500, 9, 9 + NO_ROUTER_S)
    assert not log_of("router", 10, 15).excuses_status(500, 9, 10 + NO_ROUTER_S)


# ---- silences and tables ---------------------------------------------------------------------------------------------


def test_silences_are_of_what_waits_and_begin_with_the_fault() -> None:
    silences = Silences()
    silences.asks("rt 0", 0.0)
    silences.asks("be 0", 0.0)
    silences.hears("rt 0", 9.0)
    silences.begin(10.0)
    # asking again is no token
    silences.asks("rt 0", 11.0)
    silences.hears("be 0", 12.0)
    silences.hears("rt 0", 15.0)
    assert silences.end(16.0) == Silence(anywhere_s=3.0, rt_s=5.0, be_s=4.0)
    silences.begin(20.0)
    silences.ends("be 0")
    # one that reads slowly hears what was said before the fault
    silences.hears("be 1", 22.0)
    assert silences.end(30.0) == Silence(anywhere_s=10.0, rt_s=10.0, be_s=0.0)


def fault(took_s: float | None, silence_s: float, *strikes: Strike) -> Fault:
    silence = Silence(silence_s, silence_s + 1, silence_s + 2)
    return Fault(episode(*strikes), 5.0, None if took_s is None else 5.0 + took_s, silence, num_lost=2)


KILL, STOP = Strike(0.0, "decode", 0), Strike(0.0, "decode", 1, stop_s=3.0)
FAULTS = [
    fault(4.0, 1.0, KILL, Strike(0.0, "store", 0)),
    fault(2.0, 1.0, KILL),
    fault(8.0, 2.0, KILL),
    fault(3.0, 0.5, KILL),
    fault(3.5, 0.0, STOP),
    fault(None, 60.0, STOP),
]


def test_rows_are_medians_and_the_longest_of_each_kind_of_fault() -> None:
    killed, stopped, together = rows_of(FAULTS)
    assert killed == Row(
        "decode killed", 3, Spread(3.0, 8.0), Spread(1.0, 2.0), Spread(2.0, 3.0), Spread(3.0, 4.0), 6
    )
    # that after which the system was not whole is not among them
    assert (stopped.name, stopped.num) == ("decode stopped", 1)
    assert (together.name, together.num) == ("two at once", 1)
    assert strikes_of(FAULTS) == {"decode": {"killed": 4, "stopped": 2}, "store": {"killed": 1}}


def test_memory_that_grows_without_bound_is_wrong_wherever_it_is() -> None:
    mib = 1 << 20
    before = [Memory("launcher", 1, 100 * mib), Memory("decode", 2, 500 * mib)]
    assert growth_objections(before, before) == []
    # a process that is still there, and the largest of a role that was started again
    assert len(growth_objections(before, [Memory("launcher", 1, 300 * mib)])) == 2
    grown = [replace(before[0], num_bytes=200 * mib), Memory("decode", 3, 900 * mib)]
    assert growth_objections(before, grown) == ["memory of decode has grown from 500 to 900 MiB"]


def test_the_page_says_what_was_wrong(tmp_path: Path) -> None:
    facts = {"command": "soak", "date": "today", "commit": "abc", "processor": "a chip"}
    memory = [Memory("decode", 2, 500 << 20)]
    page = write(tmp_path, facts, FAULTS, Tally(num_streams=12, num_lost=3), (memory, memory), ["it ended"])
    assert (tmp_path / "soak.md").read_text() == page
    assert (
        "a chip" in page and "| streams | 12 |" in page and "**Wrong: 1.**" in page and "- it ended" in page
    )
    assert "| decode killed | 3 | 3.0 / 8.0 | 1.0 / 2.0 | 2.0 / 3.0 | 3.0 / 4.0 | 6 |" in page
    assert "| decode | 4 | 2 |" in page and "| decode | 500 | 500 |" in page
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["wrong"] == ["it ended"] and found["tally"]["num_streams"] == 12
    assert len(found["faults"]) == len(FAULTS)


# ---- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.drawn(one_in=12)
@pytest.mark.parametrize("options", [[], ["--colocated", "2"]], ids=["apart", "colocated"])
def test_half_a_minute_of_it_finds_nothing_wrong(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options = ["--grace", "4", "--chats", "3", "--out", str(tmp_path), *options]
        main(["--minutes", "0.5", "--seed", "1", *options])
    found = json.loads((tmp_path / "soak.json").read_text())
    assert (ended.value.code, found["wrong"]) == (0, [])
    assert found["tally"]["num_streams"] and found["tally"]["num_lines"] and found["rows"]
