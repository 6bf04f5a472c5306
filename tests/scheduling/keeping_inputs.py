"""`fcfs`, but of every second prompt the inputs of layers are kept; who leaves of those does so without anything."""

from __future__ import annotations

from alignedserve.kv.layout import INPUTS, PLAIN
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.policy import ColocatedPart, DecodePart, Policy
from alignedserve.timing.estimate import Estimate

NAME = f"{__name__}:KeepingInputs"
# A request with inputs leaves after so many tokens, and then goes on with KV.
NUM_TOKENS = 7


class KeepingColocated(ColocatedPart):
    _num_begun = 0

    def plan(self, at: DecodeBoundary) -> None:
        victims = decoding.victims(at, self.config.evict_ahead, self.in_eviction_order)
        at.evict([request for request in victims if request.layout.holds_kv])
        at.drop(
            [
                request
                for request in at.running
                if not request.layout.holds_kv
                and (request in victims or request.num_output % (2 * NUM_TOKENS) == NUM_TOKENS)
            ]
        )
        decoding.go_on(at, at.running)
        for request in [*at.requests, *at.batch]:
            if at.should_wait(request) or at.num_tokens_left <= 0:
                continue
            is_again = request.num_output % (2 * NUM_TOKENS) == NUM_TOKENS
            keeps_inputs = not request.num_pooled and not is_again and self._num_begun % 2 == 1
            layout = INPUTS if keeps_inputs else PLAIN
            # With inputs it shares no blocks.
            needed = at.growth_of(request, decoding.num_ahead(self.config), layout)
            if not decoding.has_room(at, request, self.config) or needed > at.num_free_blocks:
                break
            self._num_begun += 1
            at.admit(request, layout)
            if not request.num_pooled:
                decoding.compute(at, request, at.num_tokens_left)


class KeepingInputs(Policy):
    name = "keeping-inputs"
    summary = "inputs of every second prompt are kept"
    layouts = (INPUTS,)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return KeepingColocated(limits, self.config)
