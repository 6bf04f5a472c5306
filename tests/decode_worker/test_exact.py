"""Through a prefill and a decode instance, whatever moves: the tokens that the engine alone gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignedserve.engine.outputs import TokenOutput
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from tests.engine.helpers import greedy_params, make_engine, run, tokens
from tests.island import Entry, Island
from tests.scheduling import dropping
from tests.tiny_models import MAX_LEN, VOCAB_SIZE, greedy, prompts

Directory = Callable[[str], Path]
BACKENDS = ["torch", "cpu"]
# of the tiny models' KV at 16 tokens per block: 3 layers, k and v, 2 heads of 16 float32
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4


def evict_every(num_turns: int, num_victims: int = 2) -> Callable[[Island], None]:
    def meddle(island: Island) -> None:
        if island.num_turns % num_turns == 0:
            for entry in island.in_place("running")[:num_victims]:
                island.evict(entry)

    return meddle


def lose_kv_every(num_turns: int) -> Callable[[Island], None]:
    """What an instance's death leaves: some of the KV is in the pool, the rest has to be computed again."""

    def meddle(island: Island) -> None:
        for entry in island.in_place("pooled"):
            if island.num_turns % num_turns == entry.key % num_turns:
                island.num_recomputed += 1
                entry.num_cached, entry.place = entry.num_cached * (entry.key % 5) // 5, "queued"

    return meddle


def all_of(*meddlers: Callable[[Island], None]) -> Callable[[Island], None]:
    def meddle(island: Island) -> None:
        for each in meddlers:
            each(island)

    return meddle


# Each backend is among them each time.
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama-gqa-tied", "mistral-window", "gemma3", "opt", "qwen3"])
def test_greedy_tokens_are_transformers(tiny_model: Directory, family: str, backend: str) -> None:
    island = Island(tiny_model(family), attention_backend=backend)
    assert island.run(prompts(), [greedy_params()] * len(prompts())) == greedy(tiny_model(family))


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize(
    "options",
    [
        {"prefill": {"max_num_batched_tokens": 40, "max_num_seqs": 4}},
        {"block_size": 8, "prefill": {"max_num_batched_tokens": 23}},
        {"decode": {"max_num_seqs": 3}},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_evictions_every_few_iterations_change_nothing(
    tiny_model: Directory, backend: str, options: dict[str, Any]
) -> None:
    directory = tiny_model("llama-gqa-tied")
    island = Island(directory, attention_backend=backend, meddle=evict_every(3), **options)
    assert island.run(prompts(), [greedy_params()] * len(prompts())) == greedy(directory)
    assert island.num_evicted > 20


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["mistral-window", "ministral", "gpt-oss-listed"])
def test_what_is_behind_the_window_is_not_moved_and_changes_nothing(
    tiny_model: Directory, family: str, backend: str
) -> None:
    """Blocks of the pool hold NaN until they are written."""
    directory = tiny_model(family)
    island = Island(
        directory,
        attention_backend=backend,
        meddle=evict_every(7),
        block_size=8,
        prefill={"max_num_batched_tokens": 40, "max_num_seqs": 4},
        decode={"max_num_seqs": 4},
    )
    island.memory[:] = 0xFF
    params = [greedy_params(150)] * len(prompts())
    assert island.run(prompts(), params) == greedy(directory, 150)
    assert island.num_evicted > 20 and 20 <= island.decode.engine.span.window <= 24


def test_too_few_blocks_for_all_evict_and_change_nothing(tiny_model: Directory) -> None:
    """A decode instance with room for one of the longest, and nine to run."""
    directory = tiny_model("qwen2")
    island = Island(
        directory,
        decode={"kv_cache_memory_bytes": BLOCK_BYTES * MAX_LEN // 16},
        policy=make_policy(SchedulingConfig(evict_ahead=4, admit_ahead=4)),
    )
    assert island.run(prompts(), [greedy_params()] * len(prompts())) == greedy(directory)
    assert island.num_evicted > 0 and any(report.wants_evicted for report in island.reports)


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_that_was_lost_is_computed_again_and_changes_nothing(tiny_model: Directory, backend: str) -> None:
    directory = tiny_model("llama-gqa-tied")
    meddle = all_of(evict_every(4), lose_kv_every(5))
    island = Island(
        directory, attention_backend=backend, meddle=meddle, prefill={"max_num_batched_tokens": 40}
    )
    assert island.run(prompts(), [greedy_params()] * len(prompts())) == greedy(directory)
    assert island.num_recomputed > 5


def test_a_decode_instance_computes_what_is_missing_itself(tiny_model: Directory) -> None:
    directory = tiny_model("llama-gqa-tied")

    def lose(island: Island) -> None:
        for entry in island.in_place("pooled"):
            entry.num_cached = max(1, entry.num_cached - 11 * entry.key)

    island = Island(
        directory,
        decode={"max_num_batched_tokens": 32},
        meddle=all_of(evict_every(5), lose),
    )
    assert island.run(prompts(), [greedy_params()] * len(prompts())) == greedy(directory)


def test_who_leaves_without_its_kv_is_computed_again_and_changes_nothing(tiny_model: Directory) -> None:
    """A decode instance with room for one of the longest, and nine to run."""
    directory = tiny_model("llama-gqa-tied")
    island = Island(
        directory,
        decode={"kv_cache_memory_bytes": BLOCK_BYTES * MAX_LEN // 16},
        policy=make_policy(SchedulingConfig(dropping.NAME, evict_ahead=1, admit_ahead=1)),
    )
    assert island.run(prompts(), [greedy_params()] * len(prompts())) == greedy(directory)
    assert island.num_dropped > 0 and not island.num_evicted


SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=2, max_tokens=40, logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.3, logprobs=0),
    SamplingParams(temperature=1.2, seed=4, max_tokens=40, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(
        temperature=1.0, seed=5, max_tokens=40, min_p=0.05, stop_token_ids=list(range(0, VOCAB_SIZE, 9))
    ),
    SamplingParams(
        temperature=1.0, seed=6, max_tokens=40, min_tokens=10, stop_token_ids=list(range(0, VOCAB_SIZE, 3))
    ),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=2, logit_bias={7: 100.0}),
    SamplingParams(temperature=1.0, seed=7, max_tokens=None, frequency_penalty=2.0),
]


@pytest.mark.drawn(one_in=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sampling_logprobs_and_ends_are_the_engines(tiny_model: Directory, backend: str) -> None:
    directory = tiny_model("llama-gqa-tied")
    alone = run(make_engine(directory, attention_backend=backend), prompts(), SAMPLED)
    island = Island(
        directory,
        attention_backend=backend,
        meddle=all_of(evict_every(2, num_victims=3), lose_kv_every(7)),
        prefill={"max_num_batched_tokens": 40},
    )
    entries = [island.submit(prompt, params) for prompt, params in zip(prompts(), SAMPLED, strict=True)]
    island.finish()
    assert [entry.output for entry in entries] == tokens(alone)
    assert island.num_evicted > 20
    for entry, outputs in zip(entries, alone, strict=True):
        assert_same_ending(entry, outputs)
        assert_same_logprobs(entry, outputs)


def assert_same_ending(entry: Entry, outputs: list[TokenOutput]) -> None:
    last = outputs[-1]
    assert (entry.news[-1].finish_reason, entry.news[-1].stop_reason) == (
        last.finish_reason,
        last.stop_reason,
    )
    assert all(news.finish_reason is None for news in entry.news[:-1])


def assert_same_logprobs(entry: Entry, outputs: list[TokenOutput]) -> None:
    found = [logprob for news in entry.news for logprob in news.logprobs]
    wanted = [output.logprobs for output in outputs if output.logprobs]
    assert len(found) == len(wanted)
    for (logprob, rank, likeliest), known in zip(found, wanted, strict=True):
        assert (logprob, rank) == (pytest.approx(known.logprobs[0], abs=1e-5), known.ranks[0])
        assert list(likeliest) == known.token_ids[1:]
        assert list(likeliest.values()) == pytest.approx(known.logprobs[1:], abs=1e-5)
