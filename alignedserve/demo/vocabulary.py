"""How text is cut into tokens, in plain Python; `tokenizer.py` builds the same for the tokenizers library.

Every character is spelled in bytes, except for the pieces below: the words of the phrasings, written exactly
so (with the space before them where there is one), and a few joints. A word that is spelled or reversed, and
every digit, thereby stays one token per character.
"""

from __future__ import annotations

import re

# These are tried in this order at each place: a joint, a word with the space before it, or a single character.
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
    """Returns how many tokens the tokenizer cuts ordinary text (without special tokens) into."""
    return sum(1 if piece in _WHOLE else len(piece.encode()) for piece in _PIECE.findall(text))
