"""Test processes forked from one that has imported what they run, so that they start in a moment.

There is one such process, which starts with the first of them. It imports the modules of all callers. If it only
imported the last caller's, all others would have to import theirs in every process that they start.

It finds these modules only if pytest was started in this repository's root. Elsewhere (`cd tests && pytest cluster`) it
imports none and prints nothing, and each process takes seconds to import them itself.

Its environment variables are those at its start, with the first test that forks. What a test sets later has to be an
argument of the process that it starts, as in tests/cli/forked.py.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_CONTEXT = multiprocessing.get_context("forkserver")
_modules: list[str] = []


def forking(module: str) -> ForkServerContext:
    """Returns a context for processes that have imported this module. Must be called when the module is imported."""
    _modules.append(module)
    _CONTEXT.set_forkserver_preload([*_modules])
    return _CONTEXT
