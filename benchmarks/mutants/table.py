"""The table of random mutants by area, and those that nothing caught, by name."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import table, write_page
from benchmarks.mutants.areas import AREAS
from benchmarks.mutants.catch import Verdict

_ELSEWHERE = "elsewhere"
HEAD = ("area", "mutants", "caught", "by a test", "by vopr", "alive", "live only")
HEAD_OF_ALIVE = ("key", "mutant", "function", "tests that execute it", "what is known")


def remarks() -> dict[str, str]:
    """Returns remarks on surviving mutants by key: why one has no effect, or which test is missing."""
    text = (Path(__file__).parent / "survivors.toml").read_text()
    return {key: str(remark) for key, remark in tomllib.loads(text).items()}


def page(verdicts: Sequence[Verdict], known: dict[str, str], command: str) -> str:
    alive = [each for each in verdicts if not each.is_caught]
    return (
        f"# Random mutants\n\n`{command}`\n\n"
        f"{len(verdicts) - len(alive)} of {len(verdicts)} are caught by a test or by `alignedserve dev vopr`. "
        "*Live only*: no test that runs in its own process executes the statement.\n\n"
        f"{table(HEAD, _rows(verdicts))}\n\n"
        "## Those that live\n\n"
        f"{table(HEAD_OF_ALIVE, [_alive(each, known) for each in alive])}\n\n"
        "## What caught the others\n\n"
        f"{table(('by', 'mutants'), _catchers(verdicts))}\n"
    )


def _rows(verdicts: Sequence[Verdict]) -> list[tuple[object, ...]]:
    areas = [*AREAS, _ELSEWHERE]
    rows = [(area, [each for each in verdicts if (each.area or _ELSEWHERE) == area]) for area in areas]
    return [(area, *_counts(of_area)) for area, of_area in [*rows, ("all", list(verdicts))] if of_area]


def _counts(verdicts: Sequence[Verdict]) -> tuple[int, ...]:
    caught = [each for each in verdicts if each.is_caught]
    by_vopr = sum(each.by.startswith("vopr") for each in caught)
    unreached = sum(not each.is_caught and not each.num_reaching and not each.is_in_vopr for each in verdicts)
    return (
        len(verdicts),
        len(caught),
        len(caught) - by_vopr,
        by_vopr,
        len(verdicts) - len(caught),
        unreached,
    )


def _alive(verdict: Verdict, known: dict[str, str]) -> list[str]:
    tests = f"{verdict.num_reaching}{' and vopr' if verdict.is_in_vopr else ''}"
    if verdict.is_cut:
        tests += f", {verdict.num_run} of them were run"
    cells = (verdict.key, verdict.name, f"`{verdict.function}`", tests, known.get(verdict.key, ""))
    return [each.replace("|", "\\|").replace("\n", " ") for each in cells]


def _catchers(verdicts: Sequence[Verdict]) -> list[tuple[str, int]]:
    caught = (each.by for each in verdicts if each.is_caught)
    files = Counter("alignedserve dev vopr" if by.startswith("vopr") else by.split("::")[0] for by in caught)
    return [(f"`{by}`", count) for by, count in files.most_common()]


def save(verdicts: Sequence[Verdict], to: Path, command: str, digest: str) -> None:
    """`digest`: the hash of the tree in which they were tried."""
    data = {"command": command, "digest": digest, "mutants": verdicts}
    write_page(to / "random_mutants", page(verdicts, remarks(), command), data)


def saved(to: Path, digest: str) -> list[Verdict]:
    """Returns nothing if they were tried in a different tree."""
    path = to / "random_mutants.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    return [Verdict(**each) for each in data["mutants"]] if data.get("digest") == digest else []
