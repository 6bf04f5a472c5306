"""`alignedserve dev vopr` replays one seed, a history, or runs new seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from alignedserve.cli.vopr import command

HISTORY = Path(__file__).parents[1] / "vopr/histories/running_without_a_block.json"
AIMS = ("Submit:router", "Reserve:kvpool")


def vopr(out: Path, *options: str) -> Result:
    return CliRunner().invoke(command, [*options, "--out", str(out)])


@pytest.mark.slow
def test_a_seed_with_several_aims_is_replayed(tmp_path: Path) -> None:
    options = ["--seed", "8", "--system", "island", *(part for aim in AIMS for part in ("--aim", aim))]
    result = vopr(tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert f"aims  {AIMS}" in result.output
    assert list(tmp_path.glob("vopr-8-router-*.events"))


def test_a_history_is_replayed(tmp_path: Path) -> None:
    assert vopr(tmp_path, "--history", str(HISTORY)).exit_code == 0


@pytest.mark.parametrize("options", [(), ("--minutes", "1"), ("--seed", "1", "--history", str(HISTORY))])
def test_aims_are_those_of_one_seed(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = vopr(tmp_path, "--aim", AIMS[0], *options)
    assert (done.exit_code, done.stderr) == (2, "Error: --aim: needs --seed, and no --history\n")
