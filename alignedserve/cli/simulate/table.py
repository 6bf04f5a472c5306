"""The rows of a comparison as tables for humans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alignedserve.cli.simulate.compare import Row
from alignedserve.cli.simulate.trial import TrialOutcome
from alignedserve.sim.host_links import LinkUse

_WHO = ("policy", "prefill", "decode")
_REAL_TIME = ("requests/s", "requests", "in time", "TTFT p50", "TTFT p99", "gap p50", "gap p99", "tokens/s")
_OBJECTIVES = ("gap, at most", "requests", "in time")
_BEST_EFFORT = ("answered", "TTFT p50", "answer p50, s", "answer p99, s", "tokens/s", "jobs in time")
_INSTANCES = ("prefill busy", "decode busy", "batch", "batches", "mixed", "scheduled in 5 ms", "interrupted")
_MEMORY = ("pool, at most", "evicted", "evicted, GB", "dropped", "overwritten, GB")
_PREFIXES = ("prompt tokens reused",)
_LINKS = ("link", "busy", "slows", "GB")


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yields lines."""
    done = [(row, row.outcome) for row in rows if row.outcome]
    if any(row.outcome is None or row.outcome.mixture.rt.num_requests for row in rows):
        yield from _table(
            "Real time (times in ms)", _REAL_TIME, [_who(row) + _real_time(row) for row in rows]
        )
    by_objective = [_who(row) + each for row, outcome in done for each in _objectives(outcome)]
    if by_objective:
        yield from _table("Real time, by TBT objective", _OBJECTIVES, by_objective)
    if any(outcome.mixture.be.num_requests for _, outcome in done):
        yield from _table("Best effort", _BEST_EFFORT, [_who(row) + _best_effort(each) for row, each in done])
    if done:
        yield from _table("Instances", _INSTANCES, [_who(row) + _instances(row, each) for row, each in done])
        yield from _table("Memory", _MEMORY, [_who(row) + _memory(each) for row, each in done])
        reused = [(row, each.reused) for row, each in done if each.reused is not None]
        if reused:
            yield from _table("Prefixes", _PREFIXES, [[*_who(row), _percent(share)] for row, share in reused])
        crossed = [_who(row) + _link(use) for row, each in done for use in each.links]
        if crossed:
            yield from _table("Links", _LINKS, crossed)


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each problem of a run."""
    for row in rows:
        if row.outcome is None:
            yield f"{row.setting}: too few are in time even at {row.tried[-1][0]:g} requests/s"
            continue
        if row.outcome.num_refused:
            yield f"{row.setting}: {row.outcome.num_refused} requests were refused (too many waited)"
        if row.outcome.num_open:
            yield (
                f"{row.setting}: {row.outcome.num_open} requests were still open an hour after the last arrival: "
                "the load exceeds the capacity"
            )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    names = (*_WHO, *columns)
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    yield ""
    yield title
    yield ""
    yield _line(names, widths)
    yield _line(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], widths)
    for row in rows:
        yield _line(row, widths)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join((first, *others))} |"


def _who(row: Row) -> list[str]:
    setting = row.setting
    if setting.num_colocated:
        return [setting.policy, "-", f"{setting.num_colocated} colocated"]
    return [setting.policy, str(setting.num_prefill), str(setting.num_decode)]


def _real_time(row: Row) -> list[str]:
    rate = "-" if row.request_rate is None else f"{row.request_rate:.3g}"
    if row.outcome is None:
        return [rate, *["-"] * 7]
    rt = row.outcome.mixture.rt
    if not rt.num_requests:
        return [rate, "0", *["-"] * 6]
    times_s = (rt.ttft_s.p50, rt.ttft_s.p99, rt.gap_s.p50, rt.gap_s.p99)
    return [
        rate,
        str(rt.num_requests),
        _percent(rt.attainment),
        *(f"{1000 * time_s:.1f}" for time_s in times_s),
        f"{rt.tokens_per_s:.0f}",
    ]


def _objectives(outcome: TrialOutcome) -> Iterator[list[str]]:
    for tbt_s, (num_requests, attainment) in outcome.mixture.rt.by_objective.items():
        yield [f"{1000 * tbt_s:g} ms", str(num_requests), _percent(attainment)]


def _best_effort(outcome: TrialOutcome) -> list[str]:
    be, answered_s, ttft_s = outcome.mixture.be, outcome.be_answered_s, outcome.be_ttft_s
    return [
        str(outcome.num_be_complete),
        f"{1000 * ttft_s.p50:.1f}" if ttft_s else "-",
        f"{answered_s.p50:.1f}" if answered_s else "-",
        f"{answered_s.p99:.1f}" if answered_s else "-",
        f"{be.tokens_per_s:.0f}",
        "-" if be.jobs_kept is None else _percent(be.jobs_kept),
    ]


def _instances(row: Row, outcome: TrialOutcome) -> list[str]:
    return [
        "-" if row.setting.num_colocated else _percent(outcome.prefill_busy),
        _percent(outcome.mixture.busy),
        f"{outcome.mean_batch:.1f}",
        str(outcome.num_batches) if outcome.num_batches else "-",
        "-" if outcome.mixed is None else _percent(outcome.mixed),
        _percent(outcome.scheduled_soon),
        str(outcome.mixture.num_interrupted),
    ]


def _memory(outcome: TrialOutcome) -> list[str]:
    found = outcome.mixture
    return [
        _percent(outcome.pool_peak),
        str(found.num_evicted),
        f"{found.moved_bytes / 1e9:.1f}",
        str(found.num_dropped),
        f"{found.overwritten_bytes / 1e9:.2f}",
    ]


def _link(use: LinkUse) -> list[str]:
    return [use.name, _percent(use.busy), _percent(use.slowing), f"{use.num_bytes / 1e9:.1f}"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
