"""Triton's interpreter without the work that it does again and again, which is three quarters of what tests wait for.

A kernel calls functions, and the interpreter prepares the language for each such call, though its launch has done so.
It compares each sum and product of integers with the same in 64 bits, and then its assertions are off.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def quickened() -> Iterator[None]:
    """Results and errors stay as they are."""
    if find_spec("triton") is None:
        yield
        return
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    assert not interpreter.interpreter_builder.options.debug, "assertions would be on"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *args: None)
        keep_types(patch, interpreter)
        prepare_once_a_launch(patch, interpreter)
        yield


def keep_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """NumPy's type of each of the language's is looked up once."""
    language, look_up = interpreter.tl, interpreter._get_np_dtype
    look_up_once = functools.cache(look_up)

    def type_of(kind: Any) -> Any:
        if isinstance(kind, language.block_type):
            kind = kind.element_ty
        return look_up(kind) if isinstance(kind, language.pointer_type) else look_up_once(kind)

    patch.setattr(interpreter, "_get_np_dtype", type_of)


def prepare_once_a_launch(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[frozenset[str]] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[str]:
        """The names of the modules of the language that a function's file has."""
        language = (interpreter.tl, interpreter.tl.core)
        modules = [each for each in function.__globals__.values() if isinstance(each, ModuleType)]
        return frozenset(each.__name__ for each in modules if each in language)

    def prepare_once(function: Any) -> Any:
        if (modules := modules_of(function)) in prepared:
            return None
        prepared.add(modules)
        return prepare(function)

    def launch_from_the_beginning(self: Any, *args: Any, **options: Any) -> None:
        prepared.clear()
        launch(self, *args, **options)

    patch.setattr(interpreter, "_patch_lang", prepare_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_from_the_beginning)
