"""The mutants in `mutants.toml`, in the form in which tests are tried with them."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.mutants.edit import Edit
from benchmarks.mutants.mutant import Mutant, mutants


def named_edits(root: Path) -> list[Edit]:
    return [edit_of(each, (root / each.file).read_text()) for each in mutants()]


def edit_of(mutant: Mutant, text: str) -> Edit:
    """Raises ValueError if the text is not the one that the mutant was made for."""
    mutant.applied(text)
    begin = text.index(mutant.old)
    end = begin + len(mutant.old)
    same = next(
        (at for at, (a, b) in enumerate(zip(mutant.old, mutant.new, strict=False)) if a != b),
        min(len(mutant.old), len(mutant.new)) - 1,
    )
    differs_at = text.count("\n", 0, begin + same) + 1
    statement, function = _around(ast.parse(text), differs_at)
    return Edit(
        mutant.file,
        statement,
        *_place(text, begin),
        *_place(text, end),
        is_expression=False,
        old=mutant.old,
        new=mutant.new,
        function=function,
        number=0,
        title=mutant.name,
        systems=(mutant.system,) if mutant.system else (),
    )


def _place(text: str, at: int) -> tuple[int, int]:
    before = text[:at]
    return before.count("\n") + 1, len(before.rpartition("\n")[2].encode())


def _around(tree: ast.Module, line: int) -> tuple[int, str]:
    """Returns the first line of the innermost statement there, and the enclosing functions and classes."""
    statement, names = line, []
    body: list[ast.AST] = [tree]
    while body:
        node = body.pop()
        for child in ast.iter_child_nodes(node):
            first, last = getattr(child, "lineno", 0), getattr(child, "end_lineno", None) or 0
            if first <= line <= last or isinstance(child, ast.ExceptHandler | ast.match_case):
                if isinstance(child, ast.stmt):
                    statement = first
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.append(child.name)
                body.append(child)
    return statement, ".".join(names)
