"""Every benchmark that a page or a docstring names runs, as far as to its `--help`, or is frozen."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.frozen import COMMIT, NAMES, source_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
PAGES += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
SOURCES = [path for name in ("benchmarks", "research") for path in (ROOT / name).rglob("*.py")]
NAMED = re.compile(r"python -m ((?:benchmarks|research)(?:\.[a-z_]\w*)+)")
# processes that other benchmarks start, with arguments of their own
HELPERS = {
    "benchmarks.attack.flooder",
    "benchmarks.attack.victim",
    "benchmarks.rt_with_be.keep_open",
    "benchmarks.mutants.server",
}


def commands() -> list[str]:
    found = {name for path in [*PAGES, *SOURCES] for name in NAMED.findall(path.read_text())}
    return sorted(found - HELPERS - NAMES)


def test_all_are_found() -> None:
    assert len(commands()) >= 15


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_frozen_one_is_in_the_tree_of_its_commit_alone(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    assert not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    source = source_of(name)
    if source is None:
        pytest.skip(f"{COMMIT} is not in this copy")
    assert re.search(r"parse_args|sys\.argv|^def run\(bench: Bench\)", source, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_names_a_frozen_one_names_its_commit(page: Path) -> None:
    """Decision records tell what was done at their time."""
    text = page.read_text()
    frozen = NAMES.intersection(NAMED.findall(text))
    assert not frozen or COMMIT in text or page.parent.name == "adr", frozen


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_none_is_run_by_its_path(path: Path) -> None:
    """A module that is run so does not find the package that it is in."""
    assert not re.search(r"python benchmarks/", path.read_text())


@pytest.mark.filterwarnings("ignore:'(benchmarks|research):RuntimeWarning")
@pytest.mark.parametrize("name", commands())
def test_it_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
