"""Splits text into tokens, in plain Python. `tokenizer.py` builds the same for the tokenizers library.

Characters are spelled in bytes, except for the pieces below: the exact words of phrasings, with their leading space,
and a few joints. So a word to spell or reverse, and every number, has one token per character.
"""

from __future__ import annotations

import re

# Alternatives in their order: a joint, a word with its leading space, a single character.
PIECE = r", | [-+=] | ?[A-Za-z]+|[^A-Za-z]"

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, END)

JOINTS = (", ", " + ", " - ", " = ")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
NAMES = (*DAYS, *MONTHS)
OPENERS = (
    "Add And Calculate Count Here How List Name Please Read Repeat Reverse Say Spell Subtract What Which "
    "Write You"
)
WORDS = (
    "Tell What Which alphabet and are assistant backwards count days do down every from helpful in is letter "
    "letters list me minus months much number numbers of plus repeat spell the this times to week word "
    "year you"
)
PIECES: tuple[str, ...] = (
    *JOINTS,
    *NAMES,
    *OPENERS.split(),
    *(f" {name}" for name in NAMES),
    *(f" {word}" for word in WORDS.split()),
)

_PIECE = re.compile(PIECE)
_WHOLE = frozenset(PIECES)


def num_tokens(text: str) -> int:
    """Returns the number of tokens of a text without special tokens."""
    return sum(1 if piece in _WHOLE else len(piece.encode()) for piece in _PIECE.findall(text))
