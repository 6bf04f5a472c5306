"""How long after an answer the next turn of its chat comes. An answer that called a tool is followed by the tool's
result, and any other one by a person.

Everything is remembered by owner, so that no key's calls change what another key is promised. When too much is, the
owner with most answers loses its oldest one.

Answers are recognised by the hash of their last block, which the next turn's prompt has too. An answer is remembered
even if the pool has dropped it, because times would otherwise be learned from early turns only. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

# What an answer awaits, and the seconds that are assumed until a few of these waits have ended.
PRIOR_S = {"tool": 10.0, "user": 30.0}
FEW = 8
# The number of last waits that count, and the share of them that a promise should outlast.
NUM_WAITS = 128
SHARE = 0.9
# Bounds of a promise in seconds.
MIN_S, MAX_S = 0.1, 120.0
# The most answers, and the most owners with waits, that are remembered.
MAX_ANSWERS = 1 << 14
MAX_OWNERS = 1 << 10


@dataclass(slots=True)
class EndedAnswer:
    ended_s: float
    # Blocks up to its end.
    num_blocks: int
    # 0: it is promised no more.
    promised_until: float = 0.0


class ReturnTimes:
    def __init__(self) -> None:
        # By owner and by what was awaited. Those seen last come last.
        self._waits_s: dict[tuple[str, str], deque[float]] = {}
        # By owner, and by the hashes of their last blocks; the first one to end first.
        self._answers: dict[str, dict[bytes, EndedAnswer]] = {}
        self._num_answers = 0
        # When promises end, and the owners and hashes of their answers.
        self._due: list[tuple[float, str, bytes]] = []
        # Promises by what became of them. "kept": the next turn came in time and found all. "broken": it came in time,
        # but running requests had needed the room. "expired": it did not come in time. "refused": a limit was reached.
        self.outcomes: Counter[str] = Counter()

    def wait_s(self, owner: str, awaits: str) -> float:
        """Returns how long the owner's next turn will probably take at most."""
        waits_s = sorted(self._waits_s.get((owner, awaits), ()))
        if len(waits_s) < FEW:
            return PRIOR_S[awaits]
        return min(max(waits_s[math.ceil(SHARE * len(waits_s)) - 1], MIN_S), MAX_S)

    def ended(self, hashes: Sequence[bytes], owner: str, now: float) -> None:
        """Remembers an answer. `hashes` are those of all blocks up to its end."""
        self._take(owner, hashes[-1])
        self._answers.setdefault(owner, {})[hashes[-1]] = EndedAnswer(now, len(hashes))
        self._num_answers += 1
        if self._num_answers > MAX_ANSWERS:
            most = max(self._answers, key=lambda each: len(self._answers[each]))
            self._take(most, next(iter(self._answers[most])))

    def promised(self, last: bytes, owner: str, until: float) -> None:
        """Notes that the answer's blocks are promised."""
        if answer := self._answers.get(owner, {}).get(last):
            answer.promised_until = until
            heappush(self._due, (until, owner, last))

    def came(self, hashes: Sequence[bytes], owner: str, follows: str, num_found: int, now: float) -> None:
        """Learns from an owner's prompt, of which `num_found` blocks were found. `follows`: what it has behind an
        earlier answer."""
        answers = self._answers.get(owner, {})
        last = next((each for each in reversed(hashes) if each in answers), None)
        answer = self._take(owner, last) if last else None
        if answer is None:
            return
        waits_s = self._waits_s.pop((owner, follows), None) or deque[float](maxlen=NUM_WAITS)
        waits_s.append(now - answer.ended_s)
        self._waits_s[owner, follows] = waits_s
        if len(self._waits_s) > MAX_OWNERS:
            del self._waits_s[next(iter(self._waits_s))]
        if answer.promised_until:
            in_time = "kept" if num_found >= answer.num_blocks else "broken"
            self.outcomes[in_time if now < answer.promised_until else "expired"] += 1

    def _take(self, owner: str, last: bytes) -> EndedAnswer | None:
        """Forgets the owner's answer with this hash, and returns it."""
        answers = self._answers.get(owner, {})
        answer = answers.pop(last, None)
        if answer:
            self._num_answers -= 1
            if not answers:
                del self._answers[owner]
        return answer

    def expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            until, owner, last = heappop(self._due)
            if (answer := self._answers.get(owner, {}).get(last)) and answer.promised_until == until:
                answer.promised_until = 0.0
                self.outcomes["expired"] += 1
