"""The messages that one event causes, in order, until the end of the event."""

from __future__ import annotations

from alignedserve.protocol.messages import AnyMessage
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.events import Send
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.types import InstanceId


class Outbox:
    def __init__(self, cluster: ClusterState, output: OutputCoalescing) -> None:
        self._cluster = cluster
        self._output = output
        self._sends: list[Send] = []

    def send(self, to: InstanceId | None, message: AnyMessage) -> None:
        """Sends to a process that is up. A process that is down has forgotten everything, so its messages are
        dropped."""
        if to is not None and to in self._cluster:
            self._sends.append(Send(to, message))

    def take(self, now: float) -> list[Send]:
        """Returns all messages. The last ones are tokens that are due at gateways by `now`, and changed announcements
        of real time for decode instances."""
        for gateway, tokens in self._output.take(now):
            self.send(gateway, tokens)
        for view in self._cluster.all_decodes:
            if (coming := view.take_announcement()) is not None:
                self.send(view.instance_id, coming)
        sends, self._sends = self._sends, []
        return sends
