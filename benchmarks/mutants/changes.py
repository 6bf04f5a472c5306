"""Finds every change of one place in a file's functions that someone might make by mistake.

It changes comparisons, `and`, `or`, `not`, constants, arithmetic, `min` and `max`, slices, conditions and results, and
leaves out statements. It changes only what decides: not names, texts, log calls, error messages, `assert`, annotations
or default values. It also leaves code outside functions as it is, because that code is settings.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import TypeVar

from benchmarks.mutants.edit import Edit

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLED = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "popleft": "pop",
    "appendleft": "append",
    "bisect_left": "bisect_right",
    "bisect_right": "bisect_left",
}
# These objects' methods only inform an operator.
_TELLING = ("log", "logger", "_log", "_logger", "logging", "warnings", "print")
# Functions that only describe an object to a reader.
_TOLD = ("__repr__", "__str__")

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_NodeT = TypeVar("_NodeT", bound=ast.AST)


def changes(file: str, text: str) -> list[Edit]:
    """Returns the changes in the order of the lines. A few of them have no effect: see `is_different`."""
    found: list[Edit] = []
    numbers: Counter[tuple[str, str, str]] = Counter()
    for function, statement, node, new in _found(ast.parse(text)):
        old = ast.unparse(node)
        if old == new:
            continue
        number = numbers[function, old, new]
        numbers[function, old, new] += 1
        found.append(
            Edit(file, statement.lineno, *_span(node), isinstance(node, ast.expr), old, new, function, number)
        )
    return found


def _span(node: ast.expr | ast.stmt) -> tuple[int, int, int, int]:
    """Returns the first line and column, the last line and the column after the end."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def is_different(text: str, edit: Edit) -> bool:
    """Returns whether the changed text compiles, and to different code than the text."""
    try:
        changed = compile(edit.applied(text), edit.file, "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return _essence(changed) != _essence(compile(text, edit.file, "exec", dont_inherit=True))


def _essence(code: object) -> object:
    """Returns what a code object does, without its position."""
    if not isinstance(code, CodeType):
        return (type(code), repr(code))
    return (code.co_code, code.co_names, code.co_varnames, tuple(_essence(each) for each in code.co_consts))


# Function, innermost statement, node, and the code that replaces the node.
_Found = tuple[str, ast.stmt, ast.expr | ast.stmt, str]


def _found(tree: ast.Module) -> Iterator[_Found]:
    for name, function in _functions(tree, ""):
        if function.name in _TOLD:
            continue
        for statement in function.body:
            yield from _in_statement(name, function, statement)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Function]]:
    """A function nested in another belongs to the outer function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" not in ast.unparse(child.test):
            yield from _functions(child, prefix)


def _in_statement(name: str, function: _Function, statement: ast.stmt) -> Iterator[_Found]:
    if isinstance(
        statement, ast.Assert | ast.Import | ast.ImportFrom | ast.ClassDef | ast.Global | ast.Nonlocal
    ):
        return
    if isinstance(statement, ast.Expr) and (
        isinstance(statement.value, ast.Constant) or _tells(statement.value)
    ):
        return
    for node, new in _of_statement(function, statement):
        yield name, statement, node, new
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "decorator_list", "args", "returns", "target", "targets") or isinstance(
            statement, ast.Raise
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.stmt):
                inner = statement if isinstance(statement, _Function) else function
                yield from _in_statement(name, inner, child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                for each in child.body:
                    yield from _in_statement(name, function, each)
                if isinstance(child, ast.match_case) and child.guard:
                    yield from ((name, statement, *pair) for pair in _in_expression(child.guard))
            elif isinstance(child, ast.withitem):
                yield from ((name, statement, *pair) for pair in _in_expression(child.context_expr))
            elif isinstance(child, ast.expr):
                yield from ((name, statement, *pair) for pair in _in_expression(child))


def _of_statement(function: _Function, statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield statement, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield statement, "pass"
        case ast.Continue() | ast.Break() | ast.Return(value=None):
            yield statement, "pass"
        case ast.Return(value=ast.expr() as value):
            if isinstance(function.returns, ast.Name) and function.returns.id == "bool":
                yield value, ast.unparse(ast.UnaryOp(ast.Not(), value))
            elif not (isinstance(value, ast.Constant) and value.value is None):
                yield value, "None"
        case ast.If(test=test):
            yield test, ast.unparse(ast.UnaryOp(ast.Not(), test))
        case ast.While(test=ast.expr() as test) if not isinstance(test, ast.Constant):
            yield test, "False"
        case ast.For(iter=iterated):
            yield iterated, "()"
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _COMPUTED:
        changed = _with(statement, op=_COMPUTED[type(statement.op)]())
        yield statement, ast.unparse(changed)


def _in_expression(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yields the changes of an expression and all its parts."""
    if isinstance(node, ast.JoinedStr) or _tells(node):
        return
    if isinstance(node, ast.expr):
        for new in _of_expression(node):
            yield node, new
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Lambda) and isinstance(child, ast.arguments)):
            yield from _in_expression(child)


def _of_expression(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]):
            for other in _COMPARED[type(op)]:
                yield ast.unparse(_with(node, ops=[other()]))
        case ast.Compare(ops=[first, *rest]):
            for other in _COMPARED[type(first)][:1]:
                yield ast.unparse(_with(node, ops=[other(), *rest]))
        case ast.BoolOp(op=op, values=values):
            yield ast.unparse(_with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And()))
            for left_out in range(len(values)):
                kept = [each for at, each in enumerate(values) if at != left_out]
                yield ast.unparse(kept[0] if len(kept) == 1 else _with(node, values=kept))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield ast.unparse(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _COMPUTED and not (
            _is_text(left) or _is_text(right)
        ):
            yield ast.unparse(_with(node, op=_COMPUTED[type(op)]()))
        case ast.IfExp(body=body, orelse=orelse):
            yield ast.unparse(body)
            yield ast.unparse(orelse)
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() as value):
            yield repr(value + 1)
            if value:
                yield repr(value - 1)
        case ast.Constant(value=float() as value):
            yield repr(value * 2 if value else 1.0)
        case ast.Call(func=ast.Name(id=called)) if called in _CALLED:
            yield ast.unparse(_with(node, func=ast.Name(_CALLED[called])))
        case ast.Call(func=ast.Attribute(value=owner, attr=called)) if called in _CALLED:
            yield ast.unparse(_with(node, func=ast.Attribute(owner, _CALLED[called])))
        case ast.Call(args=[ast.Name() as one, ast.Name() as other], keywords=[]):
            yield ast.unparse(_with(node, args=[other, one]))
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper) as part):
            if lower:
                yield ast.unparse(_with(node, slice=_with(part, lower=None)))
            if upper:
                yield ast.unparse(_with(node, slice=_with(part, upper=None)))
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for at, generator in enumerate(node.generators):
                if generator.ifs:
                    generators = [*node.generators]
                    generators[at] = _with(generator, ifs=[])
                    yield ast.unparse(_with(node, generators=generators))


def _with(node: _NodeT, **fields: object) -> _NodeT:
    """Returns a copy with some fields changed."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _tells(node: ast.AST) -> bool:
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return False
    called: ast.expr = node.func
    names = []
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    return (isinstance(called, ast.Name) and called.id in _TELLING) or any(name in _TELLING for name in names)
