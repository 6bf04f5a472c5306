"""Acts as another user of the machine for a moment: `nobody`, in a child process. Requires root."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

NOBODY = 65534
IS_POSSIBLE = os.geteuid() == 0


def as_nobody(work: Callable[[], Any]) -> Any:
    """Returns the result of `work`, passed as JSON. `work` may only use the operating system, and only for some
    seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_nobody(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("what was to be done as another user failed")
    return json.loads(text)


def _be_nobody(work: Callable[[], Any], writing: int) -> None:
    """Does not return."""
    status = 1
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        text = json.dumps(work()).encode()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(text)
        status = 0
    finally:
        os._exit(status)
