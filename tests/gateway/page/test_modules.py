"""What the page's modules compute, in the browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.gateway.telemetry.metrics import FIRST_TOKEN_S, Histogram
from tests.gateway.page.browser import Browser
from tests.gateway.page.hosted import Hosted, hosted


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    with hosted() as found:
        yield found


@pytest.fixture(scope="module")
def page(chromium: Browser, host: Hosted) -> Iterator[Browser]:
    """Opened once: modules compute from what they are given."""
    chromium.open(host.url)
    yield chromium
    chromium.open("about:blank")


# ---- the state ----


@pytest.mark.parametrize(
    ("health", "text"),
    [
        ({"status": "ok"}, "● Ready"),
        ({"status": "degraded", "down": ["decode-0", "decode-1"]}, "◐ Degraded: decode-0, decode-1 down"),
        (
            {"status": "degraded", "missing": ["1 of 2 islands are there"]},
            "◐ Degraded: 1 of 2 islands are there",
        ),
        (
            {
                "status": "degraded",
                "down": ["decode-0"],
                "missing": ["1 of 2 islands are there", "node-1 is slow"],
            },
            "◐ Degraded: decode-0 down; 1 of 2 islands are there; node-1 is slow",
        ),
        ({"status": "degraded", "store": "down", "reason": "…"}, "◐ Degraded: the store down"),
        (
            {"status": "degraded", "down": ["decode-0"], "files": "down", "reason": "…"},
            "◐ Degraded: decode-0, the file storage down",
        ),
        ({"status": "unavailable", "reason": "the router is down"}, "✕ Unavailable: the router is down"),
    ],
)
def test_it_says_what_is_down(page: Browser, health: dict[str, Any], text: str) -> None:
    said = f"(m.showHealth({json.dumps(health)}), document.getElementById('state').textContent)"
    assert page.imported("state.js", said) == text


@pytest.mark.parametrize(
    ("health", "is_up"),
    [
        ({"status": "degraded", "down": ["decode-0"]}, True),
        ({"status": "unavailable", "reason": "the router is down"}, False),
        # Running requests finish, and the history shows them.
        ({"status": "unavailable", "reason": "this server is stopping"}, True),
    ],
)
def test_a_server_that_drains_is_up(page: Browser, health: dict[str, str], is_up: bool) -> None:
    assert page.imported("state.js", f"m.isUp({json.dumps(health)})") is is_up


# ---- metrics ----


def test_samples_are_those_that_prometheus_reads(page: Browser, host: Hosted) -> None:
    text = httpx2.get(f"{host.url}/metrics").text
    families = text_string_to_metric_families(text)
    read = [[each.name, each.labels, each.value] for family in families for each in family.samples]
    flat = "[...s.byName].flatMap(([name, all]) => all.map(({ labels, value }) => [name, labels, value]))"
    ours = page.imported("samples.js", f"((s) => {flat})(new m.Samples({json.dumps(text)}))")
    assert len(read) > 500 and by_name(ours) == by_name(read)


def by_name(samples: list[Any]) -> list[Any]:
    return sorted(samples, key=lambda sample: (sample[0], sorted(sample[1].items())))


def buckets(*values: float) -> str:
    histogram = Histogram(FIRST_TOKEN_S)
    for value in values:
        histogram.observe(value)
    pairs = [[bound, count] for bound, count in histogram.cumulative()]
    return f"{json.dumps(pairs)}.map(([b, n]) => [b === '+Inf' ? Infinity : Number(b), n])"


@pytest.mark.parametrize(
    ("q", "older", "newer", "expected"),
    [
        (0.5, (), (), None),
        (0.5, (0.3, 0.3), (0.3, 0.3), None),
        # in the middle of 0.02 to 0.04
        (0.5, (), (0.03, 0.03), 0.03),
        # what was before does not count
        (0.5, (0.3,) * 50, (0.3,) * 50 + (0.03, 0.03), 0.03),
        (0.99, (), (0.03,) * 50 + (0.6,) * 50, 0.745),
        # beyond all bounds: the last one
        (0.5, (), (9999.0,), 2560.0),
        (0.5, (), (0.0001,), 0.0005),
    ],
)
def test_quantiles_are_of_what_came_in_between(
    page: Browser, q: float, older: tuple[float, ...], newer: tuple[float, ...], expected: float | None
) -> None:
    found = page.imported("reading.js", f"m.quantile({q}, {buckets(*older)}, {buckets(*newer)})")
    assert found == (None if expected is None else pytest.approx(expected))


def test_rates_are_of_the_time_in_between_and_a_new_gateway_begins_anew(page: Browser) -> None:
    script = """((h) => {
      const reading = (atMs, tokens) => ({ atMs, rt: { tokens }, be: { tokens: 0 } });
      for (const [atMs, tokens] of %s) h.add(reading(atMs, tokens));
      return [h.readings.map((each) => each.atMs), h.since(5).atMs];
    })(new m.History())"""
    seconds = [[1000 * number, number] for number in range(10)]
    times = [at for at, _ in seconds]
    assert page.imported("history.js", script % seconds) == [times, 4000]
    # it was away, or the tab hidden
    assert page.imported("history.js", script % [*seconds, [100_000, 50]]) == [[*times, 100_000], 9000]
    assert page.imported("history.js", script % [*seconds, [10_000, 3]]) == [[10_000], 10_000]
    assert page.imported("history.js", script % [[0, 0], [200_000, 1], [400_000, 2]])[0] == [200_000, 400_000]


# ---- processes ----

ROUTER = {"instance_id": "router", "role": "router", "island": 0, "state": "up", "epoch": 1, "pid": 7}
DECODE = {"instance_id": "decode-0", "role": "decode", "island": 0, "state": "up", "epoch": 2, "pid": 8}
MISSED = DECODE | {"state": "down", "epoch": 0, "pid": 0}
AGAIN = DECODE | {"epoch": 3, "pid": 9}


def looked(page: Browser, *looks: list[dict[str, Any]] | None) -> tuple[dict[str, str], list[str]]:
    """States in the end, and what is said of it, a look a second."""
    script = f"""((c) => {{
      const found = {json.dumps(looks)}.map((processes, index) => c.look(processes, index * 1000)).at(-1);
      return [Object.fromEntries(found.map((p) => [p.instance_id, `${{p.state}} ${{p.pid}}`])),
              c.events.map((event) => event.text).reverse()];
    }})(new m.Changes())"""
    states, events = page.imported("changes.js", script)
    return states, events


def test_a_process_that_dies_and_comes_back_is_told_of(page: Browser) -> None:
    both = [ROUTER, DECODE]
    assert looked(page, both, both) == ({"router": "up 7", "decode-0": "up 8"}, [])
    down = "decode-0 (pid 8) is down"
    assert looked(page, both, [ROUTER, MISSED], [ROUTER, MISSED]) == (
        {"router": "up 7", "decode-0": "down 8"},
        [down],
    )
    assert looked(page, both, [ROUTER, MISSED], [ROUTER, MISSED], [ROUTER, AGAIN]) == (
        {"router": "up 7", "decode-0": "up 9"},
        [down, "decode-0 is back as pid 9, after 2.0 s"],
    )
    # between two looks
    assert looked(page, both, [ROUTER, AGAIN])[1] == ["decode-0 is back as pid 9"]


def test_of_an_island_without_a_router_nothing_is_known(page: Browser) -> None:
    both = [ROUTER, DECODE]
    gone = "router (pid 7) does not answer"
    assert looked(page, both, None, None) == ({"router": "unknown 7", "decode-0": "unknown 8"}, [gone])
    assert looked(page, both, None, both)[1] == [gone, "router (pid 7) answers again, after 1.0 s"]
    new = [ROUTER | {"epoch": 5, "pid": 6}, DECODE]
    assert looked(page, both, None, new)[1] == [gone, "router is back as pid 6, after 1.0 s"]
    other = [each | {"island": 1, "instance_id": f"{each['instance_id']}-b"} for each in both]
    states, events = looked(page, both + other, both)
    assert states["router"] == "up 7" and states["decode-0-b"] == "unknown 8"
    assert events == ["router (pid 7) does not answer, island 1"]


def test_a_histogram_is_that_of_all_gateways(page: Browser) -> None:
    lines = [
        f'alignedserve:wait_bucket{{gateway="gateway-{number}",le="{bound}",tier="rt"}} {count}'
        for number in (0, 1)
        for bound, count in (("0.5", 2.0 + number), ("+Inf", 5.0 + number))
    ]
    text = json.dumps("\n".join(lines))
    found = page.imported("samples.js", f"new m.Samples({text}).buckets('wait', {{tier: 'rt'}}).map(String)")
    assert found == ["0.5,5", "Infinity,11"]
