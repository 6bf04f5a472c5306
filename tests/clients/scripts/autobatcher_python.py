"""autobatcher: ordinary calls that become background responses, or a batch job."""

import asyncio
import os

from autobatcher import BatchOpenAI

ANSWER = "7, 8, 9"


async def ask(**options: object) -> None:
    client = BatchOpenAI(
        base_url=os.environ["BASE_URL"],
        api_key="none",
        poll_interval_seconds=0.2,
        batch_window_seconds=0.2,
        **options,
    )
    question = [{"role": "user", "content": "Count from 7 to 9."}]
    calls = [client.chat.completions.create(model="demo", messages=question, temperature=0) for _ in range(3)]
    for chat in await asyncio.gather(*calls):
        assert chat.choices[0].message.content == ANSWER
    response = await client.responses.create(model="demo", input="Count from 7 to 9.", temperature=0)
    assert response.output[0].content[0].text == ANSWER
    await client.close()


asyncio.run(ask())
asyncio.run(ask(completion_window="24h"))
