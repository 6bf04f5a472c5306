"""One connection of a lender: a handshake, then blocks for every pull, until either end goes.

It ends at a deadline too, and at the first frame out of order. What was lent on it is back on the shelf then.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence

import torch

from alignedserve.messages import Refused
from alignedserve.transport.channel import (
    Channel,
    Denied,
    Granted,
    Identity,
    Joining,
    Knock,
    Opened,
    Pull,
    Pulled,
    remaining_s,
)
from alignedserve.transport.failures import LINK_FAILURES, describe, unexpected
from alignedserve.transport.fingerprint import differences
from alignedserve.transport.group import LENDER, SETUP_TIMEOUT_S, PairGroup, join_store
from alignedserve.transport.runs import merge
from alignedserve.transport.shelf import NotOnShelf, Shelf
from alignedserve.types import RequestKey


class Lending:
    def __init__(
        self,
        link: str,
        blocks: torch.Tensor,
        shelf: Shelf,
        me: Identity,
        channel: Channel,
        admit: Callable[[Knock, Channel], str | None],
    ) -> None:
        self._link = link
        self._blocks = blocks
        self._shelf = shelf
        self._me = me
        self._channel = channel
        self._admit = admit
        self._group: PairGroup | None = None
        self._lent: Sequence[RequestKey] = ()
        self.name = "link to nobody yet"

    def run(self) -> str:
        """Returns why it ended."""
        try:
            group = self._open()
            while True:
                self._serve(self._next_pull(), group)
        except LINK_FAILURES as error:
            return describe(error)
        finally:
            if self._group is not None:
                self._group.abort()
            self._shelf.put_back(self._lent)
            self._channel.close()

    def _open(self) -> PairGroup:
        deadline_s = time.monotonic() + SETUP_TIMEOUT_S
        knock = self._channel.receive(deadline_s)
        if not isinstance(knock, Knock):
            raise unexpected(knock, "Knock")
        self.name = f"link to {knock.instance_id}"
        if reason := self._objection(knock):
            self._channel.send(Refused(reason), deadline_s)
            raise ConnectionRefusedError(f"refused: {reason}")
        self._epoch = knock.epoch
        self._channel.send(Opened(), deadline_s)
        joining = self._channel.receive(deadline_s)
        if not isinstance(joining, Joining):
            raise unexpected(joining, "Joining")
        host = self._channel.sock.getpeername()[0]
        store = join_store(host, joining.store_port, remaining_s(deadline_s))
        self._group = PairGroup(
            self._link, store, LENDER, self._channel, self._blocks.device, remaining_s(deadline_s)
        )
        return self._group

    def _objection(self, knock: Knock) -> str | None:
        if not hmac.compare_digest(knock.token.encode(), self._me.token.encode()):
            return "the token is not this cluster's"
        if knock.wanted != self._me.instance_id:
            return f"this is {self._me.instance_id}"
        ours = self._me.fingerprint | {"link": self._link}
        if named := differences(ours, knock.fingerprint, self._me.instance_id, knock.instance_id):
            return named
        return self._admit(knock, self._channel)

    def _next_pull(self) -> Pull:
        pull = self._channel.receive()
        if not isinstance(pull, Pull):
            raise unexpected(pull, "Pull")
        if pull.transfer.epoch != self._epoch:
            raise ConnectionError(f"transfer {pull.transfer} came from epoch {self._epoch}")
        return pull

    def _serve(self, pull: Pull, group: PairGroup) -> None:
        deadline_s = time.monotonic() + pull.timeout_s
        try:
            blocks = self._shelf.lend(pull.keys, [len(blocks) for blocks in pull.blocks])
        except NotOnShelf as error:
            self._channel.send(Denied(pull.transfer, str(error)), deadline_s)
            return
        self._lent = pull.keys
        targets = [block for blocks in pull.blocks for block in blocks]
        runs = merge(zip(targets, blocks, strict=True), self._blocks.shape[1])
        self._channel.send(Granted(pull.transfer, [(run.here, run.num_blocks) for run in runs]), deadline_s)
        group.send([self._blocks[run.there : run.there + run.num_blocks] for run in runs])
        commit = self._channel.receive(deadline_s)
        if commit != Pulled(pull.transfer):
            raise unexpected(commit, f"Pulled({pull.transfer})")
        self._shelf.pulled(pull.keys)
        self._lent = ()
