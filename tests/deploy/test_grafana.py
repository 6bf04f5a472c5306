"""The dashboard, the alert rules, the metrics' page and what a gateway exposes agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.observed import observed
from tests.gateway.served import play
from tests.gateway.telemetry.test_metrics import KnowingRouter

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/alignedserve.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
PAGE = ROOT / "docs/reference/metrics.md"
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


def test_the_page_lists_what_there_is_and_the_dashboard_shows_it() -> None:
    listed = dict(rows())
    assert set(listed) == types()
    asked = {whole(name) for expression, _ in expressions() for name in METRIC.findall(expression)}
    assert asked == set(listed)


def test_there_is_a_rule_for_each_alert_of_the_page() -> None:
    """And no other. Rules ask for labels that there are."""
    found = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in found}) == len(found)
    known = exposed() | {"alignedserve:batch_jobs": {"status"}}
    for rule in found:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        expression = rule["expr"]
        assert expression.count("(") == expression.count(")")
        for name, matched in re.findall(r"(alignedserve:\w+)(\{[^}]*\})?", expression):
            assert not set(re.findall(r"(\w+)=", matched)) - known[name], rule
    names = {whole(name) for rule in found for name in METRIC.findall(rule["expr"])}
    assert names == {name for name, alert in rows() if alert}


def rows() -> Iterator[tuple[str, str]]:
    """(name, when to alert) of the page's tables"""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found := re.fullmatch(r"`(alignedserve:\w+)`", cells[0]):
            yield found[1], cells[-1]


def types() -> set[str]:
    """The names of all families."""
    found: list[str] = []

    async def scenario() -> None:
        async with observed(KnowingRouter()) as at:
            found.extend(re.findall(r"^# TYPE (\S+)", (await at.http.get("/metrics")).text, re.MULTILINE))

    play(scenario)
    return set(found)


def whole(name: str) -> str:
    """The name of a histogram without the end of its samples."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [cell for panel in panels for cell in cells_of(panel["gridPos"])]
    assert len(cells) == len(set(cells))


def cells_of(at: dict[str, int]) -> list[tuple[int, int]]:
    return [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
