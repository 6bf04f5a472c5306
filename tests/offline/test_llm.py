"""The offline API on the demo model, used as in a script written for vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignedserve import LLM, LoRARequest, SamplingParams, demo
from alignedserve.demo import tasks
from alignedserve.engine.outputs import TokenOutput
from alignedserve.offline.vllm_options import without_vllm_options
from alignedserve.types import InvalidRequest
from tests.tiny_adapters import merge, write_adapter
from tests.tiny_models import CONFIGS, embeddings, greedy, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=300)
ALPHABET = [{"role": "user", "content": "List the letters from c to h."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", max_num_seqs=64, use_tqdm=False)
    yield llm
    llm.instance.check_idle()


def test_chat_answers_and_ends_by_itself(llm: LLM) -> None:
    [result] = llm.chat(ALPHABET, GREEDY, use_tqdm=False)
    output = result.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("c, d, e, f, g, h", "stop", None)
    assert output.token_ids[-1] == llm.get_tokenizer().eos_token_id
    assert result.finished and result.prompt_token_ids == llm.get_tokenizer().chat_ids(ALPHABET)


def test_each_prompt_may_have_an_adapter(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    paths = {name: str(write_adapter(tmp_path / name, model, seed)) for seed, name in enumerate(("a", "b"))}
    adapted = LLM(str(model), lora_modules=paths, enable_lora=True, skip_tokenizer_init=True, use_tqdm=False)
    merged = {name: merge(tmp_path / f"{name}-merged", model, Path(path)) for name, path in paths.items()}
    asked = [None, "a", LoRARequest("b", 2, paths["b"]), LoRARequest("a"), "b", None, "a", "b", None]
    names = ["", "a", "b", "a", "b", "", "a", "b", ""]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    results = adapted.generate(prompts(), params, lora_request=asked)
    expected = [greedy(merged.get(name, model))[index] for index, name in enumerate(names)]
    assert [result.outputs[0].token_ids for result in results] == expected
    results = adapted.generate(prompts(), params, lora_request="b")
    assert [result.outputs[0].token_ids for result in results] == greedy(merged["b"])
    found = adapted.embed(prompts(), use_tqdm=False, lora_request="a")
    vectors = [each.outputs.embedding for each in found]
    assert np.allclose(vectors, embeddings(merged["a"], "last"), atol=1e-4)
    for wrong, message in (
        ("c", r"lora_request: 'c' is not loaded: .*LLM\(..., lora_modules={'c': 'path'}\); loaded are a, b"),
        (LoRARequest("a", 1, "/x"), "lora_request: the path of 'a' is '/x'; it was loaded from"),
        (["a"], "lora_request: 1 given for 9 prompts; one or one each"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            adapted.generate(prompts(), params, lora_request=wrong)
    adapted.instance.check_idle()


def test_adapters_come_and_go_and_kept_kv_is_of_one_alone(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen2")
    paths = {name: write_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("a", "b"))}
    llm = LLM(str(model), max_loras=1, skip_tokenizer_init=True, use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def said(of: LLM, name: str) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in of.generate(prompts(), params, lora_request=name)]

    for name, path in paths.items():
        llm.load_lora_adapter("mine", path)
        started = LLM(str(model), lora_modules={"x": str(path)}, skip_tokenizer_init=True, use_tqdm=False)
        assert said(llm, "mine") == said(started, "x"), name
        with pytest.raises(InvalidRequest, match="'mine' is loaded already"):
            llm.load_lora_adapter("mine", path)
        with pytest.raises(InvalidRequest, match="max_loras: 1 adapters are loaded"):
            llm.load_lora_adapter("other", path)
        llm.unload_lora_adapter("mine")
        with pytest.raises(InvalidRequest, match="'mine' is not loaded"):
            said(llm, "mine")
    with pytest.raises(InvalidRequest, match="'mine' is not loaded"):
        llm.unload_lora_adapter("mine")
    with pytest.raises(InvalidRequest, match="is not a directory"):
        llm.load_lora_adapter("mine", tmp_path / "none")
    llm.instance.check_idle()


def test_a_reset_prefix_cache_has_nothing(llm: LLM) -> None:
    prompt = list(range(5, 55))
    params = SamplingParams(temperature=0, max_tokens=3)
    [first] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    [again] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert again.num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    [anew] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert anew.num_cached_tokens == 0
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == anew.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="give LLM"):
        llm.load_lora_adapter("mine", "/adapters/mine")


def test_held_out_tasks_are_answered_and_their_length_is_known(llm: LLM) -> None:
    rng = random.Random(3)
    examples = [task.generate(rng, held_out=True) for task in tasks.TASKS.values() for _ in range(8)]
    results = llm.chat(
        [[{"role": "user", "content": example.prompt}] for example in examples], GREEDY, use_tqdm=False
    )
    right = [
        tasks.check(example, result.outputs[0].text)
        for example, result in zip(examples, results, strict=True)
    ]
    assert sum(right) >= 0.95 * len(right)
    for example, result, is_right in zip(examples, results, right, strict=True):
        if is_right:
            assert len(result.outputs[0].token_ids) == tasks.expected_output_len(example)


def test_prompts_may_be_text_or_ids(llm: LLM) -> None:
    text = llm.get_tokenizer().apply_chat_template(ALPHABET)
    ids = llm.get_tokenizer().chat_ids(ALPHABET)
    forms: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids]
    texts = {llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms}
    assert texts == {"c, d, e, f, g, h"}
    both: list[Any] = [text, {"prompt_token_ids": ids}]
    many = llm.generate(both, [GREEDY, GREEDY], use_tqdm=False)
    assert [result.prompt for result in many] == [text, None]


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({"stop": "f"}, "c, d, e, ", "f"),
        ({"stop": ["z", "e, f"]}, "c, d, ", "e, f"),
        ({"stop": ["g", "e"], "include_stop_str_in_output": True}, "c, d, e", "e"),
        ({"stop": "d", "min_tokens": 6}, "c, d, e, f, g, h", None),
    ],
)
def test_stop_strings(llm: LLM, changes: dict[str, Any], text: str, reason: str | None) -> None:
    [result] = llm.chat(ALPHABET, SamplingParams(temperature=0, max_tokens=99, **changes), use_tqdm=False)
    output = result.outputs[0]
    assert (output.text, output.stop_reason, output.finish_reason) == (text, reason, "stop")
    llm.instance.check_idle()


def test_stop_string_beginning_in_one_token_and_ending_in_another(llm: LLM) -> None:
    message = [{"role": "user", "content": 'Spell the word "banana".'}]
    [result] = llm.chat(message, SamplingParams(temperature=0, max_tokens=99, stop="a-n-a-n"), use_tqdm=False)
    assert (result.outputs[0].text, result.outputs[0].stop_reason) == ("b-", "a-n-a-n")


def test_n_gives_different_continuations_and_the_first_is_the_one_of_n_1(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 20.0, "seed": 5, "max_tokens": 30, "ignore_eos": True}
    [alone] = llm.chat(ALPHABET, SamplingParams(**params), use_tqdm=False)
    [four] = llm.chat(ALPHABET, SamplingParams(n=4, **params), use_tqdm=False)
    assert [output.index for output in four.outputs] == [0, 1, 2, 3]
    assert four.outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(output.token_ids) for output in four.outputs}) == 4


def test_logprobs_are_shaped_as_vllms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [result] = llm.chat(ALPHABET, params, use_tqdm=False)
    output = result.outputs[0]
    assert output.logprobs is not None and result.prompt_logprobs is not None
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert position[token].rank == 1 and len(position) == 2
    assert output.logprobs[0][output.token_ids[0]].decoded_token == "c"
    assert output.cumulative_logprob == pytest.approx(
        sum(
            position[token].logprob for token, position in zip(output.token_ids, output.logprobs, strict=True)
        )
    )
    assert result.prompt_logprobs[0] is None
    for token, found in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert found is not None and token in found


def test_a_bad_prompt_is_named_and_nothing_has_run(llm: LLM) -> None:
    for bad, words in (("", "empty"), ([999999], "999999"), ([-1], "-1"), ({"text": "x"}, "text"), (7, "7")):
        asked: list[Any] = ["hello", bad, "hello"]
        with pytest.raises(InvalidRequest, match=rf"prompts\[1\].*{words}"):
            llm.generate(asked, GREEDY, use_tqdm=False)
        llm.instance.check_idle()
    for params in ({"temperature": 0}, [None], "greedy"):
        with pytest.raises(InvalidRequest, match="sampling_params holds .* must be a SamplingParams"):
            llm.generate("x", params)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="2 given for 1"):
        llm.generate(["x"], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="messages"):
        llm.chat([{"role": "user"}], GREEDY, use_tqdm=False)


def test_an_interrupted_call_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.instance.step, iter(range(3))

    def interrupted() -> list[TokenOutput]:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.instance, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.chat([ALPHABET] * 5, GREEDY, use_tqdm=False)
    llm.instance.check_idle()


@pytest.mark.parametrize("method", ["enter", "leave", "free"])
def test_an_interrupt_halfway_through_a_move_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    owner = llm.instance._worker.memory if method == "free" else llm.engine._table

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, method, interrupt)
        llm.chat([ALPHABET] * 5, GREEDY, use_tqdm=False)
    llm.instance.check_idle()
    [result] = llm.chat(ALPHABET, GREEDY, use_tqdm=False)
    assert result.outputs[0].text == "c, d, e, f, g, h"


def test_calls_from_several_threads_wait_for_each_other(llm: LLM) -> None:
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(llm.chat, [ALPHABET] * 3, GREEDY, use_tqdm=False) for _ in range(8)]
    texts = {result.outputs[0].text for call in calls for result in call.result()}
    assert texts == {"c, d, e, f, g, h"}


def test_parameters_may_be_changed_before_they_are_used(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=99)
    params.stop = ["f"]
    [result] = llm.chat(ALPHABET, params, use_tqdm=False)
    assert result.outputs[0].text == "c, d, e, "


def test_options_of_vllm_scripts_are_understood() -> None:
    harmless: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "trust_remote_code": True,
    }
    llm = LLM("demo", enforce_eager=True, use_tqdm=False, **harmless)
    assert llm.config.enforce_eager and llm.config.gpu_memory_utilization == 0.5
    with pytest.raises(ValueError, match="pipeline_parallel_size=2: only 1"):
        LLM(str(demo.MODEL_DIR), pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="max_num_seq: unknown.*max_num_seqs"):
        LLM(str(demo.MODEL_DIR), max_num_seq=2)
    # Ranks have no places for adapters, but scripts for vLLM name them beside --enable-lora.
    ranks = {"tensor_parallel_size": 2}
    assert without_vllm_options({"max_loras": 4, **ranks}) == ranks


def test_a_preset_with_dummy_weights_runs_without_a_tokenizer() -> None:
    llm = LLM("opt-125m", load_format="dummy", max_model_len=64, use_tqdm=False)
    [result] = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 3 and result.outputs[0].text == ""
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.generate("text", use_tqdm=False)


def test_a_model_without_a_tokenizer_says_so(tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model(next(iter(CONFIGS)))
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(str(directory), use_tqdm=False)
    LLM(str(directory), skip_tokenizer_init=True, use_tqdm=False)


def test_embeddings_are_transformers(tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model("llama-gqa-tied")
    llm = LLM(str(directory), skip_tokenizer_init=True, use_tqdm=False)
    for pooling in ("last", "mean"):
        found = llm.embed(prompts(), use_tqdm=False, pooling=pooling)
        assert [each.prompt_token_ids for each in found] == prompts()
        vectors = np.array([each.outputs.embedding for each in found])
        np.testing.assert_allclose(vectors, embeddings(directory, pooling), atol=2e-5)
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: .*outside the vocabulary"):
        llm.embed([[1], [10**6]])
    llm.instance.check_idle()


def test_bad_words_allowed_tokens_and_a_cut_prompt(llm: LLM) -> None:
    def said(**changes: Any) -> str:
        params = SamplingParams(temperature=0, max_tokens=40, **changes)
        text: str = llm.chat(ALPHABET, params, use_tqdm=False)[0].outputs[0].text
        return text

    plain = said()
    assert "e" in plain and "e" not in said(bad_words=["e"])
    only = llm.get_tokenizer().encode("cd, ")
    assert set(said(allowed_token_ids=only)) <= set("cd, ")
    cut = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=3)
    [result] = llm.generate([[5, 6, 7, 8, 9]], cut, use_tqdm=False)
    assert result.prompt_token_ids == [7, 8, 9]
