"""How long clients get no token after a fault: any one of them, and all together. Pure; in seconds."""

from __future__ import annotations

from dataclasses import dataclass

TIERS = ("rt", "be")


@dataclass(frozen=True)
class Silence:
    """The longest silences of a period: without a token to any client, and without one to a waiting client of each
    class."""

    anywhere_s: float = 0.0
    rt_s: float = 0.0
    be_s: float = 0.0


class Silences:
    def __init__(self) -> None:
        # client -> since when it has been waiting for a token.
        self._since: dict[str, float] = {}
        self._anywhere_since = 0.0
        self._begun_s = 0.0
        self._longest = dict.fromkeys(("anywhere", *TIERS), 0.0)

    def asks(self, client: str, now: float) -> None:
        """Notes that the client waits. A repeated request continues the wait."""
        if not self._since:
            self._anywhere_since = now
        self._since.setdefault(client, now)

    def hears(self, client: str, now: float) -> None:
        """Notes a token. Ignored for a client that is not waiting, because a slow reader's tokens may be old."""
        if client in self._since:
            self._note("anywhere", self._anywhere_since, now)
            self._note(_tier(client), self._since[client], now)
            self._anywhere_since = self._since[client] = now

    def ends(self, client: str) -> None:
        self._since.pop(client, None)

    def begin(self, now: float) -> None:
        """Begins a period with a fault. Earlier silence does not count."""
        self._begun_s = now
        self._longest = dict.fromkeys(self._longest, 0.0)

    def end(self, now: float) -> Silence:
        """Returns the longest silences. Those that continue count up to now."""
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
