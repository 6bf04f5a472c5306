"""How well the lengths of answers are predicted, as measured by `alignedserve predict-lengths`."""

from __future__ import annotations

import random

from alignedserve.cli.predict_lengths import WORDS, _demo_tasks, _read
from alignedserve.lengths.evaluate import evaluate
from alignedserve.lengths.predictor import Predictor, make_encoder
from research.papers.claim import Numbers, Size

NUM_ANSWERS = 5000
LEARNED = 0.8


def measure(size: Size, seed: int) -> Numbers:
    number = size.scaled(NUM_ANSWERS)
    if size.answers is None:
        data, decode, _ = _demo_tasks(number, seed)
    else:
        data, decode, _ = _read(size.answers, WORDS)
        random.Random(seed).shuffle(data)
    longest = max(len(each.prompt) + each.length for each in data)
    predictor = Predictor(make_encoder("hash", None, decode), longest + 1)
    found = evaluate(predictor, data[:number], LEARNED)
    return {
        "error": found.scores["predictor"].mean_error,
        "mean_error": found.scores["class mean"].mean_error,
        "predict_ms": found.predict_us[0] / 1e3,
    }
