"""A process that has collected the tests in a copy of the repository and forks to run some of them.

    python -m benchmarks.mutants.server COPY MODULES PATH...

It reads one JSON request per line from standard input and writes one answer per line to standard output. Importing and
collecting everything takes ten seconds and is done once. A fork, which swaps a mutant's code into functions that are
already imported (swap.py), takes a tenth of a second.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from benchmarks.mutants.family import adopt_orphans, kill_descendants, load_of, reap
from benchmarks.mutants.swap import Functions, Probes

Request = dict[str, Any]
Answer = dict[str, Any]

# A test hangs if it has used this many times its usual CPU time plus these seconds,
_TIMES, _MORE_CPU_S = 10.0, 15.0
# or has waited for this long while none of its processes was busy.
_IDLE_TIMES, _IDLE_S = 3.0, 25.0
# Seconds between two checks of a test's processes, and before the first.
_LOOK_S = 1.0
# The most CPU seconds that one vopr seed may take.
_SEED_CPU_S = 120.0


class Server:
    """A pytest plugin that answers requests instead of running the collected tests."""

    def __init__(self, root: Path, modules: list[str], requests: TextIO, answers: TextIO) -> None:
        self._root, self._modules = root, modules
        self._requests, self._answers = requests, answers
        self._items: dict[str, pytest.Item] = {}
        self._reports: list[pytest.TestReport] = []
        self._probes: Probes | None = None
        # Statements executed by setups, because later tests may use the same fixture.
        self._setup_hits: set[int] = set()
        self._functions: Functions

    def pytest_configure(self, config: pytest.Config) -> None:
        """Property tests draw the same examples each time, and failing examples are not minimised."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutants", settings.default, derandomize=True, database=None, phases=phases, print_blob=False
        )
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.user_properties.append(("runs_twice", item.get_closest_marker("flaky") is not None))
            item.own_markers = [each for each in item.own_markers if each.name != "flaky"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        if self._probes and report.when == "setup":
            self._setup_hits.update(self._probes.take())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        if not session.testsfailed:
            for module in self._modules:
                importlib.import_module(module)
        self._functions = Functions(self._root)
        gc.collect()
        gc.freeze()
        items = [[name, _runs_twice(item)] for name, item in self._items.items()]
        self._answer({"items": items, "num_broken": session.testsfailed})
        for line in self._requests:
            self._answer(self._run(json.loads(line)))
        return True

    def _answer(self, answer: Answer) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def _run(self, request: Request) -> Answer:
        reading, writing = os.pipe()
        folder = tempfile.mkdtemp(prefix="mutant-")
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _in_child(lambda told: self._in_fork(request, Path(folder), told), writing, Path(folder))
        os.close(writing)
        try:
            return _Watch(request, pid, reading, self._requests).answer()
        finally:
            kill_descendants()
            os.close(reading)
            shutil.rmtree(folder, ignore_errors=True)
            for segment in Path("/dev/shm").glob(f"alignedserve-test-{pid}-*"):
                segment.unlink()

    # ---- in the fork -------------------------------------------------------------------------------------------------

    def _in_fork(self, request: Request, folder: Path, tell: Callable[[Answer], None]) -> None:
        probes = None
        if request.get("probes"):
            probes = Probes(self._functions, self._root, request["probes"])
            tell({"places": probes.places})
        if request.get("file") and not self._functions.replace(request["file"], request["text"]):
            tell({"outcome": "outside"})
            return
        if "first_seed" in request:
            self._seeds(request, probes, tell)
        else:
            self._tests(request, probes, folder, tell)

    def _tests(
        self, request: Request, probes: Probes | None, folder: Path, tell: Callable[[Answer], None]
    ) -> None:
        items = [self._items[name] for name in request["items"]]
        items[0].config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        spent_s, self._probes = 0.0, probes
        for item, following in zip(items, [*items[1:], None], strict=True):
            tell({"begins": item.nodeid})
            self._reports.clear()
            cpu_s, begun_s = _cpu_s(), time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            failed = [each for each in self._reports if each.failed]
            passed = any(each.passed and each.when == "call" for each in self._reports)
            took_s = _cpu_s() - cpu_s
            tell(
                {
                    "ends": item.nodeid,
                    "outcome": "failed" if failed else "passed" if passed else "skipped",
                    "why": _last_line(failed[0]) if failed else "",
                    "cpu_s": round(took_s, 3),
                    "wall_s": round(time.monotonic() - begun_s, 3),
                    "hits": sorted(self._setup_hits.union(probes.take())) if probes else [],
                }
            )
            spent_s += took_s
            ends = "failed" if failed and not probes else "spent" if spent_s > request["cpu_s"] else ""
            if ends:
                # This lets fixtures shared by several tests remove what they made.
                item.session._setupstate.teardown_exact(None)
                tell({"outcome": ends})
                return
        tell({"outcome": "passed"})

    def _seeds(self, request: Request, probes: Probes | None, tell: Callable[[Answer], None]) -> None:
        run = importlib.import_module("alignedserve.vopr.runs.run")
        seed, systems, begun_s = request["first_seed"], tuple(request.get("systems", ())), _cpu_s()
        while True:
            name, cpu_s = f"vopr --seed {seed}", _cpu_s()
            tell({"begins": name})
            failure = run.run(run.history_of(seed, systems=systems)).failure
            tell(
                {
                    "ends": name,
                    "outcome": "failed" if failure else "passed",
                    "why": str(failure.message)[:200] if failure else "",
                    "cpu_s": round(_cpu_s() - cpu_s, 3),
                    "wall_s": 0.0,
                    "hits": probes.take() if probes else [],
                }
            )
            if failure:
                tell({"outcome": "failed"})
                return
            if _cpu_s() - begun_s >= request["cpu_s"]:
                tell({"outcome": "passed"})
                return
            seed += 1


def _in_child(run: Callable[[Callable[[Answer], None]], None], writing: int, folder: Path) -> None:
    """Never returns."""
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        written = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(nothing, 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.set_inheritable(writing, False)
        run(lambda answer: _write(writing, answer))
    except BaseException:
        _write(writing, {"outcome": "failed", "why": traceback.format_exc()[-400:]})
    finally:
        os._exit(0)


def _write(writing: int, answer: Answer) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(writing, data) :]


class _Watch:
    """Reads what a fork reports, and kills it when a test hangs."""

    def __init__(self, request: Request, pid: int, reading: int, requests: TextIO) -> None:
        self._limits: dict[str, list[float]] = request.get("limits", {})
        self._pid, self._reading, self._requests = pid, reading, requests
        self._running = ""
        self._ended: list[Answer] = []
        self._places: list[Any] = []
        # The time the test has been running since, its processes' CPU time then, and the time they have been idle
        # since.
        self._begun_cpu_s: float | None = None
        self._seen_cpu_s = 0.0
        self._looked_s = self._idle_since_s = time.monotonic()

    def answer(self) -> Answer:
        rest = b""
        while True:
            ready = select.select([self._reading], [], [], _LOOK_S)[0]
            if ready:
                data = os.read(self._reading, 1 << 20)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    over = self._take(json.loads(line))
                    if over:
                        return self._over(over["outcome"], over.get("why", ""))
                if not data:
                    return self._over("failed", "the process of the tests ended")
            elif _is_closed(self._requests):
                sys.exit("standard input was closed")
            if time.monotonic() - self._looked_s >= _LOOK_S:
                reap()
                hang = self._hangs()
                if hang:
                    return self._over("failed", hang)

    def _take(self, told: Answer) -> Answer | None:
        """Returns the answer if this is the fork's last report."""
        if "begins" in told:
            self._running, self._begun_cpu_s, self._seen_cpu_s = told["begins"], None, 0.0
            self._looked_s = self._idle_since_s = time.monotonic()
        elif "ends" in told:
            # Processes that the test did not wait for also count.
            self._ended.append(told | {"cpu_s": max(told["cpu_s"], round(self._seen_cpu_s, 3))})
        elif "places" in told:
            self._places = told["places"]
        else:
            return told
        return None

    def _hangs(self) -> str:
        load, now_s = load_of(self._pid), time.monotonic()
        self._looked_s = now_s
        if self._begun_cpu_s is None:
            self._begun_cpu_s = load.cpu_s
        cpu_s, wall_s = self._limits.get(self._running, (_SEED_CPU_S / _TIMES, 20.0))
        if load.is_busy:
            self._idle_since_s = now_s
        self._seen_cpu_s = load.cpu_s - self._begun_cpu_s
        if self._seen_cpu_s > _TIMES * cpu_s + _MORE_CPU_S:
            return f"hangs: computes for {self._seen_cpu_s:.0f} s, {cpu_s:.1f} without the mutant"
        if now_s - self._idle_since_s > _IDLE_TIMES * wall_s + _IDLE_S:
            return (
                f"hangs: waits for {now_s - self._idle_since_s:.0f} s, took {wall_s:.1f} without the mutant"
            )
        return ""

    def _over(self, outcome: str, why: str) -> Answer:
        ended = self._ended
        if outcome == "failed" and not (ended and ended[-1]["outcome"] == "failed"):
            ended.append(
                {
                    "ends": self._running,
                    "outcome": "failed",
                    "why": why,
                    "cpu_s": 0.0,
                    "wall_s": 0.0,
                    "hits": [],
                }
            )
        return {"outcome": outcome, "ended": ended, "places": self._places}


def _is_closed(file: TextIO) -> bool:
    """Nothing is sent while an answer is awaited, so anything readable is the end of the file."""
    return bool(select.select([file], [], [], 0)[0])


def _runs_twice(item: pytest.Item) -> bool:
    return any(name == "runs_twice" and value for name, value in item.user_properties)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _last_line(report: pytest.TestReport) -> str:
    """Returns the first line of pytest's last message about the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).split("\n")[0][:200]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants.server", description=__doc__)
    parser.add_argument("copy", type=Path)
    parser.add_argument("modules", type=json.loads, help="modules that may contain mutants, as JSON")
    parser.add_argument("tests", nargs="+", metavar="PATH")
    args = parser.parse_args()
    root = args.copy.resolve()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.set_inheritable(requests.fileno(), False)
    os.set_inheritable(answers.fileno(), False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    adopt_orphans()
    os.chdir(root)
    # Processes that multiprocessing starts must not import this file, which is no part of the tests.
    main_module = sys.modules["__main__"]
    main_module.__spec__, main_module.__file__ = None, None
    # The copy has its own benchmarks package, which its tests import.
    sys.path[0] = str(root)
    for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors", "-s"]
    pytest.main([*plugins, *args.tests], plugins=[Server(root, args.modules, requests, answers)])


if __name__ == "__main__":
    main()
