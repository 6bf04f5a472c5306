"""Processes that tests start are forked from one that has imported what they run: they are up in a moment.

There is one such process, which starts with the first of them. It imports the modules of all who fork: the last one to
name its own would otherwise leave all others to import theirs in every process that they start.

It finds these modules only if pytest was started in the root of this repository. Elsewhere (`cd tests && pytest
cluster`) it imports none and prints nothing, and each process takes seconds to import them itself.

Its environment variables are those of the moment when it starts, with the first test that forks. What a test sets later
has to be an argument of the process that it starts, as in tests/cli/forked.py.
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
