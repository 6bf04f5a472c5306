"""LiteLLM: chats as `openai/` and as `hosted_vllm/`, streams, responses, Anthropic's messages, batches."""

import asyncio
import io
import json
import os
import time

import litellm

BASE_URL = os.environ["BASE_URL"]
AT = {"api_base": BASE_URL, "api_key": "none"}
QUESTION = [{"role": "user", "content": "Count from 7 to 9."}]
ANSWER = "7, 8, 9"

for model in ("openai/demo", "hosted_vllm/demo"):
    chat = litellm.completion(model=model, messages=QUESTION, temperature=0, **AT)
    assert chat.choices[0].message.content == ANSWER
    stream = litellm.completion(model=model, messages=QUESTION, temperature=0, stream=True, **AT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER

text = litellm.text_completion(
    model="hosted_vllm/demo", prompt="Count", max_tokens=4, extra_body={"ignore_eos": True}, **AT
)
assert text.usage.completion_tokens == 4

for model in ("openai/demo", "hosted_vllm/demo"):
    response = litellm.responses(model=model, input="Count from 7 to 9.", temperature=0, **AT)
    assert response.output[0].content[0].text == ANSWER
    events = litellm.responses(model=model, input="Count from 7 to 9.", temperature=0, stream=True, **AT)
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == ANSWER

line = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "demo", "messages": QUESTION, "temperature": 0},
}


async def batch() -> None:
    provider = {"custom_llm_provider": "hosted_vllm", **AT}
    content = io.BytesIO(json.dumps(line).encode())
    file = await litellm.acreate_file(file=("in.jsonl", content), purpose="batch", **provider)
    job = await litellm.acreate_batch(
        completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id, **provider
    )
    while job.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        job = await litellm.aretrieve_batch(batch_id=job.id, **provider)
    assert job.status == "completed", job
    output = await litellm.afile_content(file_id=job.output_file_id, **provider)
    body = json.loads(output.text)["response"]["body"]
    assert body["choices"][0]["message"]["content"] == ANSWER


asyncio.run(batch())
