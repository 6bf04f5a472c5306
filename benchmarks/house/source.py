"""The product's Python files: those of `alignedserve`, and of the folders beside it that are parts of it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "alignedserve"
# Folders at the root to which `alignedserve` has links.
BESIDE = ("decode_worker", "kernels", "kvpool", "prefill_worker", "router")


@dataclass(frozen=True)
class Source:
    # The path from the root of the repository.
    name: str
    # The name under which it is imported.
    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree: to walk it takes longer than what is done with most nodes."""
        return list(ast.walk(self.tree))

    @cached_property
    def identifiers(self) -> frozenset[str]:
        return frozenset(_identifiers(self.nodes))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def is_package(self) -> bool:
        return self.name.endswith("__init__.py")

    @property
    def top(self) -> str:
        """Its top folder: "router", "alignedserve/gateway", or "alignedserve" for modules of its root."""
        first, *rest = self.name.split("/")
        return f"{first}/{rest[0]}" if first == PACKAGE and len(rest) > 1 else first

    @property
    def folder(self) -> str:
        """The package that it lies in. A module of the root stands for itself."""
        package = self.module if self.is_package else self.module.rpartition(".")[0]
        return self.module if package == PACKAGE else package


def product(root: Path = ROOT) -> list[Source]:
    # `rglob` does not follow links, so each file is found once.
    files = [path for folder in (PACKAGE, *BESIDE) for path in (root / folder).rglob("*.py")]
    return [_source(path.relative_to(root), path.read_text()) for path in sorted(files)]


def _source(path: Path, text: str) -> Source:
    parts = [*path.with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    return Source(str(path), ".".join(parts if parts[0] == PACKAGE else [PACKAGE, *parts]), text)


def _identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.ImportFrom(module=str(module)):
                yield module
