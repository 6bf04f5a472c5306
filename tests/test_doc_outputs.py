"""What the pages show as the output of a command is what it prints.

Output that is the same in each run is compared literally. Output with measured times is compared in form, without its
numbers. Sessions at a running server are compared in tests/cli/test_chat.py, which has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.compare import PERCENTILES, ComparedServer, MeasuredServer, remarks, table, verdict
from alignedserve.bench.compare_config import CompareConfig
from alignedserve.bench.results import evaluate
from alignedserve.cli.main import cli
from alignedserve.cli.top_reading import Reading, ReadingHistory, Tier
from alignedserve.cli.top_view import screen
from tests.doc_sessions import ROOT, SAME_EACH_TIME, Session, form, sessions
from tests.test_doc_commands import PAGES, blocks

SESSIONS = [session for page in PAGES for session in sessions(page) if session.output.strip()]
LITERAL = [each for each in SESSIONS if each.words[1] in SAME_EACH_TIME]
AT_A_SERVER = [each for each in SESSIONS if each.page == "docs/quickstart.md" and each not in LITERAL]


@pytest.mark.slow
@pytest.mark.parametrize("session", LITERAL, ids=lambda session: " ".join(session.words[:2]))
def test_output_that_never_changes_is_as_it_is_shown(session: Session) -> None:
    done = CliRunner().invoke(cli, session.words[1:])
    assert done.exit_code == 0
    assert done.stdout == session.output, f"python -m tests.doc_sessions {session.page} writes it anew"


@pytest.mark.slow
def test_the_readmes_model_without_a_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [text for text in blocks(ROOT / "README.md", "python") if "LLM(" in text]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "7, 8, 9, 10, 11, 12\n"


def printed_by_compare() -> str:
    answered = RequestOutcome("rt", 0.0, 0.0, [0.1, 0.2], "", 1, 2, None)
    alone, beside = (evaluate(30 * [answered], 10.0, {"ttft": 1000.0}, PERCENTILES) for _ in range(2))
    found = [
        MeasuredServer(
            ComparedServer(label, "http://host", None), "demo", alone, beside, 9.75, has_batch_api, None
        )
        for label, has_batch_api in (("AlignedServe", True), ("plain", False))
    ]
    return "\n".join([*table(found), "", *remarks(found, CompareConfig()), verdict(found)])


def printed_by_top() -> str:
    def process(name: str, blocks: int) -> dict[str, Any]:
        used = {"used": blocks, "free": 99 * blocks}
        return {"instance_id": name, "island": 0, "pid": 7, "state": "up", "requests": {}, "blocks": used}

    def job(status: str, due_s: float | None) -> dict[str, Any]:
        ours = {"progress": 0.2, "estimated_completion_at": due_s}
        counts = {"total": 4000, "completed": 782, "failed": 0}
        expires_s = time.time() + 86_390
        return {
            **{"id": "batch_c8b62aa7", "status": status, "expires_at": expires_s},
            **{"request_counts": counts, "alignedserve": ours},
        }

    names = {"router": 0, "kvpool-0": 1, "prefill-0": 1, "decode-0": 1, "gateway-0": 0}
    processes = [process(name, blocks) for name, blocks in names.items()]
    jobs = [job("in_progress", time.time() + 90), job("completed", None)]
    history = ReadingHistory()
    for at_s in (0.0, 1.0):
        tier = Tier(1000 * at_s, 1, 0, [(0.1, 10 * at_s), (float("inf"), 10 * at_s)])
        history.add(Reading(at_s, "ok", {"rt": tier, "be": tier}, processes, jobs))
    console = Console(width=80, height=24, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(history, "http://127.0.0.1:8000", None, 24))
    return console.export_text()


IN_FORM: dict[str, Callable[[], str]] = {"bench": printed_by_compare, "top": printed_by_top}


@pytest.mark.parametrize("name", IN_FORM)
def test_output_with_times_has_the_form_that_is_shown(name: str) -> None:
    (session,) = [each for each in SESSIONS if each.words[1] == name]
    assert form(session.output) == form(IN_FORM[name]())


def test_every_output_is_compared() -> None:
    others = [each for each in SESSIONS if each not in LITERAL and each not in AT_A_SERVER]
    assert sorted(each.words[1] for each in others) == sorted(IN_FORM)
    assert len(LITERAL) >= 1
