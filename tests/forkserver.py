"""Processes that tests start are forked from one that has imported what they run: they are up in a moment.

There is one such process, which starts with the first of them. It imports the modules of all who fork: the last one to
name its own would otherwise leave all others to import theirs in every process that they start.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_CONTEXT = multiprocessing.get_context("forkserver")
_modules: list[str] = []


def forking(module: str) -> ForkServerContext:
    """Starts processes that have imported this module. It is called when the module is imported."""
    _modules.append(module)
    _CONTEXT.set_forkserver_preload([*_modules])
    return _CONTEXT
