import random
from itertools import pairwise
from string import ascii_lowercase

import pytest

from alignedserve.demo import tasks
from alignedserve.demo.tasks import TASKS, check, expected_output_len, is_held_out
from alignedserve.demo.vocabulary import DAYS, MONTHS, num_tokens

# user, end and assistant markers around a prompt
CHAT_TOKENS = 3


DAYS_HELD_OUT = {
    "List the days from Saturday to Tuesday.",
    "List the days from Thursday to Thursday.",
    "List the days from Wednesday to Sunday.",
    "Name the days of the week from Friday to Monday.",
    "Name the days of the week from Saturday to Thursday.",
    "Name the days of the week from Sunday to Thursday.",
    "Say the days from Thursday to Sunday.",
}
SUMS_HELD_OUT = [9, 52, 60, 62, 104, 124, 168]


def examples(name: str, num: int, held_out: bool = False) -> list[tasks.TaskExample]:
    rng = random.Random(7)
    return [TASKS[name].generate(rng, held_out) for _ in range(num)]


def fields_of(example: tasks.TaskExample) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in example.key.split("|"))


@pytest.mark.parametrize(("name", "step"), [("count", 1), ("count_down", -1)])
def test_count_answers(name: str, step: int) -> None:
    for example in examples(name, 50):
        first, last = (int(number) for number in fields_of(example).values())
        numbers = list(range(first, last + step, step))
        assert [int(number) for number in example.answer.split(", ")] == numbers
        assert 1 <= len(numbers) <= tasks.MAX_COUNT_LEN
        assert max(numbers) <= tasks.MAX_NUMBER


def test_word_answers() -> None:
    for example in examples("repeat", 50):
        wanted = fields_of(example)
        assert example.answer.split(", ") == [wanted["word"]] * int(wanted["n"])
    for example in examples("spell", 50):
        assert example.answer.replace("-", "") == fields_of(example)["word"]
    for example in examples("reverse", 50):
        assert example.answer == "".join(reversed(fields_of(example)["word"]))


@pytest.mark.parametrize(("name", "sign"), [("add", 1), ("subtract", -1)])
def test_sums(name: str, sign: int) -> None:
    for example in examples(name, 50):
        wanted = fields_of(example)
        question, result = example.answer.split(" = ")
        assert int(result) == int(wanted["a"]) + sign * int(wanted["b"])
        assert question == f"{wanted['a']} {'+' if sign > 0 else '-'} {wanted['b']}"


@pytest.mark.parametrize(
    ("name", "cycle", "step"),
    [
        ("days", DAYS, 1),
        ("days_back", DAYS, -1),
        ("months", MONTHS, 1),
        ("months_back", MONTHS, -1),
        ("alphabet", ascii_lowercase, 1),
        ("alphabet_back", ascii_lowercase, -1),
    ],
)
def test_sequences_run_from_the_first_to_the_last(name: str, cycle: str | tuple[str, ...], step: int) -> None:
    for example in examples(name, 50):
        first, last = fields_of(example).values()
        names = example.answer.split(", ")
        assert (names[0], names[-1]) == (first, last)
        assert len(set(names)) == len(names)
        for before, after in pairwise(names):
            assert cycle.index(after) == (cycle.index(before) + step) % len(cycle)


def test_pick_answers() -> None:
    for example in examples("pick", 30):
        wanted = fields_of(example)
        assert example.answer in wanted["items"].split(", ")
        assert example.answer.split()[0] == wanted["n"]


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fit_and_lengths_follow(name: str) -> None:
    for example in examples(name, 100):
        assert num_tokens(example.prompt) + CHAT_TOKENS <= 1100
        assert expected_output_len(example) == num_tokens(example.answer) + 1
        assert check(example, example.answer)
        assert not check(example, example.answer + " ")


def test_long_lists_come_near_a_thousand_tokens() -> None:
    assert max(num_tokens(example.prompt) for example in examples("pick", 200)) > 950


@pytest.mark.parametrize("name", TASKS)
def test_the_sides_of_the_split_do_not_meet(name: str) -> None:
    trained, held_out = examples(name, 500), examples(name, 30, held_out=True)
    assert not {example.prompt for example in trained} & {example.prompt for example in held_out}
    if not TASKS[name].holds_out_prompts:
        assert not {example.key for example in trained} & {example.key for example in held_out}


def test_the_split_is_what_the_model_was_trained_with() -> None:
    held_out = {example.prompt for example in examples("days", 300, held_out=True)}
    assert held_out == DAYS_HELD_OUT
    sums = [a for a in range(200) if is_held_out("add", f"a={a}|b=7")]
    assert sums == SUMS_HELD_OUT


@pytest.mark.parametrize("name", ["count", "repeat", "spell", "reverse", "add", "subtract", "pick"])
def test_prompts_hardly_ever_repeat(name: str) -> None:
    prompts = [example.prompt for example in examples(name, 200)]
    assert len(set(prompts)) >= 190


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_asks_the_same(name: str) -> None:
    assert examples(name, 10) == examples(name, 10)
