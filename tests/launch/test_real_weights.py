"""A published model, served: streams are the same when processes are killed, and a call of a tool fits its schema."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import jsonschema
import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.models.gguf.directory import directory_of_file
from tests import real_weights
from tests.launch.server import POOL, START_S, Server, serving
from tests.launch.streams import ask_all

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=0)]

NAME = "SmolLM2-135M-Instruct.Q4_1"
NUM_TOKENS = 160
QUESTIONS = [
    "Name three fruits, and say where they grow.",
    "Write a story about a sailor.",
    "How do I boil an egg?",
    "Why is the sky blue?",
    "Describe a cat to somebody who has never seen one.",
    "Explain what a compiler does.",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


# The model's own template has no place for tools.
TOOL_TEMPLATE = """<|im_start|>system
Tools: {{ tools | tojson }}
A call: <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = real_weights.smollm2()
    tokenizer = shutil.copytree(
        directory_of_file(model), tmp_path_factory.mktemp("tokenizer") / "copy", symlinks=True
    )
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates/tool_use.jinja").write_text(TOOL_TEMPLATE)
    memory = (*POOL, "--kv-cache-memory-bytes", str(128 << 20), "--max-model-len", "1024")
    options = ("--tokenizer", str(tokenizer), "--silence-s", str(10 * START_S))
    with serving(str(model), *memory, *options) as found:
        yield found


def offline() -> list[str]:
    llm = LLM(real_weights.smollm2(), max_model_len=1024, use_tqdm=False)
    params = SamplingParams(seed=7, ignore_eos=True, skip_special_tokens=False, max_tokens=NUM_TOKENS)
    results = llm.chat([[{"role": "user", "content": each}] for each in QUESTIONS], params, use_tqdm=False)
    return [each.outputs[0].text for each in results]


def test_streams_go_on_when_processes_are_killed(server: Server) -> None:
    def kill() -> None:
        assert server.get("/v1/cluster").json()["requests"]
        # Prefill computes again what decode has lost.
        server.kill(["decode-0"], ["prefill-0"], ["kvpool-0"])

    def ask(in_the_middle: Callable[[], object] = lambda: None) -> list[str]:
        sampled = {"temperature": 1.0, "max_tokens": NUM_TOKENS}
        return ask_all(server.url, in_the_middle, (NAME,), QUESTIONS, **sampled)[0]

    expected = offline()
    assert ask() == expected
    assert ask(kill) == expected
    server.until_whole()


def test_arguments_of_a_tool_fit_their_schema(server: Server) -> None:
    function = {"name": "forecast", "parameters": SCHEMA}
    named = {"type": "function", "function": {"name": "forecast"}}
    for seed, choice in enumerate([named, "required"] * 2):
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "How warm will it be in Rome this week?"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 100,
            "seed": seed,
        }
        answer = server.post("/v1/chat/completions", body).json()
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "forecast"
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))
