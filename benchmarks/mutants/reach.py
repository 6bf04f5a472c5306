"""Which tests execute which statements of the deciding code, and each test's cost, measured once per state of the
tree."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutants.copies import CollectedTests, copied_files

# CPU seconds and elapsed seconds that limits are computed from before anything is measured.
_UNKNOWN = [6.0, 30.0]
# CPU seconds that vopr's seeds are run for, to see which statements they execute.
_VOPR_CPU_S = 60.0
VOPR = "vopr"
_CODE = {".py", ".cpp", ".h", ".js", ".lua", ".toml"}


@dataclass
class Measured:
    outcome: str
    cpu_s: float
    wall_s: float
    # A bit per executed statement, in the order of `Reach.places`.
    hits: int


@dataclass
class Reach:
    # The state of the tree that was measured.
    digest: str
    # The file and first line of each statement.
    places: list[tuple[str, int]] = field(default_factory=list)
    tests: dict[str, Measured] = field(default_factory=dict)

    def of(self, file: str, statement_line: int) -> list[str]:
        """Returns the passing tests that execute a statement; `VOPR` may be among them."""
        bits = sum(1 << at for at, place in enumerate(self.places) if place == (file, statement_line))
        return [name for name, test in self.tests.items() if test.outcome == "passed" and test.hits & bits]

    def is_executed(self, file: str, by: str) -> bool:
        """Returns whether any statement in a file is executed."""
        bits = sum(1 << at for at, place in enumerate(self.places) if place[0] == file)
        return by in self.tests and bool(self.tests[by].hits & bits)

    def passing(self) -> list[str]:
        """Returns all passing tests except `VOPR`."""
        return [name for name, test in self.tests.items() if test.outcome == "passed" and name != VOPR]

    def limits(self, names: Iterable[str]) -> dict[str, list[float]]:
        return {name: [self.tests[name].cpu_s, self.tests[name].wall_s] for name in names}

    def add(self, answer: dict[str, Any]) -> None:
        self.places = [(file, line) for file, line in answer["places"]]
        for each in answer["ended"]:
            hits = sum(1 << at for at in each["hits"])
            self.tests[each["ends"]] = Measured(each["outcome"], each["cpu_s"], each["wall_s"], hits)

    def save(self, path: Path) -> None:
        tests = {name: asdict(test) | {"hits": _packed(test.hits)} for name, test in self.tests.items()}
        text = json.dumps({"digest": self.digest, "places": self.places, "tests": tests})
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)


def load(path: Path, digest: str) -> Reach:
    """Returns an empty one if none was saved for this state of the tree."""
    if not path.exists():
        return Reach(digest)
    data = json.loads(path.read_text())
    if data["digest"] != digest:
        return Reach(digest)
    tests = {
        name: Measured(**each | {"hits": _unpacked(each["hits"])}) for name, each in data["tests"].items()
    }
    return Reach(digest, [(file, line) for file, line in data["places"]], tests)


def digest_of(root: Path) -> str:
    """Returns a hash of a tree's code and everything else in its tests/."""
    digest = hashlib.sha256()
    for path in copied_files(root):
        if path.suffix in _CODE or path.is_relative_to(root / "tests"):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def measure(
    tests: CollectedTests, test_file: str, probed: list[str], add: Callable[[dict[str, Any]], None]
) -> None:
    """Runs the tests in a file, or seeds for `VOPR`. If a test ends the process or hangs, only that test is lost.
    Failed tests are run a second time."""
    request: dict[str, Any] = {"probes": probed, "cpu_s": 1e9}
    if test_file == VOPR:
        answer = tests.ask(request | {"first_seed": 0, "cpu_s": _VOPR_CPU_S})
        hits = {hit for each in answer["ended"] for hit in each["hits"]}
        add(answer | {"ended": [_whole(answer, hits)]})
        return
    names = [name for name in tests.runs_twice if name.split("::")[0] == test_file]
    failed = _run(tests, names, request, add)
    _run(tests, failed, request, add)


def _run(
    tests: CollectedTests, names: list[str], request: dict[str, Any], add: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Returns the failed tests."""
    failed: list[str] = []
    while names:
        answer = tests.ask(request | {"items": names, "limits": dict.fromkeys(names, _UNKNOWN)})
        add(answer)
        failed += [each["ends"] for each in answer["ended"] if each["outcome"] == "failed"]
        names = names[len(answer["ended"]) :] if answer["outcome"] == "failed" else []
    return failed


def _whole(answer: dict[str, Any], hits: set[int]) -> dict[str, Any]:
    cpu_s = sum(each["cpu_s"] for each in answer["ended"])
    last: dict[str, Any] = answer["ended"][-1]
    return last | {"ends": VOPR, "cpu_s": cpu_s, "hits": sorted(hits)}


def _packed(hits: int) -> str:
    return base64.b64encode(zlib.compress(hits.to_bytes((hits.bit_length() + 7) // 8, "little"))).decode()


def _unpacked(text: str) -> int:
    return int.from_bytes(zlib.decompress(base64.b64decode(text)), "little")
