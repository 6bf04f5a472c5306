"""Predicts the number of tokens of an answer to one owner. `owners.py` has the predictors of all.

It uses the answers to similar prompts (ALISE's retrieval), else a regression over all answers, else the mean of the
class. It does no I/O and has no clock and no threads.

An answer that was cut off at its limit is known only to be longer. For a request with that limit or a lower one,
nothing more has to be known. For others it is a lower bound.

Lengths spread over orders of magnitude, and the relative error counts. Means of neighbours are therefore geometric.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from alignedserve.lengths.config import ENCODERS, MAX_ENTRIES
from alignedserve.lengths.encoder import Decode, Encoder
from alignedserve.lengths.hash_encoder import HashEncoder
from alignedserve.lengths.neighbours import Neighbours, SimilarPrompt
from alignedserve.lengths.prediction import Prediction, Query, Source, Vector, query_of
from alignedserve.lengths.regression import Regression
from alignedserve.lengths.trust import Mean, Trust
from alignedserve.sampling_params import SamplingParams

NUM_NEIGHBOURS = 8
# A neighbour with this much less similarity than the best one has a third of its weight.
SHARPNESS = 0.02


class Predictor:
    def __init__(self, encoder: Encoder, max_model_len: int, max_entries: int = MAX_ENTRIES) -> None:
        self.encoder = encoder
        self.max_model_len = max_model_len
        self._max_entries = max_entries
        self.neighbours = Neighbours(encoder.dim, max_entries)
        self.regression = Regression(encoder.dim)
        # The mean length by tier.
        self.means: dict[str, Mean] = {}
        self.trust = Trust()
        # Prompts that it knows but does not learn: those of the corpus.
        self._inherited: Neighbours | None = None

    def heir(self) -> Predictor:
        """Returns a predictor that knows what this one does, and learns by itself."""
        heir = copy.copy(self)
        heir.regression, heir.means, heir.trust = copy.deepcopy((self.regression, self.means, self.trust))
        heir.neighbours, heir._inherited = Neighbours(self.encoder.dim, self._max_entries), self.neighbours
        return heir

    def predict(self, prompt: Sequence[int], params: SamplingParams, tier: str) -> Prediction:
        vector = self.encoder.encode(prompt)
        return self._answer(query_of(vector, len(prompt), params, tier, self.max_model_len))

    def learn(self, prediction: Prediction, length: int, reason: str) -> None:
        """Learns from an answer. `reason` is why it ended. Does nothing if the answer teaches nothing."""
        if not teaches(prediction, length, reason):
            return
        query, is_cut = prediction.query, reason == "length"
        self.trust.learn(prediction.similarity, prediction.guesses, length)
        self.neighbours.remember(query.vector, length, is_cut)
        mean = self.means.setdefault(query.tier, Mean())
        # An answer that was cut off only corrects predictions that are shorter.
        if not is_cut or self.regression.predict(query) < length:
            self.regression.learn(query, length)
        if not is_cut or mean.value < length:
            mean.add(length)

    def _answer(self, query: Query) -> Prediction:
        if query.least == query.most:
            return Prediction(query.most, "given", 1.0, query)
        near = self._near(query.vector)
        similarity = near[0].similarity if near else 0.0
        guesses = self._guesses(query, near)
        if not guesses:
            return Prediction(0, "unknown", 0.0, query)
        source = self.trust.best(similarity, guesses)
        confidence = self.trust.confidence(similarity, source)
        return Prediction(guesses[source], source, confidence, query, guesses, similarity)

    def _near(self, vector: Vector) -> list[SimilarPrompt]:
        """Returns the answers to the most similar prompts, its own and inherited ones, the most similar first."""
        sources = [self.neighbours] if self._inherited is None else [self.neighbours, self._inherited]
        found = [
            each for source in sources for each in source.near(vector, NUM_NEIGHBOURS, self.encoder.threshold)
        ]
        return sorted(found, key=lambda each: each.similarity, reverse=True)

    def _guesses(self, query: Query, near: Sequence[SimilarPrompt]) -> dict[Source, int]:
        guesses: dict[Source, int] = {}
        if near:
            guesses["neighbours"] = query.clamp(mean_length(near, query.most))
        if self.regression.is_ready:
            guesses["regression"] = query.clamp(self.regression.predict(query))
        if mean := self.means.get(query.tier):
            guesses["class"] = query.clamp(mean.value)
        return guesses


def teaches(prediction: Prediction, length: int, reason: str) -> bool:
    """Returns whether the predictor can learn from the answer. It can't from one that was aborted or could not end by
    itself."""
    return reason in ("stop", "length") and length >= 1 and prediction.query.is_natural


def mean_length(near: Sequence[SimilarPrompt], most: int) -> float:
    """Returns the mean length, weighted by similarity. The most similar neighbour comes first. `most` is the request's
    limit."""
    weights = [math.exp((each.similarity - near[0].similarity) / SHARPNESS) for each in near]
    logs = [math.log(_length_of(each, near, most)) for each in near]
    return math.exp(sum(map(math.prod, zip(weights, logs, strict=True))) / sum(weights))


def _length_of(neighbour: SimilarPrompt, near: Sequence[SimilarPrompt], most: int) -> float:
    answers = neighbour.answers
    if answers.num_ended:
        return answers.length
    if answers.cut_at >= most:
        return most
    longer = [each.answers.length for each in near if each.answers.length > answers.cut_at]
    return sum(longer) / len(longer) if longer else answers.cut_at


def make_encoder(kind: str, model: str | None = None, decode: Decode | None = None) -> Encoder:
    """`model`: a sentence-embedding model, a directory or a name. `decode` belongs to the prompts' tokenizer. Raises
    ValueError for an encoder that can't be made."""
    if kind == "hash":
        return HashEncoder()
    if kind == "sentence":
        from alignedserve.lengths.sentence_encoder import SentenceEncoder

        if decode is None:
            raise ValueError("length_predictor='sentence': needs text, but this model has no tokenizer")
        return SentenceEncoder.load(model, decode)
    raise ValueError(f"length_predictor={kind!r}: must be one of {', '.join(ENCODERS)}")
