"""Every metric that the dashboard asks for exists, with the labels that it is asked by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.gateway.telemetry.exposition import HISTOGRAMS, INSTANCE_COUNTERS
from tests.gateway.observed import observed
from tests.gateway.served import play
from tests.gateway.telemetry.test_metrics import KnowingRouter

DASHBOARD = Path(__file__).parent.parent.parent / "deploy/grafana/alignedserve.json"
METRIC = re.compile(r"alignedserve:\w+")
# asked for by a whole expression; `le` is the histogram's own
LABELS = re.compile(r"by \(([^)]*)\)|\{\{(\w+)\}\}")


def expressions() -> Iterator[tuple[str, str]]:
    """(expression, legend)"""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]


def exposed() -> dict[str, set[str]]:
    """Name of a sample -> its labels. Of families without samples the name is all there is."""
    found: dict[str, set[str]] = {}

    async def scenario() -> None:
        async with observed(KnowingRouter()) as at:
            for family in text_string_to_metric_families((await at.http.get("/metrics")).text):
                found.setdefault(family.name, set())
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)

    play(scenario)
    return found


def test_the_dashboard_asks_for_what_there_is() -> None:
    known = exposed() | {"alignedserve:batch_jobs": {"status"}}
    for expression, legend in expressions():
        names = METRIC.findall(expression)
        assert names, expression
        assert not set(names) - known.keys(), expression
        wanted = {
            label.strip()
            for group in LABELS.findall(f"{expression} {legend}")
            for label in "".join(group).split(",")
        }
        for name in names:
            assert not wanted - known[name], f"{name} has {known[name]}, asked by {wanted}"


def test_the_dashboard_leaves_nothing_out() -> None:
    asked = {name for expression, _ in expressions() for name in METRIC.findall(expression)}
    missing = [
        name for name in HISTOGRAMS if not any(each.startswith(f"alignedserve:{name}") for each in asked)
    ]
    missing += [name for name in INSTANCE_COUNTERS if f"alignedserve:{name}_total" not in asked]
    assert not missing


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [cell for panel in panels for cell in cells_of(panel["gridPos"])]
    assert len(cells) == len(set(cells))


def cells_of(at: dict[str, int]) -> list[tuple[int, int]]:
    return [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
