"""Chats by HTTP through real processes, in a pool that other chats flood. A session's next turn finds its KV, and a
chat without a name or tools finds none."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.cluster.conftest import Borrow
from tests.cluster.house import House, opened
from tests.cluster.processes import DECODES, MAX_BLOCKS, PREFILLS
from tests.playing import play
from tests.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 16
# A chat takes 8 blocks. A key is promised at most a quarter of the pool.
NUM_PROMPT, NUM_OUTPUT, NUM_POOL_BLOCKS = 100, 30, 2 * MAX_BLOCKS


class Chats:
    def __init__(self, house: House) -> None:
        self._house = house
        self._dice = Random(0)

    def words(self, count: int) -> list[int]:
        return [self._dice.randrange(VOCAB_SIZE) for _ in range(count)]

    async def say(self, prompt: Sequence[int], **more: str) -> list[int]:
        """Returns the prompt and its answer, when the pool has it."""
        body = {"prompt": [*prompt], "max_tokens": NUM_OUTPUT, "ignore_eos": True, "return_token_ids": True}
        answer = await self._house.http.post("/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        await self._house.until_empty()
        return [*prompt, *answer.json()["choices"][0]["token_ids"]]

    async def metric(self, name: str) -> float:
        text = (await self._house.http.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith("alignedserve:") and name in line]
        return float(line.split()[-1])

    async def num_found(self, said: Sequence[int]) -> float:
        """The tokens of the next turn that are in the pool."""
        before = await self.metric("pool_content_hits_total{")
        await self.say([*said, *self.words(20)])
        return await self.metric("pool_content_hits_total{") - before


def test_a_session_s_next_turn_finds_its_kv_in_a_flooded_pool(borrow: Borrow) -> None:
    async def scenario() -> None:
        async with opened(processes, PREFILLS[0], DECODES[0]) as house:
            chats = Chats(house)
            named = await chats.say(chats.words(NUM_PROMPT), session="mine")
            nameless = await chats.say(chats.words(NUM_PROMPT))
            for _ in range(2 * NUM_POOL_BLOCKS // (NUM_PROMPT // BLOCK_SIZE)):
                await chats.say(chats.words(NUM_PROMPT))
            found = await chats.num_found(named), await chats.num_found(nameless)
            num_known = (len(named) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert found == (num_known, 0)

    processes = borrow(has_gateway=True, num_pool_blocks=NUM_POOL_BLOCKS, is_patient=True)
    play(scenario)
