"""What may come next, of every kind of grammar."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from alignedserve import demo
from alignedserve.structured_outputs import StructuredOutputsParams, Thoughts
from alignedserve.text.grammar import MAX_KEPT, GrammarError, Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
assert TOKENIZER.eos_token_id is not None
EOS: int = TOKENIZER.eos_token_id
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    # more rows than the tokenizer has tokens: an embedding is rounded up
    return Grammars(lambda: TOKENIZER, 400, frozenset([EOS]))


def walk(grammars: Grammars, seed: int, most: int = 400, **wanted: Any) -> tuple[str, bool]:
    """Any tokens that may come; and whether they came to an end."""
    random_ = random.Random(seed)
    matcher = grammars.matcher(StructuredOutputsParams(**wanted), "")
    output: list[int] = []
    while len(output) < most:
        may = np.nonzero(matcher.allowed(output))[0].tolist()
        assert may and max(may) < TOKENIZER.vocab_size
        token = random_.choice(may)
        if token == EOS:
            return TOKENIZER.decode(output, skip_special_tokens=False), True
        output.append(token)
    return TOKENIZER.decode(output, skip_special_tokens=False), False


@pytest.mark.parametrize("seed", range(10))
def test_whatever_may_come_is_right_in_the_end(grammars: Grammars, seed: int) -> None:
    text, has_ended = walk(grammars, seed, json=SCHEMA)
    if has_ended:
        found = json.loads(text)
        assert list(found) == ["a", "b"] and isinstance(found["a"], int) and found["b"] in ("x", "y")
    text, has_ended = walk(grammars, seed, regex=r"\d{3}-[a-f]{2}")
    assert has_ended and re.fullmatch(r"\d{3}-[a-f]{2}", text)
    choices = ["red", "re", 'b"l\\ue\n', "日本 é"]
    assert walk(grammars, seed, choice=choices) in [(each, True) for each in choices]
    text, has_ended = walk(grammars, seed, grammar='start: "a"+ "b" NUMBER\nNUMBER: /[0-9]/')
    assert not has_ended or re.fullmatch("a+b[0-9]", text)
    text, has_ended = walk(grammars, seed, grammar='root ::= ("yes" | "no") [a-c]')
    assert has_ended and re.fullmatch("(yes|no)[abc]", text)


def test_choices_may_be_thousands(grammars: Grammars) -> None:
    choices = [str(number) for number in range(7000)]
    for seed in range(10):
        text, has_ended = walk(grammars, seed, choice=choices)
        assert has_ended and text in choices
    assert {walk(grammars, seed, choice=["1", "12"])[0] for seed in range(10)} == {"1", "12"}


def test_an_owner_with_many_grammars_evicts_its_own() -> None:
    grammars = Grammars(lambda: TOKENIZER, 400, frozenset([EOS]))
    first, *others = [StructuredOutputsParams(choice=[str(number)]) for number in range(MAX_KEPT + 9)]
    grammars.compiled(first, "a")
    for each in others:
        grammars.compiled(each, "b")
    assert grammars.matcher(first, "a").is_ready
    are_ready = [grammars.matcher(each, "b").is_ready for each in others]
    # The latest ones, in the room that is left.
    assert are_ready == [False] * 9 + [True] * (MAX_KEPT - 1)


def test_a_matcher_that_begins_in_the_middle_goes_on_the_same(grammars: Grammars) -> None:
    wanted = StructuredOutputsParams(json=SCHEMA)
    output = TOKENIZER.encode('{"a": 12, "b": "x"}')
    all_along = grammars.matcher(wanted, "")
    for end in range(len(output) + 1):
        found = all_along.allowed(output[:end])
        assert (grammars.matcher(wanted, "").allowed(output[:end]) == found).all()
    assert np.nonzero(found)[0].tolist() == [EOS]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "("}, r"structured_outputs.regex: .*invalid regex"),
        ({"grammar": "start: nothing"}, r"structured_outputs.grammar: .*unknown name"),
        ({"grammar": "root ::= ((("}, r"structured_outputs.grammar: Expected"),
        ({"json": {"type": "thing"}}, r"structured_outputs.json: Invalid type: thing"),
        ({"json": "{"}, r"structured_outputs.json: "),
        ({"json": {"$ref": "http://example.org/x"}}, r"structured_outputs.json: .*does not fetch"),
        ({"json": "[" * 5000}, r"structured_outputs.json: recursion"),
        ({"regex": "(" * 5000}, r"structured_outputs.regex: "),
        ({"grammar": "start: " + "(" * 5000}, r"structured_outputs.grammar: .*nested"),
        ({"regex": r"[^\s\S]"}, r"structured_outputs.regex: it allows no output"),
        ({"grammar": "start: start"}, r"structured_outputs.grammar: it allows no output"),
        ({"json": {"$ref": "#"}}, r"structured_outputs.json: it allows no output"),
        ({"regex": "(a{1,1000}){1,1000}" * 9 + "b"}, None),
    ],
)
def test_what_cannot_be_compiled_says_why(
    grammars: Grammars, wanted: dict[str, Any], message: str | None
) -> None:
    asked = StructuredOutputsParams(**wanted)
    if message is None:
        grammars.check(asked)
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        grammars.check(asked)
    assert "\n" not in str(caught.value)
    # where it is too late to refuse it
    with pytest.raises(GrammarError, match=message):
        grammars.matcher(asked, "").allowed([])


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"json": {}, "regex": "a"},
        {"regex": 5},
        {"choice": []},
        {"choice": [""]},
        {"choice": "ab"},
        {"json_object": False},
        {"json": {"a": {1, 2}}},
    ],
)
def test_what_is_no_structure_is_named(wanted: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        StructuredOutputsParams(**wanted)


def test_tokens_that_do_not_follow_it_are_an_error(grammars: Grammars) -> None:
    matcher = grammars.matcher(StructuredOutputsParams(regex="abc"), "")
    with pytest.raises(GrammarError, match="structured_outputs: "):
        matcher.allowed(TOKENIZER.encode("x"))


def test_without_a_tokenizer_there_are_no_grammars() -> None:
    for bare in (Grammars(lambda: None, 400, frozenset([4])), Grammars(lambda: TOKENIZER, 400, frozenset())):
        with pytest.raises(InvalidRequest, match="needs a tokenizer and an end of sequence"):
            bare.check(StructuredOutputsParams(regex="a"))
        # nor is that a reason not to start
        bare.prepare()


def test_what_one_owner_has_compiled_is_not_ready_for_another(grammars: Grammars) -> None:
    wanted = StructuredOutputsParams(regex="one owner's")
    grammars.matcher(wanted, "key:a").prepare()
    assert [grammars.matcher(wanted, owner).is_ready for owner in ("key:a", "key:b", "")] == [
        True,
        False,
        False,
    ]
    grammars.matcher(wanted, "key:b").prepare()
    assert grammars.matcher(wanted, "key:b").is_ready


def test_a_model_whose_tokenizer_cannot_be_had_starts_all_the_same() -> None:
    def load() -> Tokenizer:
        return Tokenizer.from_directory("/nothing", where="this one")

    grammars = Grammars(load, 400, frozenset([EOS]))
    grammars.prepare()
    with pytest.raises(InvalidRequest, match="not possible with this model: /nothing holds no tokenizer"):
        grammars.check(StructuredOutputsParams(regex="a"))


def test_what_is_prepared_is_not_loaded_again() -> None:
    loaded: list[Tokenizer] = []

    def load() -> Tokenizer:
        loaded.append(TOKENIZER)
        return TOKENIZER

    grammars = Grammars(load, 400, frozenset([EOS]))
    grammars.prepare()
    assert loaded == [TOKENIZER]
    grammars.check(StructuredOutputsParams(regex="a"))
    assert loaded == [TOKENIZER]


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({"json": SCHEMA}, '{"a": 12, "b": "x"}', '{"b": "x"}'),
        ({"json_object": True}, "{}", "[]"),
        ({"regex": r"a/\d\/[b/]"}, "a/5//", "a5"),
        ({"choice": ["red", "blue"]}, "blue", "green"),
        ({"grammar": 'start: "a"+ B\nB: /b/'}, "aab", "b"),
        ({"grammar": 'root ::= ("yes" | "no") [a-c]'}, "noc", "nod"),
    ],
)
@pytest.mark.parametrize("opening", [None, "<think>"])
def test_thoughts_are_free_and_what_comes_after_them_is_not(
    grammars: Grammars, wanted: dict[str, Any], right: str, wrong: str, opening: str | None
) -> None:
    params = StructuredOutputsParams(**wanted, thoughts=Thoughts("</think>", opening))

    def is_allowed(text: str) -> bool:
        matcher, output = grammars.matcher(params, ""), TOKENIZER.encode(text)
        return all(matcher.allowed(output[:end])[token] for end, token in enumerate([*output, EOS]))

    thoughts = f"{opening or ''}Is it {wrong}? </thin</think>"
    for gap in ("", "\n\n", " "):
        assert is_allowed(thoughts + gap + right), (gap, right)
    assert not is_allowed(thoughts + wrong) and not is_allowed(thoughts)
    # without an opening tag in it, an output that has to begin with thoughts has to end them
    assert is_allowed(right) == (opening is not None)
