"""A decode instance's links: one for each prefill instance it pulls from, made when needed, and anew after it broke."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.transport.channel import Identity
from alignedserve.transport.completions import Completions, Done, TransferId, TransferIds
from alignedserve.transport.group import SETUP_TIMEOUT_S
from alignedserve.transport.link import Link, Want
from alignedserve.types import InstanceId

DEFAULT_TIMEOUT_S = 30.0


class Links:
    """Used by one thread, the instance's loop; nothing here waits but `close`."""

    def __init__(self, link: str, blocks: torch.Tensor, me: Identity, completions: Completions) -> None:
        self._link = link
        self._blocks = blocks
        self._me = me
        self._ids = TransferIds(me.epoch)
        self._completions = completions
        self._links: dict[InstanceId, Link] = {}
        # those on their way out
        self._stopped: list[Link] = []

    def pull(
        self,
        source: InstanceId,
        address: str,
        wants: Sequence[Want],
        done: Done,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> TransferId:
        """All of the requests' blocks in one transfer; the sender keeps its copy unless every byte has arrived."""
        return self._to(source, address, timeout_s).pull(wants, done, timeout_s)

    def drop(self, source: InstanceId) -> None:
        """The instance is gone. Safe to repeat."""
        if source in self._links:
            self._links[source].stop()
            self._stopped = [link for link in self._stopped if link.error is None]
            self._stopped.append(self._links.pop(source))

    def close(self) -> None:
        """Ends all transfers; waits at most until their deadlines, for other ends that hang."""
        for source in list(self._links):
            self.drop(source)
        for link in self._stopped:
            link.close()

    def error(self, source: InstanceId) -> str | None:
        """Why the link to this instance is of no use, if it is not."""
        return self._links[source].error if source in self._links else None

    def _to(self, source: InstanceId, address: str, timeout_s: float) -> Link:
        link = self._links.get(source)
        if link is not None and (link.error is not None or link.address != address):
            self.drop(source)
            link = None
        if link is None:
            link = self._links[source] = Link(
                self._link,
                self._blocks,
                source,
                address,
                self._me,
                self._ids,
                self._completions,
                setup_timeout_s=min(timeout_s, SETUP_TIMEOUT_S),
            )
        return link
