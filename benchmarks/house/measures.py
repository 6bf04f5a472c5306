"""What each measure counts, as a list of names: a figure is the length of its list."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.house.source import Source

# More parameters than this, without `self`, are too many.
MAX_PARAMETERS = 7
# Identifiers of the features that are to stand in few files (docs/glossary.md has them).
FEATURES = {
    "shared ends": r"share_blocks|shared_ends|SharedEnds|Shared_?End|(^|_)(lend|lends|lender|lenders|lent)(_|$)"
    r"|borrow|(is|has)_reversed",
    "kept inputs": r"(keep|keeps|kept)_?inputs|hidden_cache|is_inputs|(num|max)_restored|restored_token",
    "role change": r"changes?_role|take_?role|role_?change|roles_that_change|first_role|changing_?(role|process|actor)"
    r"|SimChanging",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


# One of each kind of what is added often, and the number of files that it should touch.
SAMPLES = {
    "a metric": ("num_asked_tokens", 2),
    "an HTTP field": ("prompt_cache_key", 4),
    "a flag": ("pool_promised_share", 3),
    "a message": ("TakeRole", 3),
}


def functions(source: Source) -> Iterator[Function]:
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def p95_lines(sources: Sequence[Source]) -> int:
    """Returns the length in lines that 95 % of all functions do not exceed."""
    lengths = sorted(_num_lines(each) for source in sources for each in functions(source))
    return lengths[int(0.95 * (len(lengths) - 1))]


def _num_lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def wide_functions(sources: Sequence[Source]) -> list[str]:
    """Returns the functions with too many parameters."""
    return [
        f"{source.name}:{node.lineno} {node.name} {count}"
        for source in sources
        for node in functions(source)
        if (count := _num_parameters(node)) > MAX_PARAMETERS
    ]


def _num_parameters(node: Function) -> int:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    has_self = bool(positional) and positional[0].arg in ("self", "cls")
    return len(positional) + len(arguments.kwonlyargs) - has_self


def repeated_class_names(sources: Sequence[Source]) -> list[str]:
    """Returns the class names that more than one class has."""
    found = defaultdict(list)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.name)
    return [f"{name}: {', '.join(places)}" for name, places in sorted(found.items()) if len(places) > 1]


def files_with_features(sources: Sequence[Source]) -> list[str]:
    """Returns the files whose identifiers name a feature."""
    patterns = {feature: re.compile(pattern, re.IGNORECASE) for feature, pattern in FEATURES.items()}
    found = []
    for source in sources:
        names = set(_identifiers(source.tree))
        named = [feature for feature, pattern in patterns.items() if any(map(pattern.search, names))]
        if named:
            found.append(f"{source.name}: {', '.join(named)}")
    return found


def touched(sources: Sequence[Source], name: str) -> list[str]:
    """Returns the files that name it, in an identifier or a string. Imports don't count by themselves."""
    return [source.name for source in sources if name in {*_identifiers(source.tree), *_words(source.tree)}]


def _words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield text.removeprefix("--").replace("-", "_")
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.ImportFrom(module=str(module)):
                yield module


def lines_of_folders(sources: Sequence[Source]) -> dict[str, int]:
    """Returns the lines of each top folder, the largest first."""
    found: Counter[str] = Counter()
    for source in sources:
        found[source.top] += source.num_lines
    return dict(found.most_common())
