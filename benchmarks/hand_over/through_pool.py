"""The policy `aligned` without the direct hand-over."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduling.island import DecodeView, Island, RoutedRequest
from alignedserve.scheduling.policies.aligned.router.part import AlignedRouter
from alignedserve.scheduling.policies.default import Aligned


class ThroughPool(AlignedRouter):
    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        return None


class AlignedThroughPool(Aligned):
    name = "through-pool"

    def router(self) -> AlignedRouter:
        return ThroughPool(self.config)
