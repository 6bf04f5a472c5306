"""The adapters that instances must have. The launcher decides it; here is which instances have them. Pure.

An adapter that the launcher no longer wants is dropped when no request of this island uses it any more. Until then the
instances keep it, and those that connect get it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import (
    AdapterAt,
    AdaptersSet,
    Hello,
    Rejected,
    Request,
    SetAdapters,
)
from alignedserve.router.leaving import Recaller
from alignedserve.router.state import RouterState
from alignedserve.router.views import Process
from alignedserve.types import LAUNCHER, InstanceId

# The answer if no instance has obeyed.
NOBODY = "no instance is up"
UNLOADED = "the adapter that this request names was unloaded"


@dataclass(eq=False, slots=True)
class Adapters:
    _router: RouterState
    _recaller: Recaller
    # The launcher's last order; None: it has sent none yet.
    _wanted: SetAdapters | None = None
    # The last order to instances.
    _ordered: SetAdapters = field(default_factory=lambda: SetAdapters(0, []))
    # Those in it that all instances have loaded: the launcher's first ones, and those of orders that all have obeyed.
    _confirmed: set[str] = field(default_factory=set)
    # The instances that have not answered it, and why others have not all adapters.
    _waits_for: set[InstanceId] = field(default_factory=set)
    _reason: str = NOBODY
    # Whether the launcher has its answer.
    _is_answered: bool = True

    @property
    def are_known(self) -> bool:
        return self._wanted is not None

    @property
    def has_unused(self) -> bool:
        """Whether instances keep adapters only for requests that have begun."""
        return self._wanted is not None and len(self._ordered.adapters) > len(self._wanted.adapters)

    def refusal(self, request: Request) -> tuple[str, str] | None:
        """Returns why a request can't run, for `Rejected`: its adapter was unloaded before it arrived. No instance must
        get it."""
        if not request.adapter or request.adapter in self._confirmed or not self.are_known:
            return None
        return "adapter", UNLOADED

    def wanted(self, wanted: SetAdapters) -> None:
        """Takes an order of the launcher."""
        if self._wanted is None:
            self._refuse_unknown(wanted)
            self._confirmed = {each.adapter for each in wanted.adapters}
        self._wanted, self._is_answered = wanted, False
        adapters = wanted.adapters + self._still_used(wanted)
        if reason := self._no_room(adapters):
            # Nothing is ordered. The launcher takes it back.
            self._router.outbox.send(LAUNCHER, AdaptersSet(wanted.number, reason))
            self._is_answered = True
            return
        self._order(adapters)

    def drop_unused(self) -> None:
        if self._wanted is not None and self.has_unused:
            kept = self._wanted.adapters + self._still_used(self._wanted)
            if len(kept) < len(self._ordered.adapters) and not self._no_room(kept):
                self._is_answered = False
                self._order(kept)

    def answered(self, sender: InstanceId, answer: AdaptersSet) -> None:
        """Takes an instance's answer. Answers to earlier orders don't count."""
        if answer.number == self._ordered.number:
            self._waits_for.discard(sender)
            self._reason = answer.reason if self._reason in ("", NOBODY) else self._reason
            self._answer()

    def connected(self, hello: Hello) -> None:
        """Tells an instance its adapters, before anything else. It ends if it can't load those of the first order, so
        that has none that others may still refuse."""
        if self._wanted is not None and hello.limits.num_adapter_places:
            self._waits_for.add(hello.instance_id)
            ordered = self._ordered
            confirmed = [each for each in ordered.adapters if each.adapter in self._confirmed]
            if confirmed != ordered.adapters:
                self._router.outbox.send(hello.instance_id, SetAdapters(ordered.number - 1, confirmed))
            self._router.outbox.send(hello.instance_id, ordered)

    def closed(self, instance_id: InstanceId) -> None:
        """Another process under this name will get the adapters when it connects."""
        if instance_id in self._waits_for:
            self._waits_for.discard(instance_id)
            self._answer()

    def _refuse_unknown(self, wanted: SetAdapters) -> None:
        """Ends requests of a new router with adapters that are not wanted any more. No instance has seen them yet."""
        names = {"", *(each.adapter for each in wanted.adapters)}
        for state in [each for each in self._router.requests if each.request.adapter not in names]:
            self._router.outbox.send(state.gateway, Rejected(state.key, "adapter", UNLOADED))
            self._recaller.finish(state)

    def _order(self, adapters: list[AdapterAt]) -> None:
        self._ordered = SetAdapters(self._ordered.number + 1, adapters)
        self._confirmed &= {each.adapter for each in adapters}
        self._reason = NOBODY
        self._waits_for = {view.instance_id for view in self._loading}
        for instance_id in sorted(self._waits_for):
            self._router.outbox.send(instance_id, self._ordered)
        self._answer()

    def _answer(self) -> None:
        """Answers the launcher once all instances have answered."""
        if self._wanted is not None and not (self._waits_for or self._is_answered):
            self._is_answered = True
            if not self._reason:
                self._confirmed = {each.adapter for each in self._ordered.adapters}
            wanted = {each.adapter for each in self._wanted.adapters}
            kept = [each.adapter for each in self._ordered.adapters if each.adapter not in wanted]
            self._router.outbox.send(LAUNCHER, AdaptersSet(self._wanted.number, self._reason, kept))

    def _still_used(self, wanted: SetAdapters) -> list[AdapterAt]:
        names = {each.adapter for each in wanted.adapters}
        unwanted = [each for each in self._ordered.adapters if each.adapter not in names]
        if not unwanted:
            return []
        used = {state.request.adapter for state in self._router.requests}
        return [each for each in unwanted if each.adapter in used]

    def _no_room(self, adapters: list[AdapterAt]) -> str:
        """Returns why instances have no places for these adapters; empty if they have."""
        num_places = min(
            (view.hello.limits.num_adapter_places for view in self._loading), default=len(adapters)
        )
        if len(adapters) <= num_places:
            return ""
        return f"{len(adapters)} adapters would be in use, those included that running requests still use"

    @property
    def _loading(self) -> list[Process]:
        return [view for view in self._router.cluster.instances if view.hello.limits.num_adapter_places]
