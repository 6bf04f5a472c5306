"""A test of live processes that fails runs once more, on processes of its own, and the run's last lines name it.

The second run itself is pytest-rerunfailures'.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test


def allow(items: Collection[pytest.Item], live: Collection[Path]) -> None:
    """To tests in these files and folders: not to property tests, which look for what fails rarely, and not under a
    debugger, which shows the first failure. A test with a `flaky` marker of its own keeps that."""
    for item in items:
        if (
            any(item.path.is_relative_to(path) for path in live)
            and not item.config.option.usepdb
            and not is_hypothesis_test(getattr(item, "obj", None))
            and item.get_closest_marker("flaky") is None
        ):
            item.add_marker(pytest.mark.flaky(reruns=1))


def end_spoilt_fixtures(item: pytest.Item) -> None:
    """Before a second run: what a module's tests share, such as a cluster, is made anew, since the failure may have
    left it with a process too few. Its end may fail for the same reason, which is shown if the second run fails."""
    if getattr(item, "execution_count", 1) == 1:
        return
    for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
        for definition in definitions:
            if definition.scope in ("class", "module"):
                try:
                    definition.finish(item._request)  # type: ignore[attr-defined]
                except (Exception, pytest.fail.Exception) as error:
                    print(f"after the first run, the end of {definition.argname} failed: {error!r}")


def tell(reporter: pytest.TerminalReporter) -> None:
    """Each test that passed only on its second run, and how the first one failed."""
    failed = {report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, [])}
    firsts: dict[str, pytest.TestReport] = {}
    for each in reporter.stats.get("rerun", []):
        if each.nodeid not in failed:
            # The end of its fixtures may have failed as well, later.
            firsts.setdefault(each.nodeid, each)
    if not firsts:
        return
    reporter.section("flaky", yellow=True)
    for first in firsts.values():
        reporter.line(first.longreprtext)
    for name in firsts:
        reporter.line(f"FLAKY {name} passed only on its second run", yellow=True)
    reporter.line(f"{len(firsts)} flaky", yellow=True)
