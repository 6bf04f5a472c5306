"""A prompt with a grammar that gives its blocks up half-way has it compiled once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from llguidance import LLMatcher

from alignedserve import demo
from alignedserve.instance.live_transfers import LiveTransfers
from alignedserve.prefill_worker.worker import PrefillWorker
from alignedserve.protocol.messages import NewTokens, Prefill, PrefillReport, Request, Work
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.timing.deadlines import Deadlines
from alignedserve.timing.estimate import Estimate
from alignedserve.types import Epoch, PoolBlockId, RequestKey
from tests.engine.helpers import make_engine
from tests.sim.islands import COST

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
PATIENT, URGENT = RequestKey(1), RequestKey(2)
BLOCK = 16


class Counted(Grammars):
    num_compiled = 0

    def compiled(self, wanted: StructuredOutputsParams, owner: str = "") -> LLMatcher:
        self.num_compiled += 1
        return super().compiled(wanted, owner)


def work(key: RequestKey, first_block: int, params: SamplingParams, deadlines: Deadlines) -> Work:
    prompt = (TOKENIZER.encode("Count from 1 to 9. ") * 20)[: 4 * BLOCK]
    blocks = [PoolBlockId(first_block + block) for block in range(4)]
    return Work(Request(key, prompt, params, seed=0, arrival_s=0.0), [], 0, blocks, deadlines)


def test_a_grammar_outlives_the_blocks_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.text.grammar.MAX_KEPT", 0)
    engine = make_engine(
        demo.MODEL_DIR, kv_cache_memory_bytes=16 << 20, max_num_batched_tokens=BLOCK, max_num_seqs=1
    )
    vocabulary = engine.vocabulary
    grammars = Counted(lambda: TOKENIZER, vocabulary.size, vocabulary.eos_token_ids)
    engine.grammars = grammars
    policy = make_policy(SchedulingConfig(rt_headroom=0.0, be_share=0.0))
    worker = PrefillWorker(engine, LiveTransfers(engine.cache.parts, Epoch(1)), policy, Estimate(COST))
    worker.use_pool(np.zeros((8, engine.cache.format.block_bytes), dtype=np.uint8))
    news: list[NewTokens] = []

    def step() -> None:
        for message in worker.step()[0]:
            news.extend(message.news if isinstance(message, PrefillReport) else ())

    choice = StructuredOutputsParams(choice=["red", "green"])
    params = SamplingParams(temperature=0, structured_outputs=choice)
    worker.on(Prefill([work(PATIENT, 0, params, Deadlines())]))
    deadline_s = time.monotonic() + 60
    while not (prompt := worker._requests.get(PATIENT)) or not prompt.request.num_computed:
        step()
        assert time.monotonic() < deadline_s
    now = Deadlines(is_rt=True, first_due_s=time.monotonic() + 1, tbt_s=0.1)
    worker.on(Prefill([work(URGENT, 4, SamplingParams(temperature=0), now)]))
    while len(news) < 2 or engine.num_unfinished:
        step()
        assert time.monotonic() < deadline_s
    assert [each.key for each in news] == [URGENT, PATIENT]
    assert TOKENIZER.decode(news[1].tokens, skip_special_tokens=True) in (
        "r",
        "re",
        "red",
        "g",
        "gr",
        "green",
    )
    assert grammars.num_compiled == 1 and not worker.prompts._matchers
    worker.close()
    worker.schedule.check_idle()
    engine.check_idle()
