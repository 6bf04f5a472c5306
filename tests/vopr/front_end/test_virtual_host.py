"""Nothing that runs in virtual time asks for the time by reference, which the virtual host could not answer."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUNS = ("gateway", "batch", "store", "router", "protocol", "process", "lengths", "text")
# A default is taken when the class is made, before any run begins.
BY_REFERENCE = re.compile(r"from time import|=\s*time\.(monotonic|time)\b(?!\()|from secrets import")


def test_nothing_asks_for_the_time_by_reference() -> None:
    paths = [path for name in RUNS for path in (ROOT / "alignedserve" / name).rglob("*.py")]
    assert paths
    found = [path.name for path in paths if BY_REFERENCE.search(path.read_text())]
    # The telemetry of a real process (OpenTelemetry) does not run there.
    assert found == []
