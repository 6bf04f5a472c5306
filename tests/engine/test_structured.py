"""Structured outputs on the real engine: they parse, they end, and they stay the same under preemption."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from alignedserve import demo
from alignedserve.engine.outputs import TokenOutput
from alignedserve.engine.request import NewRequest
from alignedserve.instance.direct import DirectEngine
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.policies import Policy
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest, RequestId
from tests.engine.helpers import EvictEveryStep, make_instance, run, tokens

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.chat_ids([{"role": "user", "content": "Count from 1 to 9."}])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "days": {"type": "array", "items": {"enum": ["Monday", "Friday"]}, "maxItems": 3},
        "is_short": {"type": "boolean"},
    },
    "required": ["n", "days", "is_short"],
    "additionalProperties": False,
}
WANTED = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r"[a-c]{3}-\d{2,4}"),
    "choice": StructuredOutputsParams(choice=["red", "green", "dark red"]),
    "grammar": StructuredOutputsParams(grammar='start: "<" /[a-z]{1,3}/ ">"'),
}


def follows(kind: str, text: str) -> bool:
    match kind:
        case "json":
            found = json.loads(text)
            return set(found) == {"n", "days", "is_short"} and 0 <= found["n"] <= 999
        case "regex":
            return re.fullmatch(r"[a-c]{3}-\d{2,4}", text) is not None
        case "choice":
            return text in ("red", "green", "dark red")
    return re.fullmatch("<[a-z]{1,3}>", text) is not None


def engine_of(policy: type[Policy] | None = None, **options: Any) -> LocalInstance:
    return make_instance(demo.MODEL_DIR, policy, dtype="float32", **options)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def engine(request: pytest.FixtureRequest) -> LocalInstance:
    return engine_of(attention_backend=request.param)


def params_of(kind: str, temperature: float, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 80, "seed": 3, "structured_outputs": WANTED[kind]}
    return SamplingParams(temperature=temperature, **settings | changes)


def text_of(events: list[TokenOutput]) -> str:
    *output, last = (event.token_id for event in events)
    assert last == EOS and (events[-1].finish_reason, events[-1].stop_reason) == ("stop", None)
    return TOKENIZER.decode([token for token in output if token is not None], skip_special_tokens=False)


def all_params() -> list[tuple[str, SamplingParams]]:
    return [(kind, params_of(kind, heat)) for kind in WANTED for heat in (0.0, 1.0, 5.0)]


def test_every_output_follows_its_grammar(engine: LocalInstance) -> None:
    asked = all_params()
    # beside others that may say what they like
    free = SamplingParams(temperature=0, max_tokens=20)
    found = run(engine, [PROMPT] * (len(asked) + 1), [params for _, params in asked] + [free])
    for (kind, _), events in zip(asked, found[:-1], strict=True):
        assert follows(kind, text_of(events))
    assert tokens(found[-1:]) == tokens(run(engine, [PROMPT], free))


def test_it_composes_with_everything_else(engine: LocalInstance) -> None:
    green = TOKENIZER.encode("g")[0]
    each = [
        params_of("choice", 0.0, logit_bias={green: 100.0}),
        # longer than the grammar allows: the grammar has its way
        params_of("choice", 0.0, min_tokens=60),
        params_of("choice", 0.0, ignore_eos=True),
        params_of("json", 1.0, logprobs=2, top_k=3, top_p=0.9, min_p=0.01),
        params_of("json", 1.0, repetition_penalty=3.0, presence_penalty=2.0, frequency_penalty=2.0),
        params_of("json", 1.0, min_tokens=30),
    ]
    kinds = ["choice"] * 3 + ["json"] * 3
    found = run(engine, [PROMPT] * len(each), each)
    for kind, events in zip(kinds, found, strict=True):
        assert follows(kind, text_of(events))
    assert text_of(found[0]) == "green"
    # the model's own, whatever the grammar says
    for event in found[3]:
        assert event.logprobs and all(value > float("-inf") for value in event.logprobs.logprobs)


def test_tokens_stay_the_same_under_preemption_and_elsewhere() -> None:
    params = [params for _, params in all_params()]
    plain = tokens(run(engine_of(), [PROMPT] * len(params), params))
    assert tokens(run(engine_of(EvictEveryStep), [PROMPT] * len(params), params)) == plain
    elsewhere = DirectEngine(engine_of().engine)
    for number, (wanted, output) in enumerate(zip(params, plain, strict=True)):
        half = len(output) // 2
        request = elsewhere.begin(
            NewRequest(RequestId(str(number)), PROMPT, wanted, wanted.seed or 0, output[:half])
        )
        while request.output != output:
            assert len(request.output) < len(output)
            elsewhere.execute([(request, request.num_pending)])
        elsewhere.release(request)


def test_a_bad_grammar_is_refused_and_where_it_is_too_late_ends_its_request_alone() -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    instance = engine_of()
    with pytest.raises(InvalidRequest, match="invalid regex"):
        instance.add_request(RequestId("a"), PROMPT, bad, 0)
    good = params_of("choice", 0.0)
    engine = DirectEngine(instance.engine)
    requests = [
        engine.begin(NewRequest(RequestId(name), PROMPT, each, 0)) for name, each in (("b", bad), ("c", good))
    ]
    outputs = engine.execute([(request, request.num_pending) for request in requests])
    assert (outputs[0].finish_reason, outputs[0].token_id) == ("error", None)
    assert "invalid regex" in str(outputs[0].error)
    assert outputs[1].finish_reason is None and outputs[1].token_id is not None
    for request in requests:
        engine.release(request)
