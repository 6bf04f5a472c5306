"""Small tasks with answers that a program can check, and with lengths that follow from the prompt.

| task     | prompt, in one of its phrasings      | answer              | output tokens, end included |
| -------- | ------------------------------------ | ------------------- | --------------------------- |
| count    | Count from 8 to 11.                  | 8, 9, 10, 11        | digits + numbers            |
| repeat   | Repeat the word "sun" 3 times.       | sun, sun, sun       | n x (letters + 1)           |
| spell    | Spell the word "sun".                | s-u-n               | 2 x letters                 |
| reverse  | Reverse the word "sun".              | nus                 | letters + 1                 |
| days     | List the days from Friday to Sunday. | Friday, ... Sunday  | 2 x days                    |
| months   | List the months from May to July.    | May, June, July     | 2 x months                  |
| add      | What is 12 + 30?                     | 12 + 30 = 42        | digits + 3                  |
| subtract | What is 30 - 12?                     | 30 - 12 = 18        | digits + 3                  |
| alphabet | List the letters from c to f.        | c, d, e, f          | 2 x letters                 |
| pick     | 1 sun, 2 fox, 3 elm. What is word 2? | 2 fox               | digits + letters + 2        |

The `_down` and `_back` tasks are the same backwards; days and months wrap around.
The key of a question is its content without the phrasing. One key in twenty is held out, by its hash: the model is
never trained on it in any phrasing. Days and months have too few keys for that (49 pairs of days). There, one prompt in
twenty is held out: a pair in one phrasing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase

from alignedserve.demo.vocabulary import DAYS, MONTHS, num_tokens
from alignedserve.demo.words import any_word

MAX_NUMBER = 999
MAX_COUNT_LEN = 60
MAX_REPEATS = 12
MAX_PICK_ITEMS = 150
# Maximum tokens of a pick's list. With the question and the chat template, a prompt stays below 1,100.
MAX_LIST_TOKENS = 1040
HELD_OUT_ONE_IN = 20
HELD_OUT_SALT = 2


@dataclass(frozen=True)
class TaskExample:
    task: str
    prompt: str
    answer: str
    # The content of the question, without the phrasing.
    key: str


@dataclass(frozen=True)
class TaskQuestion:
    """The values of a phrasing's fields, and the answer."""

    fields: Mapping[str, str]
    answer: str

    @property
    def key(self) -> str:
        return "|".join(f"{name}={value}" for name, value in sorted(self.fields.items()))


@dataclass(frozen=True)
class Task:
    name: str
    phrasings: tuple[str, ...]
    ask: Callable[[random.Random], TaskQuestion]
    # Whether prompts (a key in one phrasing) are held out in place of keys, because there are few keys.
    holds_out_prompts: bool = False

    def generate(self, rng: random.Random, held_out: bool = False) -> TaskExample:
        """Returns the next example, from the held-out side of the split or from the other."""
        while True:
            question, phrasing = self.ask(rng), rng.choice(self.phrasings)
            if self.is_held_out(question, phrasing) == held_out:
                return self.example(question, phrasing)

    def is_held_out(self, question: TaskQuestion, phrasing: str) -> bool:
        return is_held_out(
            self.name, f"{question.key}|{phrasing}" if self.holds_out_prompts else question.key
        )

    def example(self, question: TaskQuestion, phrasing: str) -> TaskExample:
        return TaskExample(self.name, phrasing.format(**question.fields), question.answer, question.key)


def is_held_out(task: str, key: str) -> bool:
    digest = hashlib.blake2b(f"{HELD_OUT_SALT}:{task}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def check(example: TaskExample, text: str) -> bool:
    return text == example.answer


def expected_output_len(example: TaskExample) -> int:
    """Returns the number of tokens of a correct answer, including the end token."""
    return num_tokens(example.answer) + 1


def _ask_count(step: int) -> Callable[[random.Random], TaskQuestion]:
    def ask(rng: random.Random) -> TaskQuestion:
        length = rng.randint(1, rng.choice((4, 10, 25, MAX_COUNT_LEN)))
        low = rng.randint(0, rng.choice((20, 150, MAX_NUMBER + 1 - length)))
        numbers = [str(number) for number in range(low, low + length)][::step]
        return TaskQuestion({"a": numbers[0], "b": numbers[-1]}, ", ".join(numbers))

    return ask


def _ask_repeat(rng: random.Random) -> TaskQuestion:
    word, times = any_word(rng), rng.randint(1, rng.choice((3, 6, MAX_REPEATS)))
    return TaskQuestion({"word": word, "n": str(times)}, ", ".join([word] * times))


def _ask_spell(rng: random.Random) -> TaskQuestion:
    word = any_word(rng)
    return TaskQuestion({"word": word}, "-".join(word))


def _ask_reverse(rng: random.Random) -> TaskQuestion:
    word = any_word(rng)
    return TaskQuestion({"word": word}, word[::-1])


def _ask_cycle(names: tuple[str, ...], step: int) -> Callable[[random.Random], TaskQuestion]:
    def ask(rng: random.Random) -> TaskQuestion:
        start, length = rng.randrange(len(names)), rng.randint(1, len(names))
        chosen = [names[(start + step * place) % len(names)] for place in range(length)]
        return TaskQuestion({"a": chosen[0], "b": chosen[-1]}, ", ".join(chosen))

    return ask


def _operand(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((9, 99, MAX_NUMBER, MAX_NUMBER, MAX_NUMBER)))


def _ask_add(rng: random.Random) -> TaskQuestion:
    a, b = _operand(rng), _operand(rng)
    return TaskQuestion({"a": str(a), "b": str(b)}, f"{a} + {b} = {a + b}")


def _ask_subtract(rng: random.Random) -> TaskQuestion:
    b, a = sorted((_operand(rng), _operand(rng)))
    return TaskQuestion({"a": str(a), "b": str(b)}, f"{a} - {b} = {a - b}")


def _ask_alphabet(step: int) -> Callable[[random.Random], TaskQuestion]:
    def ask(rng: random.Random) -> TaskQuestion:
        first, last = sorted((rng.randrange(26), rng.randrange(26)))
        letters = ascii_lowercase[first : last + 1][::step]
        return TaskQuestion({"a": letters[0], "b": letters[-1]}, ", ".join(letters))

    return ask


def numbered_list(rng: random.Random, num_items: int) -> list[str]:
    """Returns words of one length range, which keeps the list below its token limit."""
    max_len = rng.randint(4, 12)
    while True:
        words = [any_word(rng, 2, max_len) for _ in range(num_items)]
        if max_len == 3 or num_tokens(join_list(words)) <= MAX_LIST_TOKENS:
            return words
        max_len -= 1


def join_list(words: list[str]) -> str:
    return ", ".join(f"{number} {word}" for number, word in enumerate(words, 1))


def pick_question(words: list[str], number: int) -> TaskQuestion:
    return TaskQuestion({"items": join_list(words), "n": str(number)}, f"{number} {words[number - 1]}")


def _ask_pick(rng: random.Random) -> TaskQuestion:
    words = numbered_list(rng, rng.randint(5, rng.choice((20, 60, MAX_PICK_ITEMS))))
    return pick_question(words, rng.randint(1, len(words)))


# Phrasings of further questions about the list in an earlier message.
PICK_FOLLOW_UPS = ("And word {n}?", "Which word is number {n}?", "And number {n}?", "What is word {n}?")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "count",
            (
                "Count from {a} to {b}.",
                "Please count from {a} to {b}.",
                "List the numbers from {a} to {b}.",
                "Write every number from {a} to {b}.",
            ),
            _ask_count(1),
        ),
        Task(
            "count_down",
            (
                "Count down from {a} to {b}.",
                "Please count backwards from {a} to {b}.",
                "List the numbers backwards from {a} to {b}.",
            ),
            _ask_count(-1),
        ),
        Task(
            "repeat",
            (
                'Repeat the word "{word}" {n} times.',
                'Write the word "{word}" {n} times.',
                'Please repeat "{word}" {n} times.',
                "Say {word} {n} times.",
            ),
            _ask_repeat,
        ),
        Task(
            "spell",
            (
                'Spell the word "{word}".',
                'Please spell "{word}".',
                'How do you spell "{word}"?',
                "Spell {word}.",
            ),
            _ask_spell,
        ),
        Task(
            "reverse",
            (
                'Reverse the word "{word}".',
                'Write "{word}" backwards.',
                'What is "{word}" backwards?',
                "Reverse {word}.",
            ),
            _ask_reverse,
        ),
        Task(
            "days",
            (
                "List the days from {a} to {b}.",
                "Name the days of the week from {a} to {b}.",
                "Say the days from {a} to {b}.",
            ),
            _ask_cycle(DAYS, 1),
            holds_out_prompts=True,
        ),
        Task(
            "days_back",
            (
                "List the days backwards from {a} to {b}.",
                "Name the days of the week backwards from {a} to {b}.",
                "Say the days backwards from {a} to {b}.",
            ),
            _ask_cycle(DAYS, -1),
            holds_out_prompts=True,
        ),
        Task(
            "months",
            (
                "List the months from {a} to {b}.",
                "Name the months of the year from {a} to {b}.",
                "Say the months from {a} to {b}.",
            ),
            _ask_cycle(MONTHS, 1),
            holds_out_prompts=True,
        ),
        Task(
            "months_back",
            (
                "List the months backwards from {a} to {b}.",
                "Name the months of the year backwards from {a} to {b}.",
                "Say the months backwards from {a} to {b}.",
            ),
            _ask_cycle(MONTHS, -1),
            holds_out_prompts=True,
        ),
        Task(
            "add",
            ("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?", "Calculate {a} + {b}."),
            _ask_add,
        ),
        Task(
            "subtract",
            (
                "What is {a} - {b}?",
                "Subtract {b} from {a}.",
                "How much is {a} minus {b}?",
                "Calculate {a} - {b}.",
            ),
            _ask_subtract,
        ),
        Task(
            "alphabet",
            (
                "List the letters from {a} to {b}.",
                "Say the alphabet from {a} to {b}.",
                "Write every letter from {a} to {b}.",
            ),
            _ask_alphabet(1),
        ),
        Task(
            "alphabet_back",
            (
                "List the letters backwards from {a} to {b}.",
                "Say the alphabet backwards from {a} to {b}.",
            ),
            _ask_alphabet(-1),
        ),
        Task(
            "pick",
            (
                "Here is a list: {items}. Which word is number {n}?",
                "{items}. What is word {n}?",
                "What is word {n} in this list: {items}?",
                "Read this list: {items}. Tell me word number {n}.",
            ),
            _ask_pick,
        ),
    )
}
