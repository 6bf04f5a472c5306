"""The offline API: `LLM(model).generate(prompts)`. Scripts for vLLM run with only the import changed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, cast

from tqdm import tqdm

from alignedserve.demo import directory_of
from alignedserve.engine.build import build_engine
from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import adapter_id
from alignedserve.engine.request import check_request
from alignedserve.instance.profile.make import cost_of
from alignedserve.kv.format import check_pool_kv_dtype, check_verify_blocks
from alignedserve.models.lora import other_bases
from alignedserve.offline.collect import SequenceCollector
from alignedserve.offline.embeddings import EmbeddingRequestOutput, embeddings_of
from alignedserve.offline.host_memory import scratch_blocks
from alignedserve.offline.local_instance import LocalInstance, LocalRequest
from alignedserve.offline.lora_request import Asked, Modules, adapters_of, texts_of
from alignedserve.offline.outputs import CompletionOutput, RequestOutput
from alignedserve.offline.vllm_options import without_vllm_options
from alignedserve.protocol.messages import AdapterAt
from alignedserve.protocol.pooling import NO_SAMPLING
from alignedserve.sampling_params import MAX_SEED, SamplingParams, child_seed
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import check_policy, make_policy
from alignedserve.text.bad_words import with_bad_word_ids
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.timing.estimate import Estimate
from alignedserve.types import InvalidRequest, RequestId

logger = logging.getLogger(__name__)

# A prompt is text, {"prompt": text}, {"prompt_token_ids": ids} or ids.
Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class _PromptJob:
    """One prompt of a generate call and its n sequences."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    # Name of the adapter; empty for none.
    adapter: str = ""
    sequences: list[SequenceCollector] = field(default_factory=list)
    # The request of the first sequence.
    request: LocalRequest | None = None

    @property
    def is_finished(self) -> bool:
        return all(sequence.output.finished() for sequence in self.sequences)

    def result(self) -> RequestOutput:
        wants_prompt = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.token_ids,
            prompt_logprobs=self.sequences[0].prompt_logprobs if wants_prompt else None,
            outputs=[sequence.output for sequence in self.sequences],
            finished=True,
            num_cached_tokens=self.request.num_found if self.request else 0,
        )


class LLM:
    def __init__(
        self,
        model: str | Path,
        *,
        policy: str = "fcfs",
        preemption_mode: str = "swap",
        cost_profile: str | None = None,
        pool_kv_dtype: str = "auto",
        verify_blocks: float = 0.0,
        lora_modules: Modules = (),
        **options: Any,
    ) -> None:
        """Loads a model: a directory, a name on the Hugging Face hub, or "demo" for the demo model.

        - `policy`: the order in which prompts run, a name in docs/policies.md or package.module:Class.
        - `preemption_mode`, `pool_kv_dtype`, `verify_blocks`: KV of preempted requests, as for `alignedserve serve`.
        - `cost_profile`: file of iteration times, which some policies use. It is measured if it does not exist.
        - `lora_modules`: adapters to load with the model, as {name: path}. `lora_request` of a call names one.
        - `options`: fields of EngineConfig, such as dtype, device, max_model_len and max_num_seqs.

        Raises ValueError for an option that is unknown or not allowed.
        """
        made = make_policy(SchedulingConfig(policy, preemption_mode=preemption_mode))
        options = without_vllm_options(options)
        known = {f.name for f in fields(EngineConfig)} | {
            "policy",
            "preemption_mode",
            "cost_profile",
            "pool_kv_dtype",
            "verify_blocks",
        }
        for name in options:
            if name not in known:
                raise ValueError(f"{name}: unknown option; known: {', '.join(sorted(known))}")
        self.config = EngineConfig(
            model=directory_of(str(model)), lora_modules=texts_of(lora_modules), **options
        )
        check_pool_kv_dtype(pool_kv_dtype, self.config.kv_cache_dtype)
        check_verify_blocks(verify_blocks)
        check_policy(made, self.config, has_profile=cost_profile is not None)
        built = build_engine(self.config)
        for text in other_bases(built.source.name, self.config.adapters):
            logger.warning("%s", text)
        self.engine = built.engine
        # By the names that calls use.
        self._adapters = {name: AdapterAt(name, path) for name, path in self.config.adapters}
        estimate = None
        if cost_profile is not None:
            cost = cost_of(built, self.config, pool_kv_dtype, scratch_blocks, cost_profile)
            estimate = Estimate(cost)
        self.instance = LocalInstance(
            built.engine, made, self.config.enable_prefix_caching, estimate, pool_kv_dtype, verify_blocks
        )
        self.model_config = built.model_config
        self._tokenizer: Tokenizer | None = None
        # A preset has no files, so it has no tokenizer.
        tokenizer = self.config.tokenizer or built.source.directory
        if tokenizer is not None and not self.config.skip_tokenizer_init:
            self._tokenizer = Tokenizer.from_directory(
                tokenizer, where=self.config.tokenizer or self.config.model
            )
        self._seeds = random.Random(self.config.seed)
        self._ids = count()
        # Only one generate call runs at a time: the outputs of a step belong to one call.
        self._running = Lock()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of prompts without any."""
        return SamplingParams()

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError(
                "no tokenizer is loaded: give prompt_token_ids, or don't set skip_tokenizer_init"
            )
        return self._tokenizer

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Loads an adapter for later calls, `max_loras` at most. Raises ValueError if it can't be loaded."""
        places = self.engine.adapter_places
        if places is None or not places.can_load:
            raise InvalidRequest("max_loras: is 0; give LLM(..., max_loras=…) to load adapters later")
        # The last place is for replacements, of which there are none here.
        most = self.config.num_adapter_places - 1
        with self._running:
            if lora_name in self._adapters:
                raise InvalidRequest(f"lora_name: {lora_name!r} is loaded already")
            if len(self._adapters) >= most:
                raise InvalidRequest(f"max_loras: {most} adapters are loaded; unload one first")
            adapter = adapter_id(lora_name, str(next(self._ids)))
            places.set(adapter, places.write(adapter, Path(lora_path).expanduser()))
            self._adapters[lora_name] = AdapterAt(adapter, str(lora_path))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unloads an adapter. Raises ValueError if it is not loaded."""
        places = self.engine.adapter_places
        with self._running:
            if places is None or lora_name not in self._adapters:
                raise InvalidRequest(f"lora_name: {lora_name!r} is not loaded")
            places.remove(self._adapters.pop(lora_name).adapter)

    def reset_prefix_cache(self) -> bool:
        """No further prompt gets KV that is kept now. Returns True, as in vLLM."""
        with self._running:
            self.instance.reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Asked | Sequence[Asked] = None,
    ) -> list[RequestOutput]:
        """Returns one result for each prompt, in their order.

        `lora_request` is the adapter of all prompts, or a list with one for each: a name, a LoRARequest, or None.

        All prompts are checked before any of them runs. InvalidRequest names the first bad one. A request that fails
        later ends with finish_reason "error", and the others continue.
        """
        many = _as_list(prompts)
        adapters = adapters_of(lora_request, len(many), self._adapters)
        jobs = [
            self._job(index, *each)
            for index, each in enumerate(zip(many, _params_for(many, sampling_params), adapters, strict=True))
        ]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Asked | Sequence[Asked] = None,
    ) -> list[RequestOutput]:
        """Generates answers to one or several conversations, with the model's chat template.

        Special tokens in messages are plain text, unless LLM has `allow_special_tokens_in_messages=True`. In prompts
        of `generate` they are tokens.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if is_one else messages)
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in conversations:
            chat = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                parses_special_tokens=self.config.allow_special_tokens_in_messages,
                **(chat_template_kwargs or {}),
            )
            prompts.append({"prompt": chat.text, "prompt_token_ids": tokenizer.rendered_ids(chat)})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling: str = "last",
        lora_request: Asked | Sequence[Asked] = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of each prompt, in their order, as a vector of length 1.

        It is the state of the last token or, with `pooling="mean"`, the mean over all tokens.

        All prompts are checked before any of them runs. InvalidRequest names the first bad one. If a prompt fails
        later, the call fails.
        """
        asked = [self._to_embed(index, prompt, pooling) for index, prompt in enumerate(_as_list(prompts))]
        adapters = adapters_of(lora_request, len(asked), self._adapters)
        with self._running, _progress(len(asked), use_tqdm) as bar, self._emptying():
            return embeddings_of(self.instance, asked, pooling, bar.update, adapters)

    def _to_embed(self, index: int, prompt: Prompt, pooling: str) -> EmbeddingRequestOutput:
        try:
            _, token_ids = self._tokenize(prompt)
            check_request(token_ids, NO_SAMPLING, self.engine.vocabulary, self.engine.max_model_len, pooling)
        except ValueError as error:
            raise InvalidRequest(f"prompts[{index}]: {error}") from error
        return EmbeddingRequestOutput(str(next(self._ids)), token_ids)

    def _job(self, index: int, prompt: Prompt, params: SamplingParams, adapter: str) -> _PromptJob:
        try:
            text, token_ids = self._tokenize(prompt)
            token_ids = params.truncated(token_ids, self.engine.max_model_len)
            if params.bad_words:
                params = with_bad_word_ids(params, self.get_tokenizer())
            check_request(token_ids, params, self.engine.vocabulary, self.engine.max_model_len)
            if params.stop_strings:
                self.get_tokenizer()
            if params.structured_outputs is not None:
                self.engine.grammars.check(params.structured_outputs)
        except ValueError as error:
            raise InvalidRequest(f"prompts[{index}]: {error}") from error
        job = _PromptJob(str(next(self._ids)), text, token_ids, params, adapter)
        job.sequences = [SequenceCollector(i, params, self._tokenizer) for i in range(params.n)]
        return job

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequest(f"prompt keys {sorted(prompt)}: allowed are prompt and prompt_token_ids")
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text)
            if not isinstance(prompt, str):
                return text, _token_ids(prompt)
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        return None, _token_ids(prompt)

    def _run(self, jobs: list[_PromptJob], use_tqdm: bool) -> list[RequestOutput]:
        owners: dict[RequestId, tuple[_PromptJob, SequenceCollector]] = {}
        with self._running, _progress(len(jobs), use_tqdm) as bar, self._emptying():
            for job in jobs:
                self._submit(job, owners)
            while owners:
                for event in self.instance.step():
                    job, sequence = owners[event.request_id]
                    if sequence.add(event):
                        self.instance.abort(event.request_id)
                    if sequence.output.finished():
                        del owners[event.request_id]
                        bar.update(job.is_finished)
        return [job.result() for job in jobs]

    def _submit(self, job: _PromptJob, owners: dict[RequestId, tuple[_PromptJob, SequenceCollector]]) -> None:
        params = job.params
        seed = self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed
        for index, sequence in enumerate(job.sequences):
            request_id = RequestId(f"{job.request_id}-{index}")
            request = self.instance.add_request(
                request_id, job.token_ids, params, child_seed(seed, index), adapter=job.adapter
            )
            job.request = job.request or request
            owners[request_id] = job, sequence

    @contextmanager
    def _emptying(self) -> Iterator[None]:
        """Ends all requests if the block raises, which includes Ctrl-C in the middle of a step."""
        try:
            yield
        except BaseException:
            self.instance.reset()
            raise


def _token_ids(prompt: Any) -> list[int]:
    try:
        return list(prompt)
    except TypeError:
        raise InvalidRequest(f"prompt {prompt!r}: must be text, token ids, or a dict with either") from None


def _progress(total: int, use_tqdm: bool) -> Any:
    return tqdm(
        total=total, desc="Processed prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    is_one = len(prompts) > 0 and all(isinstance(item, int) for item in prompts)
    return cast("list[Prompt]", [prompts] if is_one else list(prompts))


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    for item in params:
        if not isinstance(item, SamplingParams):
            raise InvalidRequest(
                f"sampling_params holds {item!r}: must be a SamplingParams, or one per prompt"
            )
    if len(params) != len(prompts):
        raise InvalidRequest(
            f"sampling_params: {len(params)} given for {len(prompts)} prompts; one or one each"
        )
    return params


__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
