"""What a program can find wrong with the English of the code: its comments, docstrings and strings.

The rules are those of the pages (tests/test_english.py). A folder's mean counts its comments and docstrings together.
Strings are looked at for forbidden words alone. They count as prose if they have at least four words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.test_english import forbidden_words, too_long

ROOT = Path(__file__).parents[1]
# Folders that were read and rewritten. A file of the root of `alignedserve` is named by itself.
FOLDERS: list[str] = [
    "alignedserve/__init__.py",
    "alignedserve/batch",
    "alignedserve/bench",
    "alignedserve/cli",
    "alignedserve/demo",
    "alignedserve/engine",
    "alignedserve/gateway",
    "alignedserve/instance",
    "alignedserve/launch",
    "alignedserve/kv",
    "alignedserve/lengths",
    "alignedserve/models",
    "alignedserve/offline",
    "alignedserve/ops",
    "alignedserve/process",
    "alignedserve/protocol",
    "alignedserve/sampling_params.py",
    "alignedserve/scheduling",
    "alignedserve/sim",
    "alignedserve/store",
    "alignedserve/structured_outputs.py",
    "alignedserve/text",
    "alignedserve/timing",
    "alignedserve/transport",
    "alignedserve/types.py",
    "alignedserve/vopr",
    "decode_worker",
    "examples",
    "kernels",
    "kvpool",
    "prefill_worker",
    "research/demo_model",
    "router",
]
# Strings that have to be as they are, such as texts that are not ours.
AS_THEY_ARE: set[str] = set()

DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|pragma|mypy:|fmt:|ruff:|-{3,}|!)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

each_folder = pytest.mark.parametrize("folder", FOLDERS)


def comments(text: str) -> Iterator[str]:
    """Blocks of comment lines that follow each other in the same column, each as one paragraph."""
    found = [
        (token.start, token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)
    ]
    # lines of one block differ from their index by the same number
    for _, block in groupby(enumerate(found), key=lambda each: (each[1][0][0] - each[0], each[1][0][1])):
        yield " ".join(line.lstrip("#").strip() for _, (_, line) in block)


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (found := ast.get_docstring(node)):
            yield found


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 4:
            yield node.value


def files(folder: str) -> list[Path]:
    path = ROOT / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@each_folder
def test_no_word_of_the_code_is_forbidden(folder: str) -> None:
    wrong = []
    for path in files(folder):
        text = path.read_text()
        for prose in (*comments(text), *set(strings(ast.parse(text))) - AS_THEY_ARE):
            wrong += [f"{path.relative_to(ROOT)}: {each}" for each in forbidden_words(prose)]
    assert not wrong, "\n".join(wrong)


@each_folder
def test_sentences_of_the_code_are_short(folder: str) -> None:
    texts = [path.read_text() for path in files(folder)]
    prose = [part for text in texts for part in (*comments(text), *docstrings(ast.parse(text)))]
    wrong = too_long("\n\n".join(prose))
    assert not wrong, "\n".join(wrong)


# ---- the finder itself ----

SAMPLE = '''"""Nobody reads it."""
# one line,
# and so many more
x = 1  # type: ignore
y = f"{x} tokens of which nobody knows"  # beside the code
'''


def test_prose_of_the_code_is_found() -> None:
    assert list(comments(SAMPLE)) == ["one line, and so many more", "beside the code"]
    tree = ast.parse(SAMPLE)
    assert list(docstrings(tree)) == ["Nobody reads it."]
    assert list(strings(tree)) == [" tokens of which nobody knows"]
