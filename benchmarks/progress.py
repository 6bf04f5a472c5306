"""Shows the progress of a long benchmark on stderr, beside its results on stdout."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress(total: int | None, unit: str) -> tqdm[Any]:
    """Returns a bar. Its description names the current work, and is shown as soon as it is set."""
    return tqdm(total=total, unit=unit, dynamic_ncols=True, mininterval=0, file=sys.stderr)


def say(line: str) -> None:
    """Prints a result on stdout immediately, above the bar if both are on one terminal."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
