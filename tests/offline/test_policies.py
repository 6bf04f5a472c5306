"""Every policy without a server: the tokens of transformers, whichever request leaves, and whenever it comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.policies import POLICIES
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policy import ColocatedPart, DecodePart
from alignedserve.timing.estimate import Estimate
from tests.engine.helpers import greedy_params, make_instance, run, tokens
from tests.tiny_models import VOCAB_SIZE, greedy, prompts

Directory = Callable[[str], Path]
FAMILY = "llama-gqa-tied"
# three layers of keys and values, two heads of 16 float32 numbers, 16 tokens
BLOCK_BYTES = 3 * 2 * 2 * 16 * 4 * 16
NUM_BLOCKS = 30
MAX_MODEL_LEN = 384
NUM_SEEDED = 3


def make_llm(directory: Path, **options: object) -> LLM:
    return LLM(
        str(directory),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        skip_tokenizer_init=True,
        use_tqdm=False,
        **options,  # type: ignore[arg-type]
    )


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Those that transformers answered, and behind each some that are seeded and outgrow the room they began in."""
    dice, found = random.Random(1), []
    for prompt in prompts():
        found.append((prompt, greedy_params()))
        for _ in range(NUM_SEEDED):
            some = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 60))]
            params = SamplingParams(seed=len(found), max_tokens=dice.randint(60, 200), ignore_eos=True)
            found.append((some, params))
    return found


def answers(llm: LLM) -> list[list[int]]:
    results = llm.generate([each for each, _ in asked()], [each for _, each in asked()], use_tqdm=False)
    llm.instance.check_idle()
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def expected(tiny_model: Directory) -> list[list[int]]:
    """With room for all."""
    found = answers(make_llm(tiny_model(FAMILY)))
    assert found[:: NUM_SEEDED + 1] == greedy(tiny_model(FAMILY))
    return found


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first that needs it measures it."""
    return str(tmp_path_factory.mktemp("profile") / "tiny.json")


# The default one with each of two other values in turn.
some_policies = pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=pytest.mark.drawn(one_in=2 if name == "aligned" else 5)) for name in POLICIES],
)


@pytest.mark.parametrize("is_profiled", [False, True], ids=["without a cost model", "with one"])
@some_policies
def test_tokens_are_the_same_where_requests_have_to_leave(
    tiny_model: Directory, expected: list[list[int]], profile: str, policy: str, is_profiled: bool
) -> None:
    llm = make_llm(
        tiny_model(FAMILY),
        policy=policy,
        cost_profile=profile if is_profiled else None,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
    )
    assert answers(llm) == expected
    assert llm.instance.num_evictions > 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "defer"])
@some_policies
def test_tokens_are_the_same_however_kv_is_preempted(
    tiny_model: Directory, expected: list[list[int]], profile: str, policy: str, mode: str
) -> None:
    llm = make_llm(
        tiny_model(FAMILY),
        policy=policy,
        preemption_mode=mode,
        cost_profile=profile,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
    )
    assert answers(llm) == expected
    num_kept, num_dropped = llm.instance.num_evictions, llm.instance.num_drops
    assert (num_kept == 0 and num_dropped > 5) if mode == "recompute" else (num_kept > 5 and num_dropped == 0)


def test_an_unknown_mode_is_one_line(tiny_model: Directory) -> None:
    with pytest.raises(ValueError, match=r"^preemption_mode='keep': must be one of swap, recompute, defer$"):
        make_llm(tiny_model(FAMILY), preemption_mode="keep")


def test_an_unknown_policy_is_one_line(tiny_model: Directory) -> None:
    with pytest.raises(ValueError, match=r"^policy='lifo': must be one of aligned, .*bros.*Class$"):
        make_llm(tiny_model(FAMILY), policy="lifo")


class NewOnesFirst(Fcfs):
    """Each request leaves once, and comes back when all others have begun and left."""

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return LeavesOnce(limits, self.config)


class LeavesOnce(ColocatedPart):
    def plan(self, at: DecodeBoundary) -> None:
        at.evict(each for each in at.running if not each.num_pooled)
        decoding.go_on(at, at.running)
        new = [each for each in at.requests if not each.num_pooled]
        have_all_left = not new and all(each.num_pooled for each in at.running)
        decoding.begin_in_order(at, self.config, at.requests if have_all_left else new)


def test_there_is_host_memory_for_all_that_can_have_begun(tiny_model: Directory) -> None:
    """Those that wait may all begin, one after the other, before any of them comes back."""
    instance = make_instance(
        tiny_model(FAMILY),
        NewOnesFirst,
        max_num_seqs=2,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
    )
    some = [[number] * (MAX_MODEL_LEN - 8) for number in range(8)]
    found = tokens(run(instance, some, greedy_params(8)))
    assert found == tokens(run(make_instance(tiny_model(FAMILY)), some, greedy_params(8)))
    assert instance.num_evictions == len(some)
