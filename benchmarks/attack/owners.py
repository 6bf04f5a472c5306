"""One key's many choices against another key's short calls, at a running server with two API keys:

    python -m benchmarks.attack.owners http://127.0.0.1:8000 KEY_OF_ATTACKER OTHER_KEY

Twenty calls of 256 choices are open for some seconds, again and again as they are refused or end, and then hang up. The
other key calls for eight tokens before, during and after that, one call after another.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx2

COMPLETIONS = "/v1/completions"
FLOOD = {"prompt": "once upon a time", "n": 256, "max_tokens": 400, "ignore_eos": True}
SHORT = {"prompt": "hello there", "max_tokens": 8, "ignore_eos": True, "stream": True}
NUM_CALLS, NUM_SHORT = 20, 20
ATTACK_S, PATIENCE_S = 10.0, 60.0
# The first token may take this many times as long as alone, or this many seconds, while one machine does all.
MOST_TIMES, MOST_S = 8.0, 1.0


@dataclass
class Answers:
    """The other key's calls: seconds to the first token and to the end of those with an answer, and all outcomes."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        if not self.first_s:
            return f"no answer; {dict(self.outcomes)}"
        first_s, whole_s = median(self.first_s), median(self.whole_s)
        return (
            f"{len(self.first_s)} answers, first token {1000 * first_s:.0f} ms, "
            f"at most {1000 * max(self.first_s):.0f} ms, whole {1000 * whole_s:.0f} ms; {dict(self.outcomes)}"
        )


async def ask(http: httpx2.AsyncClient, key: str, answers: Answers) -> None:
    """Makes one short call as a stream."""
    begun_s, first_s = time.monotonic(), None
    try:
        async with http.stream("POST", COMPLETIONS, json=SHORT, headers=_headers(key)) as response:
            async for line in response.aiter_lines():
                if first_s is None and line.startswith("data: {") and "choices" in line:
                    first_s = time.monotonic() - begun_s
        answers.outcomes[str(response.status_code)] += 1
    except httpx2.HTTPError as error:
        answers.outcomes[type(error).__name__] += 1
        return
    if response.status_code == 200 and first_s is not None:
        answers.first_s.append(first_s)
        answers.whole_s.append(time.monotonic() - begun_s)


async def ask_for(http: httpx2.AsyncClient, key: str, seconds: float, most: int = NUM_SHORT) -> Answers:
    """Makes short calls one after another, until the seconds are over or there were `most`."""
    answers, end_s = Answers(), time.monotonic() + seconds
    while time.monotonic() < end_s and answers.outcomes.total() < most:
        await ask(http, key, answers)
        await asyncio.sleep(0.1)
    return answers


async def flood(http: httpx2.AsyncClient, key: str, statuses: Counter[int]) -> None:
    """Makes calls of many choices until it is cancelled, which hangs up."""
    while True:
        with suppress(httpx2.HTTPError):
            response = await http.post(COMPLETIONS, json=FLOOD, headers=_headers(key))
            statuses[response.status_code] += 1
        await asyncio.sleep(0.2)


async def attack(url: str, attacker: str, other: str) -> dict[str, Any]:
    """Returns the other key's answers before and during the attack and after it, and what the attacker got."""
    limits = httpx2.Limits(max_connections=2 * NUM_CALLS)
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        before = await ask_for(http, other, PATIENCE_S)
        statuses: Counter[int] = Counter()
        calls = [asyncio.create_task(flood(http, attacker, statuses)) for _ in range(NUM_CALLS)]
        await asyncio.sleep(1.0)
        during = await ask_for(http, other, ATTACK_S, most=10**6)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        first = await ask_for(http, other, PATIENCE_S, most=1)
        after = await ask_for(http, other, PATIENCE_S)
    return {
        "before": before,
        "during": during,
        "first after hanging up": first,
        "after": after,
        "attacker's statuses": statuses,
    }


def has_held(found: dict[str, Any]) -> bool:
    """Returns whether all of the other key's calls were answered, and about as soon as before."""
    most_s = max(MOST_TIMES * median(found["before"].first_s), MOST_S)
    all_of_them = [each for each in found.values() if isinstance(each, Answers)]
    return all(
        each.outcomes.keys() <= {"200"} and each.first_s and median(each.first_s) <= most_s
        for each in all_of_them
    )


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def main() -> None:
    url, attacker, other = sys.argv[1:4]
    found = await attack(url, attacker, other)
    for name, answers in found.items():
        print(f"{name}: {answers if isinstance(answers, Answers) else json.dumps(dict(answers))}")
    print("held" if has_held(found) else "BROKEN")


if __name__ == "__main__":
    asyncio.run(main())
