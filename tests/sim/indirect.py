"""`aligned` as it would be without the direct way: real time goes by way of the pool as well, as best effort does."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduling.island import DecodeView, Island, RoutedRequest
from alignedserve.scheduling.policies.aligned.router.part import AlignedRouter
from alignedserve.scheduling.policies.default import Aligned


class Indirect(AlignedRouter):
    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        return None


class IndirectAligned(Aligned):
    name = "indirect"

    def router(self) -> AlignedRouter:
        return Indirect(self.config)


# The name of the policy.
INDIRECT = f"{__name__}:IndirectAligned"
