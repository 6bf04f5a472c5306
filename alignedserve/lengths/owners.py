"""The predictors of all owners of API keys. What an owner's answers taught predicts that owner's requests only:
otherwise a prediction, and the order of requests that follows from it, would depend on what others asked. A corpus is
the operator's, and predicts everyone's.

Memory is limited for all owners together. When it is full, the owner that has most of it loses its oldest entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from alignedserve.lengths.config import MAX_ENTRIES
from alignedserve.lengths.encoder import Encoder
from alignedserve.lengths.prediction import Prediction
from alignedserve.lengths.predictor import Predictor, teaches
from alignedserve.sampling_params import SamplingParams

# What the regressions of all owners may take: half a megabyte each with the hash encoder, and more with longer vectors.
# The least recently used owner's predictor is dropped.
MAX_REGRESSION_BYTES = 32 << 20


class Predictors:
    def __init__(self, encoder: Encoder, max_model_len: int, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        # What the corpus taught. It never learns from answers.
        self.taught = Predictor(encoder, max_model_len, max_entries)
        self._max_owners = max(1, MAX_REGRESSION_BYTES // self.taught.regression.products.nbytes)
        # The least recently used first.
        self._predictors: OrderedDict[str, Predictor] = OrderedDict()

    @property
    def num_prompts(self) -> int:
        """The number of remembered prompts, with those of the corpus."""
        return len(self.taught.neighbours) + self._num_learned

    def predict(
        self, prompt: Sequence[int], params: SamplingParams, tier: str, owner: str = ""
    ) -> Prediction:
        predictor = self.of(owner) if owner in self._predictors else self.taught
        return predictor.predict(prompt, params, tier)

    def learn(self, prediction: Prediction, length: int, reason: str, owner: str = "") -> None:
        """Learns from an answer to `owner`. `reason` is why it ended. Does nothing if the answer teaches nothing."""
        if teaches(prediction, length, reason):
            self.of(owner).learn(prediction, length, reason)
            self.fit()

    def of(self, owner: str) -> Predictor:
        """Returns the owner's predictor, which begins with what the corpus taught."""
        if owner not in self._predictors:
            if len(self._predictors) >= self._max_owners:
                self._predictors.popitem(last=False)
            self._predictors[owner] = self.taught.heir()
        self._predictors.move_to_end(owner)
        return self._predictors[owner]

    def fit(self) -> None:
        """Drops entries until there are no more than may be."""
        while self._num_learned > self._max_entries:
            max((each.neighbours for each in self._predictors.values()), key=len).evict()

    def all(self) -> Iterator[tuple[str, Predictor]]:
        """Yields all owners and their predictors, the least recently used first."""
        return iter(self._predictors.items())

    @property
    def _num_learned(self) -> int:
        return sum(len(each.neighbours) for each in self._predictors.values())
