"""The listings of a store: ordered ids, over all owners and per owner, and pages of them."""

from __future__ import annotations

from collections import defaultdict

from alignedserve.store.base import Page
from alignedserve.vopr.front_end.ranked import Ranked


class Listings:
    def __init__(self) -> None:
        self._listings: defaultdict[str, Ranked] = defaultdict(Ranked)

    def __getitem__(self, name: str) -> Ranked:
        return self._listings[name]

    def owned_by(self, owner: str, name: str) -> Ranked:
        return self._listings[f"{name}@{owner}"]

    def each(self, *names: str, owner: str) -> list[Ranked]:
        """Returns the listings with these names, and the owner's part of each."""
        return [listing for name in names for listing in (self[name], self.owned_by(owner, name))]

    def page(
        self, name: str, owner: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Page | None:
        """Returns the ids after `after`, which must be listed."""
        listing = self[name] if owner is None else self.owned_by(owner, name)
        ids = listing.ids()
        if newest_first:
            ids.reverse()
        if after is not None and after not in listing:
            return None
        start = 0 if after is None else ids.index(after) + 1
        return Page(ids[start : start + limit], has_more=len(ids) > start + limit)

    def page_from(self, name: str, owner: str | None, score: float, limit: int, newest_first: bool) -> Page:
        """Returns the ids after a position."""
        listing = self[name] if owner is None else self.owned_by(owner, name)
        ids = listing.ids()
        if newest_first:
            ids.reverse()
        left = [each for each in ids if (listing.score(each) < score) == newest_first]
        return Page(left[:limit], has_more=len(left) > limit)
