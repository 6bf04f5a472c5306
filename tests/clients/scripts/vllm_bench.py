"""What `vllm bench serve` sends with its backends `openai` and `openai-chat`, and what it reads from the answers.

vLLM itself is not installed for this. Bodies and headers follow its vllm/benchmarks/lib/endpoint_request_func.py.
"""

import json
import os

import httpx2

NUM_TOKENS = 12
BODIES = {
    "/completions": {
        "prompt": "Count from 7 to 9.",
        "repetition_penalty": 1.0,
        "max_tokens": NUM_TOKENS,
        "logprobs": None,
    },
    "/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Count from 7 to 9."}]}],
        "max_completion_tokens": NUM_TOKENS,
    },
}
COMMON = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}
# From --ignore-eos, and from its sampling options.
EXTRA = {
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
}

for path, body in BODIES.items():
    for extra in ({"ignore_eos": True}, EXTRA):
        headers = {"Authorization": "Bearer none", "x-request-id": f"benchmark-{path.count('/')}"}
        url, num_pieces, usage = os.environ["BASE_URL"] + path, 0, None
        with httpx2.stream("POST", url, json=body | COMMON | extra, headers=headers, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["x-request-id"] == headers["x-request-id"]
            for line in answer.iter_lines():
                chunk = line.removeprefix("data:").strip()
                if not chunk or chunk == "[DONE]":
                    continue
                read = json.loads(chunk)
                if choices := read.get("choices"):
                    num_pieces += "text" in choices[0] or "content" in choices[0]["delta"]
                elif read.get("usage"):
                    usage = read["usage"]
        assert num_pieces > 1 and usage and usage["completion_tokens"] == NUM_TOKENS, (
            path,
            num_pieces,
            usage,
        )
