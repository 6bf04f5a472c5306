"""The listings of a store: ordered ids, over all owners and per owner, and pages of them."""

from __future__ import annotations

from collections import defaultdict

from alignedserve.store.base import Listing, Page
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

    def page(self, wanted: Listing) -> Page | None:
        """Returns the ids after `after`, which must be listed."""
        ids = [each for each, _ in self._scored(wanted)]
        if wanted.after is None:
            return wanted.page(ids)
        return wanted.page(ids[ids.index(wanted.after) + 1 :]) if wanted.after in ids else None

    def page_from(self, wanted: Listing, score: float) -> Page:
        """Returns the ids after a position."""
        return wanted.page([id for id, its in self._scored(wanted) if (its < score) == wanted.newest_first])

    def _scored(self, wanted: Listing) -> list[tuple[str, float]]:
        """Returns all ids of the list in its order, with their scores."""
        name, owner = wanted.name, wanted.owner
        listing = self[name] if owner is None else self.owned_by(owner, name)
        found = [(each, listing.score(each)) for each in listing.ids()]
        return found[::-1] if wanted.newest_first else found
