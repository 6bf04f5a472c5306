"""A live instance that keeps the inputs of layers of some requests: tokens are those of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve import LLM
from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest
from alignedserve.offline.local_instance import LocalInstance
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.timing.estimate import Estimate
from tests.engine.helpers import greedy_params, make_engine, run, tokens
from tests.scheduling.keeping_inputs import NAME
from tests.sim.islands import COST
from tests.tiny_models import greedy, prompts

Directory = Callable[[str], Path]
# 40 blocks of 16 tokens of 3 layers of K and V of 64 float32, and 32, the longest request's, of one layer.
NUM_BYTES = (40 * 3 + 32) * 16 * 2 * 64 * 4
# Restoring costs next to nothing, so that whoever does not fit with KV has inputs.
CHEAP = Estimate(replace(COST, restored_token_s=1e-12))


class Counting:
    """Counts the requests that begin with inputs, and with KV."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = {True: 0, False: 0}
        adopt = engine.adopt

        def counting(new: NewRequest) -> Any:
            request = adopt(new)
            self.num[request is not None and not request.layout.holds_kv] += 1
            return request

        monkeypatch.setattr(engine, "adopt", counting)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("policy", ["apt", NAME])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_mixed_batches_of_any_policy_match_transformers(
    tiny_model: Directory,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    backend: str,
    enable_prefix_caching: bool,
) -> None:
    directory = tiny_model("opt")
    engine = make_engine(
        directory, attention_backend=backend, hidden_cache=True, kv_cache_memory_bytes=NUM_BYTES
    )
    counting = Counting(engine, monkeypatch)
    made = make_policy(SchedulingConfig(policy, admit_ahead=8))
    instance = LocalInstance(engine, made, enable_prefix_caching, CHEAP)
    # Twice, so that prompts find what others have left.
    for _ in range(2):
        assert tokens(run(instance, prompts(), greedy_params())) == greedy(directory)
    assert counting.num[True] > 0 and counting.num[False] > 0
    if policy == NAME:
        assert instance.num_drops > 0


def test_what_was_kept_as_inputs_is_shared_with_nobody(tiny_model: Directory) -> None:
    """The same prompt again finds KV only of a request that had KV."""
    engine = make_engine(tiny_model("opt"), attention_backend="torch", hidden_cache=True)
    instance = LocalInstance(engine, make_policy(SchedulingConfig(NAME)), enable_prefix_caching=True)
    prompt, few = prompts()[8], greedy_params(2)
    found: list[int] = []
    # The second and the fourth one have inputs.
    for _ in range(5):
        request = instance.add_request(f"r{len(found)}", prompt, few, 0)  # type: ignore[arg-type]
        while instance.num_unfinished:
            instance.step()
        found.append(request.num_found)
    # All but the prompt's last tokens are in full blocks.
    assert found == [0, 0, 288, 0, 288]
    instance.check_idle()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "fcfs", "cost_profile": "profile.json"}, "hidden_cache: policy fcfs can't keep inputs"),
        ({"policy": "apt"}, "hidden_cache: needs a cost_profile"),
        (
            {"policy": "apt", "cost_profile": "profile.json", "family": "qwen2"},
            "hidden_cache: this model's",
        ),
    ],
    ids=str,
)
def test_what_can_not_be_is_refused_by_name(
    tiny_model: Directory, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    directory = tiny_model(options.pop("family", "opt"))
    if "cost_profile" in options:
        options["cost_profile"] = str(tmp_path / options["cost_profile"])
    with pytest.raises(ValueError, match=named):
        LLM(str(directory), hidden_cache=True, skip_tokenizer_init=True, use_tqdm=False, **options)
