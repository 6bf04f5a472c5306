"""The comparison of servers on real files: a whole run against stubs, the page, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve import demo
from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.workload import Item
from alignedserve.models.locate import locate_model
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.real_models import __main__ as command
from benchmarks.real_models import quiet
from benchmarks.real_models.figures import PROMPTS, STREAMS, Prompts, check
from benchmarks.real_models.page import KINDS, lost, of_file, ratios
from benchmarks.real_models.quiet import Ticks
from benchmarks.real_models.servers import (
    COLOCATED,
    LLAMA,
    OURS,
    Server,
    buffers,
    memory_of,
    servers_of,
)

DEMO = locate_model(demo.MODEL_DIR)
STUB = [sys.executable, "-m", "tests.benchmarks.completions"]
ABOUT = {
    "command": "python -m benchmarks.real_models",
    "date": "today",
    "commit": "a" * 40,
    "processor": "a chip",
}


def row(server: str, number: int = 0, **figures: float) -> dict[str, Any]:
    return {"file": "a.gguf", "server": server, "round": number, "figures": figures}


def test_a_run_has_all_figures_of_each_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "demo.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(command, "locate_model", lambda _: DEMO)
    servers = [Server(OURS, STUB, weight_bytes=7), Server(LLAMA, STUB, ("load", "streams"))]
    monkeypatch.setattr(command, "servers_of", lambda *_: servers)
    monkeypatch.setattr(command, "SETTLE_S", 0.0)
    monkeypatch.setattr(quiet, "LOOK_S", 0.05)
    monkeypatch.setattr(quiet, "NUM_TRIES", 1)
    monkeypatch.setattr(command, "_versions", lambda _: {"llama-server": "llama.cpp 1"})
    base = tmp_path / "found"
    words = ["--gguf", str(file), "--llama-server", "llama-server", "--rounds", "1", "--chats-s", "1"]
    words += ["--patience-s", "0"]
    command.main([*words, "--out", str(base)])
    rows = json.loads(base.with_suffix(".json").read_text())["rows"]
    assert [each["server"] for each in rows] == [OURS, LLAMA]
    # The context of the demo model is shorter than the longest prompt.
    fits = set(KINDS) - {f"{name}_{max(PROMPTS)}" for name in ("ttft_s", "prompt_rate")}
    assert rows[0]["figures"].keys() == fits and rows[0]["figures"]["weight_bytes"] == 7
    assert all(value > 0 for each in rows for value in each["figures"].values())
    theirs = rows[1]["figures"]
    assert theirs["weight_bytes"] == 12.5 * 2**20 and theirs["num_processes"] == 1
    assert {f"rate_{count}" for count in STREAMS} < theirs.keys() and "job_rate" not in theirs
    text = base.with_suffix(".md").read_text()
    assert text.index("## Lost") < text.index("## demo.gguf") and "llama.cpp 1" in text


def test_ratios_are_of_rounds_and_above_one_for_the_better() -> None:
    rows = [row(OURS, 0, load_s=2.0, rate_1=30.0), row(OURS, 1, load_s=1.0)]
    rows += [
        row(LLAMA, 0, load_s=1.0, rate_1=20.0),
        row(LLAMA, 1, load_s=4.0),
        row(LLAMA, 2, load_s=9.0),
    ]
    assert ratios(rows, "a.gguf", OURS, LLAMA, "load_s") == [0.5, 4.0]
    assert ratios(rows, "a.gguf", OURS, LLAMA, "rate_1") == [1.5]
    assert ratios(rows, "b.gguf", OURS, LLAMA, "load_s") == []


def test_the_furthest_behind_comes_first() -> None:
    rows = [
        row(OURS, load_s=2.0, pss_bytes=4e6, rate_1=30.0),
        row(COLOCATED, load_s=0.5, pss_bytes=2e6),
    ]
    rows += [row(LLAMA, load_s=1.0, pss_bytes=1e6, rate_1=20.0)]
    found = lost(rows, ["a.gguf"]).splitlines()[2:]
    assert ["memory" in found[0], "later starts" in found[1]] == [True, True] and len(found) == 2
    assert "| 0.50 | 2.00 |" in found[1]
    assert lost([row(OURS, load_s=1.0), row(LLAMA, load_s=2.0)], ["a.gguf"]) == "Nothing."


def test_a_table_has_what_was_measured() -> None:
    rows = [row(OURS, number, load_s=value) for number, value in enumerate((1.0, 2.0, 4.0))]
    rows += [row(LLAMA, number, load_s=1.0) for number in range(3)]
    lines = of_file(rows, "a.gguf").splitlines()
    assert lines[0] == "|  | `serve` | llama-server | `serve` to llama-server |"
    assert lines[2:] == ["| first token of later starts, s | 2.0 | 1.0 | 0.50 (0.25 to 1.00) |"]


def test_prompts_have_their_length_and_no_common_prefix() -> None:
    tokenizer = Tokenizer.from_directory(demo.MODEL_DIR)
    prompts = Prompts(tokenizer, 1)
    found = [item.prompt for length in (30, 500) for item in prompts.items(20, length, 8)]
    assert {len(each) for each in found} == {30, 500}
    assert len({tuple(each[:16]) for each in found}) == len(found)
    assert Prompts(tokenizer, 1).item(30, 8).prompt == found[0] != Prompts(tokenizer, 2).item(30, 8).prompt


@pytest.mark.parametrize(
    "changes", [{"error": "refused"}, {"times_s": []}, {"prompt_len": 9}, {"output_len": 3}], ids=str
)
def test_an_answer_that_is_not_whole_is_refused(changes: dict[str, Any]) -> None:
    whole: dict[str, Any] = {"times_s": [1.0], "prompt_len": 8, "output_len": 4, "error": None}
    item = Item(0.0, "rt", list(range(8)), 4, 8)
    check(item, RequestOutcome("rt", 0.0, **whole))
    with pytest.raises(RuntimeError, match="were asked for"):
        check(item, RequestOutcome("rt", 0.0, **whole | changes))


def test_memory_includes_children() -> None:
    code = "import subprocess, sys; child = subprocess.Popen(['cat'], stdin=-1); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        assert process.stdout and process.stdout.readline()
        found = memory_of(process.pid)
        process.kill()
    assert found["cat"][0] == 1 and sum(count for count, _ in found.values()) == 2
    assert all(num_bytes > 0 for _, num_bytes in found.values())
    assert memory_of(os.getpid()).keys() != found.keys()


def test_what_others_use_is_neither_idle_nor_ours() -> None:
    before, after = Ticks(1000, 300, 100), Ticks(1400, 500, 200)
    assert after.others_since(before) == 0.25
    found = Ticks.now(os.getpid())
    assert 0 < found.own < found.busy < found.total and Ticks.now().own == 0


def test_what_others_disturb_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the share of others in each measurement."""

    async def tried(*shares: float) -> tuple[float, float]:
        left, found = iter(shares), quiet.Quiet(0.0)
        monkeypatch.setattr(found, "wait", lambda: None)
        monkeypatch.setattr(Ticks, "others_since", lambda *_: seen[-1])
        seen: list[float] = []

        async def measure() -> float:
            seen.append(next(left))
            return seen[-1]

        return await found.measured(measure), found.others

    assert asyncio.run(tried(0.4, 0.2, 0.3)) == (0.2, 0.2)
    assert asyncio.run(tried(0.4, 0.1)) == (0.1, 0.1)
    assert asyncio.run(tried(0.0)) == (0.0, 0.0)


def test_weights_of_llama_cpp_are_those_it_logs() -> None:
    log = "load: CPU_Mapped model buffer size =    90.00 MiB\nload:  CPU_REPACK model buffer size =    10.50 MiB\n"
    assert buffers(log) == 100.5 * 2**20 and buffers("nothing") is None


def test_vllm_needs_a_python() -> None:
    given = Path("a.gguf"), DEMO, Path("cache"), Path("llama-server")
    names = [
        [server.name for server in servers_of(*given, python, Path("weights"))] for python in (None, "python")
    ]
    assert names[0] == [OURS, COLOCATED, LLAMA, LLAMA] and len(names[1]) == 5


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--gguf", "a.gguf", "--llama-server", "llama-server", "--parts", "load,all"])
    assert "all: must be of load, prompts, streams, chats" in capsys.readouterr().err
