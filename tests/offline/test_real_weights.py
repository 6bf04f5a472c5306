"""Streams of published models have the same tokens alone, beside others, with prefixes from the cache, with prompts in
chunks, and after preemption. Some of them have to be JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.offline.llm import Prompt
from alignedserve.offline.outputs import RequestOutput
from alignedserve.structured_outputs import StructuredOutputsParams
from tests import real_weights
from tests.perplexity import windows_of

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=1)]

QUESTIONS = [
    "Name three fruits.",
    "Describe a cat as JSON.",
    "What is the capital of France?",
    "Describe a sailor as JSON.",
    "Write a haiku.",
    "Describe your friend as JSON.",
    "How do I boil an egg?",
    "Describe a king as JSON.",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "is_old": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "is_old"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Model:
    path: Callable[[], Path]
    max_model_len: int
    # Memory for the KV of some of the streams, but not of all at once.
    little: int

    def llm(self, **options: Any) -> LLM:
        return LLM(self.path(), max_model_len=self.max_model_len, max_num_seqs=8, use_tqdm=False, **options)

    def prompts(self, llm: LLM) -> list[list[int]]:
        """Returns chats, or pages for a model that has no template. The first two pages begin alike, and are longer
        than the window of its layers. Two others grow beyond it."""
        tokenizer = llm.get_tokenizer()
        if tokenizer.has_chat_template:
            return [tokenizer.chat_ids([{"role": "user", "content": each}]) for each in QUESTIONS]
        first, second = windows_of(self.path(), 1200, 600)
        return [first, [*first[:540], *second[:40]], second[:460], second[:80], second[140:]]

    def ask(self, llm: LLM, at_once: bool = True) -> list[RequestOutput]:
        form = StructuredOutputsParams(json=SCHEMA)
        prompts: list[Prompt] = [{"prompt_token_ids": each} for each in self.prompts(llm)]
        params = [
            SamplingParams(seed=number, max_tokens=96, structured_outputs=form)
            if number % 2
            else SamplingParams(seed=number, max_tokens=96, ignore_eos=True)
            for number in range(len(prompts))
        ]
        groups = [range(len(prompts))] if at_once else [[number] for number in range(len(prompts))]
        results = list[RequestOutput]()
        for group in groups:
            asked, its_params = [prompts[each] for each in group], [params[each] for each in group]
            results += llm.generate(asked, its_params, use_tqdm=False)
        llm.instance.check_idle()
        return results


MODELS = {
    "SmolLM2": Model(real_weights.smollm2, max_model_len=160, little=7 << 20),
    "Gemma 3": Model(real_weights.gemma3, max_model_len=704, little=20 << 20),
}


def tokens_of(results: list[RequestOutput]) -> list[list[int]]:
    return [[*each.outputs[0].token_ids] for each in results]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def alone(model: Model) -> list[RequestOutput]:
    """One after the other, without prefixes from the cache."""
    return model.ask(model.llm(enable_prefix_caching=False), at_once=False)


def test_json_follows_its_schema(alone: list[RequestOutput]) -> None:
    outputs = [each.outputs[0] for each in alone[1::2]]
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(output.text))
    assert len({output.text for output in outputs}) == len(outputs)


def test_beside_others_and_with_prefixes_from_the_cache(model: Model, alone: list[RequestOutput]) -> None:
    llm = model.llm()
    assert tokens_of(model.ask(llm)) == tokens_of(alone)
    again = model.ask(llm)
    assert all(each.num_cached_tokens for each in again)
    assert tokens_of(again) == tokens_of(alone)


def test_in_chunks(model: Model, alone: list[RequestOutput]) -> None:
    assert tokens_of(model.ask(model.llm(max_num_batched_tokens=20))) == tokens_of(alone)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_after_preemption(model: Model, alone: list[RequestOutput], mode: str) -> None:
    llm = model.llm(kv_cache_memory_bytes=model.little, preemption_mode=mode)
    assert tokens_of(model.ask(llm)) == tokens_of(alone)
    counts = {"swap": llm.instance.num_evictions, "recompute": llm.instance.num_drops}
    assert counts[mode] > 0
