"""Bodies that are expensive to parse. Each of them once blocked every stream for seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable

import httpx2

from benchmarks.attack.target import Finding, Target

NUM_BYTES = 2_000_000
JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = '{"role":"user","content":"x"}'


def _list(item: str, num_bytes: int = NUM_BYTES) -> str:
    return "[" + ",".join([item] * (num_bytes // (len(item) + 1))) + "]"


def _object(value: str, num_bytes: int = NUM_BYTES) -> str:
    return "{" + ",".join(f'"{n}":{value}' for n in range(num_bytes // 10)) + "}"


async def _refused(
    target: Target, name: str, bodies: Iterable[tuple[str, str]], status: int = 400
) -> Finding:
    """Checks that each body gets this status and a short answer."""
    answers = []
    async with httpx2.AsyncClient(base_url=target.url, timeout=60) as http:
        for path, body in bodies:
            answers.append(await http.post(path, content=body.encode(), headers=JSON))
    statuses = sorted({answer.status_code for answer in answers})
    longest = max(len(answer.content) for answer in answers)
    return Finding(
        name, statuses == [status] and longest < 4096, f"{len(answers)} bodies: {statuses}, {longest} bytes"
    )


async def attack_wrong_items(target: Target) -> Finding:
    bodies = [
        (CHAT, f'{{"messages":{_list("1")}}}'),
        (CHAT, f'{{"messages":[{USER}],"stop_token_ids":{_list("null")}}}'),
        (CHAT, f'{{"messages":[{USER}],"tools":{_list("1")}}}'),
        (CHAT, f'{{"messages":[{USER}],{_object("1")[1:]}'),
        ("/detokenize", f'{{"tokens":{_list("null")}}}'),
    ]
    return await _refused(target, "lists of millions of wrong items", bodies)


async def attack_too_many_tools(target: Target) -> Finding:
    tool = '{"type":"function","function":{"name":"f"}}'
    bodies = [(CHAT, f'{{"messages":[{USER}],"tool_choice":"required","tools":{_list(tool)}}}')]
    return await _refused(target, "40,000 tools of which one must be called", bodies)


async def attack_too_many_unused_tools(target: Target) -> Finding:
    """The demo model's prompt doesn't contain the tools, so they change nothing."""
    tool = '{"type":"function","function":{"name":"f"}}'
    bodies = [(CHAT, f'{{"messages":[{USER}],"max_tokens":1,"tools":{_list(tool)}}}')]
    return await _refused(target, "40,000 tools that nothing is told of", bodies, status=200)


async def attack_too_many_good_items(target: Target) -> Finding:
    bodies = [
        (COMPLETIONS, f'{{"prompt":{_list("[1]")}}}'),
        (CHAT, f'{{"messages":[{USER}],"logit_bias":{_object("1")}}}'),
        (CHAT, f'{{"messages":{_list(USER)}}}'),
        (COMPLETIONS, f'{{"prompt":{_list("5")}}}'),
        (COMPLETIONS, json.dumps({"prompt": "ab " * (NUM_BYTES // 3)})),
    ]
    return await _refused(target, "millions of items that are well-typed", bodies)


async def attack_deep_nesting(target: Target) -> Finding:
    half = NUM_BYTES // 2
    bodies = [
        (CHAT, f'{{"messages":{"[" * half}{"]" * half}}}'),
        (CHAT, f'{{"messages":[{USER}],"metadata":{"[" * half}{"]" * half}}}'),
        (CHAT, "[" * NUM_BYTES),
        (CHAT, f'{{"messages":[{USER}],"seed":{"9" * NUM_BYTES}}}'),
    ]
    return await _refused(target, "nesting, and a number of millions of digits", bodies)
