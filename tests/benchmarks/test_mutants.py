"""The mutants are of the code as it is, and one that is found is told from one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.mutants.__main__ import fails, hunt
from benchmarks.mutants.mutant import ROOT, Mutant, copy_packages, living, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_of_the_code_as_it_is(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    compile(mutant.applied(text), mutant.file, "exec")


def test_there_are_thirty_and_no_two_are_the_same() -> None:
    assert len(MUTANTS) >= 30
    assert len({(each.file, each.old, each.new) for each in MUTANTS}) == len(MUTANTS)


def test_what_the_code_does_not_say_can_not_be_mutated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has its line 0 times"):
        Mutant("nothing", "router/router.py", "no such line", "").applied("something")


@pytest.mark.slow
@pytest.mark.drawn(one_in=16)
def test_a_mutant_is_found_and_the_code_is_whole_afterwards(tmp_path: Path) -> None:
    (mutant,) = [
        each for each in MUTANTS if each.name == "staged KV is offered with the wrong request's blocks"
    ]
    copy_packages(tmp_path)
    path = tmp_path / mutant.file
    text = path.read_text()
    # It breaks the first seconds of this seed. Other seeds may run for minutes before.
    found = hunt(replace(mutant, system="island"), tmp_path, minutes=30.0, num_jobs=1, first_seed=0)
    assert found.is_found and found.failure and found.command.startswith("alignedserve dev vopr --seed")
    assert path.read_text() == text and not fails(tmp_path, found.command)
    with living(mutant, tmp_path):
        assert fails(tmp_path, found.command)
    with pytest.raises(ValueError), living(mutant, tmp_path):
        raise ValueError
    assert path.read_text() == text
