"""How far a long benchmark is, on stderr, beside its results on stdout."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress(total: int | None, unit: str) -> tqdm[Any]:
    """Its description says what takes the time at present, and is shown as soon as it is set."""
    return tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=0, file=sys.stderr)


def say(line: str) -> None:
    """A result, on stdout at once, and above the bar where both are one terminal."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
