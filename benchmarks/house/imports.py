"""Which modules and folders import each other in a ring."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks.house.source import PACKAGE, Source

Graph = Mapping[str, set[str]]


def hard_imports(sources: Sequence[Source]) -> Graph:
    """Returns the modules that each module imports when it is loaded."""
    return _graph(sources, lambda source: _loaded(source.tree))


def all_imports(sources: Sequence[Source]) -> Graph:
    """Returns what each module imports anywhere: in functions, and for types too."""
    return _graph(sources, lambda source: source.nodes)


def between_folders(sources: Sequence[Source], imports: Graph) -> Graph:
    folder_of = {source.module: source.folder for source in sources}
    found: dict[str, set[str]] = defaultdict(set)
    for module, names in imports.items():
        found[folder_of[module]] |= {folder_of[name] for name in names} - {folder_of[module]}
    return found


def rings(graph: Graph) -> list[str]:
    """Returns each largest set of nodes that reach each other, as text."""
    found, reached = [], set[str]()
    back: dict[str, set[str]] = defaultdict(set)
    for node, names in graph.items():
        for name in names:
            back[name].add(node)
    # Kosaraju: the last that is left in the graph is reached by all that reach it in the reversed graph.
    for node in reversed(_in_order_of_leaving(graph)):
        if node not in reached:
            ring = _reach(back, node, reached)
            if len(ring) > 1:
                found.append(", ".join(sorted(ring)))
    return sorted(found)


def _in_order_of_leaving(graph: Graph) -> list[str]:
    order, entered = [], set[str]()
    for root in graph:
        stack = [(root, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                order.append(node)
            elif node not in entered:
                entered.add(node)
                stack.append((node, True))
                stack += [(name, False) for name in sorted(graph.get(node, ()))]
    return order


def _reach(graph: Graph, first: str, reached: set[str]) -> list[str]:
    """Returns the nodes that `first` reaches, and adds them to `reached`."""
    found, stack = [], [first]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            found.append(node)
            stack += graph.get(node, ())
    return found


def _graph(sources: Sequence[Source], nodes_of: Callable[[Source], Iterable[ast.AST]]) -> Graph:
    modules = {source.module for source in sources}
    return {
        source.module: {name for node in nodes_of(source) for name in _imported(node, modules)}
        - {source.module}
        for source in sources
    }


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs when the module is loaded."""
    for child in ast.iter_child_nodes(node):
        is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not is_later and not _is_for_types(child):
            yield child
            yield from _loaded(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imported(node: ast.AST, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in modules:
                yield inner
            elif node.module in modules:
                yield node.module
