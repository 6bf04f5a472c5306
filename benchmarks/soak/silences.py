"""How long clients hear nothing after a fault: any of them, and all of them. Pure; seconds."""

from __future__ import annotations

from dataclasses import dataclass

TIERS = ("rt", "be")


@dataclass(frozen=True)
class Silence:
    """The longest ones of a time: without a token anywhere, and without one of a client that waits for it."""

    anywhere_s: float = 0.0
    rt_s: float = 0.0
    be_s: float = 0.0


class Silences:
    def __init__(self) -> None:
        # client -> since when it waits for a token
        self._since: dict[str, float] = {}
        self._anywhere_since = 0.0
        self._begun_s = 0.0
        self._longest = dict.fromkeys(("anywhere", *TIERS), 0.0)

    def asks(self, client: str, now: float) -> None:
        """One that asks again goes on waiting."""
        if not self._since:
            self._anywhere_since = now
        self._since.setdefault(client, now)

    def hears(self, client: str, now: float) -> None:
        """Nothing for one that has not asked: who reads slowly hears what was said long ago."""
        if client in self._since:
            self._note("anywhere", self._anywhere_since, now)
            self._note(_tier(client), self._since[client], now)
            self._anywhere_since = self._since[client] = now

    def ends(self, client: str) -> None:
        self._since.pop(client, None)

    def begin(self, now: float) -> None:
        """A fault comes now: what was before does not count."""
        self._begun_s = now
        self._longest = dict.fromkeys(self._longest, 0.0)

    def end(self, now: float) -> Silence:
        """Those that go on count as far as they have come."""
        if self._since:
            self._note("anywhere", self._anywhere_since, now)
        for client, since_s in self._since.items():
            self._note(_tier(client), since_s, now)
        longest = self._longest
        return Silence(longest["anywhere"], longest["rt"], longest["be"])

    def _note(self, what: str, since_s: float, now: float) -> None:
        self._longest[what] = max(self._longest[what], now - max(since_s, self._begun_s))


def client_name(tier: str, number: int) -> str:
    return f"{tier} {number}"


def _tier(client: str) -> str:
    return client.split()[0]
