"""What each measure counts, as a list of names: a figure is the length of its list."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.house.source import Source

# More parameters than this, without `self`, are too many.
MAX_PARAMETERS = 7
# Identifiers of the features that are to stand in few files (docs/glossary.md has them).
FEATURES = {
    "shared ends": r"share_blocks|shared_ends|SharedEnds|Shared_?End|(^|_)(lend|lends|lender|lenders|lent)(_|$)"
    r"|borrow|(is|has)_reversed|(?-i:^REVERSED$)|End_?Cop(y|ies)|copy_ends",
    "kept inputs": r"(keep|keeps|kept)_?inputs|hidden_cache|(?-i:^INPUTS$)|(num|max)_restored|restored_token",
    "role change": r"changes?_role|take_?role|role_?change|roles_that_change|first_role|changing_?(role|process|actor)"
    r"|SimChanging",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


# Terms of the arithmetic of KV blocks: columns, and those that a window has passed.
BLOCK_TERMS = re.compile(r"_?(block_size|num_columns|num_passed|num_full_groups|num_sliding_groups)")
# Functions whose arguments are computed with.
_COMPUTING = {"min", "max", "range", "sum", "divmod", "cdiv"}

# One of each kind of what is added often, and the number of files that it should touch.
SAMPLES = {
    "a metric": ("num_asked_tokens", 2),
    "an HTTP field": ("prompt_cache_key", 4),
    "a flag": ("pool_promised_share", 3),
    "a message": ("TakeRole", 3),
}


def functions(source: Source) -> Iterator[Function]:
    return (node for node in source.nodes if isinstance(node, Function))


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
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(source.name)
    return [f"{name}: {', '.join(places)}" for name, places in sorted(found.items()) if len(places) > 1]


def files_with_features(sources: Sequence[Source]) -> list[str]:
    """Returns the files whose identifiers name a feature."""
    patterns = {feature: re.compile(pattern, re.IGNORECASE) for feature, pattern in FEATURES.items()}
    found = []
    for source in sources:
        named = [name for name, pattern in patterns.items() if any(map(pattern.search, source.identifiers))]
        if named:
            found.append(f"{source.name}: {', '.join(named)}")
    return found


def files_naming_blocks(sources: Sequence[Source]) -> list[str]:
    """Returns the files whose identifiers include a term of block arithmetic."""
    return [source.name for source in sources if any(map(BLOCK_TERMS.fullmatch, source.identifiers))]


def files_with_block_arithmetic(sources: Sequence[Source]) -> list[str]:
    """Returns the files that compute or compare with such a term, or slice by it."""
    return [source.name for source in sources if any(map(_has_block_term, source.nodes))]


def _has_block_term(node: ast.AST) -> bool:
    return any(BLOCK_TERMS.fullmatch(_name_of(each)) for each in _operands(node))


def _operands(node: ast.AST) -> Sequence[ast.expr | None]:
    match node:
        case ast.BinOp(left=left, right=right):
            return left, right
        case ast.AugAssign(target=target, value=value):
            return target, value
        case ast.Compare(left=left, comparators=others):
            return left, *others
        case ast.Slice(lower=lower, upper=upper, step=step):
            return lower, upper, step
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _COMPUTING:
            return arguments
    return ()


def _name_of(node: ast.expr | None) -> str:
    """Returns the name of a variable, an attribute, or a function that is called."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return _name_of(function)
    return ""


def methods(sources: Sequence[Source], name: str) -> list[str]:
    """Returns the methods of the class with this name."""
    return [
        f"{source.name}:{child.lineno} {child.name}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and node.name == name
        for child in node.body
        if isinstance(child, Function)
    ]


def touched(sources: Sequence[Source], name: str) -> list[str]:
    """Returns the files that name it, in an identifier or a string. Imports don't count by themselves."""
    return [source.name for source in sources if name in {*source.identifiers, *_words(source.nodes)}]


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                yield text.removeprefix("--").replace("-", "_")
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def lines_of_folders(sources: Sequence[Source]) -> dict[str, int]:
    """Returns the lines of each top folder, the largest first."""
    found: Counter[str] = Counter()
    for source in sources:
        found[source.top] += source.num_lines
    return dict(found.most_common())
