"""Puts other code into functions that are already imported, so that a mutant needs no new process.

Only functions are changed, not modules. A change outside all functions can't be applied this way.
"""

from __future__ import annotations

import ast
import builtins
import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

# The name of the array that records executed statements. It is one of Python's builtins while it is needed.
_HITS = "__alignedserve_hits__"


class Functions:
    """All functions in a folder that this process has imported."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._by_file: dict[str, list[FunctionType]] = defaultdict(list)
        names: dict[str, str | None] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType:
                path = each.__code__.co_filename
                if path not in names:
                    names[path] = self._name(path)
                name = names[path]
                if name is not None:
                    self._by_file[name].append(each)

    def _name(self, path: str) -> str | None:
        """Returns the path relative to the root with links resolved: `alignedserve/router` becomes `router`."""
        real = os.path.realpath(path)
        return os.path.relpath(real, self._root) if real.startswith(f"{self._root}{os.sep}") else None

    def replace(self, file: str, text: str | ast.Module) -> int:
        """Returns the number of functions with changed code. Line numbers must stay the same."""
        functions = self._by_file[file]
        path = functions[0].__code__.co_filename if functions else file
        new = _codes(compile(text, path, "exec", dont_inherit=True))
        num_replaced = 0
        for function in functions:
            code = function.__code__
            found = new[_place(code)]
            if len(found) == 1 and found[0].co_freevars == code.co_freevars and found[0] != code:
                function.__code__ = found[0]
                num_replaced += 1
        return num_replaced


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> dict[tuple[str, int], list[CodeType]]:
    found: dict[tuple[str, int], list[CodeType]] = defaultdict(list)
    todo = [code]
    while todo:
        one = todo.pop()
        found[_place(one)].append(one)
        todo += [each for each in one.co_consts if isinstance(each, CodeType)]
    return found


class Probes:
    """Records which statements in functions are executed: each sets one byte before it runs."""

    def __init__(self, functions: Functions, root: Path, files: list[str]) -> None:
        self.places: list[tuple[str, int]] = []
        trees = {file: self._with_probes(file, (root / file).read_text()) for file in files}
        self._hits = bytearray(len(self.places))
        setattr(builtins, _HITS, self._hits)
        for file, tree in trees.items():
            functions.replace(file, tree)

    def take(self) -> list[int]:
        """Returns the statements executed since the last call, as positions in `places`."""
        found = [at for at, is_hit in enumerate(self._hits) if is_hit] if any(self._hits) else []
        self._hits[:] = bytes(len(self._hits))
        return found

    def _with_probes(self, file: str, text: str) -> ast.Module:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._fill(file, node)
        return ast.fix_missing_locations(tree)

    def _fill(self, file: str, node: ast.AST) -> None:
        """Puts probes into a function's statements, but not into nested functions and classes."""
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                setattr(node, field, list(self._probed(file, statements)))
        for inner in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
            self._fill(file, inner)

    def _probed(self, file: str, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in statements:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not isinstance(statement, ast.Global | ast.Nonlocal):
                yield self._probe(file, statement)
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._fill(file, statement)
            yield statement

    def _probe(self, file: str, statement: ast.stmt) -> ast.stmt:
        number = len(self.places)
        self.places.append((file, statement.lineno))
        probe = ast.parse(f"{_HITS}[{number}] = 1").body[0]
        for node in ast.walk(probe):
            ast.copy_location(node, statement)
        return probe
