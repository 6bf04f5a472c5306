"""`/v1/completions` and `/v1/chat/completions`: from valid bodies to calls, and from calls to answers."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec.structs import replace

from alignedserve.gateway.generation.call import Call, CallContext, ChoiceDelta, TokenUsage
from alignedserve.gateway.generation.chat import chat_call
from alignedserve.gateway.generation.endpoint import (
    Endpoint,
    call_of,
    check_body,
    checked_prompts,
)
from alignedserve.gateway.generation.responding import ANSWERED, RequestBuilder, read_call, respond
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.json_pieces import Columns, Json, Piece, object_of
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.bodies import ChatBody, ChoicesBody, CompletionBody
from alignedserve.gateway.openai.choices_builder import ChoicesBuilder, ChoicesSpec, CollectedChoice, Shown
from alignedserve.gateway.openai.token_logprobs import (
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
)
from alignedserve.gateway.tools.readers import CallPiece, Read, Reader


class ChatSpec(ChoicesSpec, frozen=True, kw_only=True):
    # The text before the content of each choice.
    echo: str = ""

    def builder(self, answering: CallContext) -> ChatResponseBuilder:
        return ChatResponseBuilder(answering, self)


class CompletionSpec(ChoicesSpec, frozen=True, kw_only=True):
    # Choices that are generated per prompt, and choices that the answer shows.
    num_made: int = 1
    num_given: int = 1
    # The text before the choices of each prompt. None: no echo.
    echoes: list[str] | None = None

    def builder(self, answering: CallContext) -> CompletionResponseBuilder:
        return CompletionResponseBuilder(answering, self)


# ---- answers of chats ------------------------------------------------------------------------------------------------


@dataclass
class ChatResponseBuilder(ChoicesBuilder):
    """The parts of an answer that only chats have: a role, reasoning and tool calls parsed from the text, and a list of
    token log-probabilities."""

    spec: ChatSpec
    _readers: dict[int, Reader] = field(default_factory=dict)
    # The number of calls in each choice.
    _num_calls: dict[int, int] = field(default_factory=dict)
    # The ids of calls, with their choices' numbers.
    _call_ids: set[tuple[int, str]] = field(default_factory=set)
    # Reasoning tokens of all choices. None: no output has reasoning.
    _num_reasoning_tokens: int | None = None

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._may_think = self.spec.shows_reasoning and self.spec.reading.new_reader().is_thinking is not None

    def _add_text(self, choice: CollectedChoice, delta: ChoiceDelta) -> None:
        self._num_calls[delta.index] = choice.text.add(self._read(delta))

    def _further_members(self) -> dict[str, Iterable[Piece]]:
        packed = (choice.prompt_logprobs for choice in self._choices.values())
        prompt = self.prompts[0]
        return self._prompt_logprobs(prompt, next(filter(None, packed), b"")) | self._prompt_ids(prompt)

    def _whole_choice(self, index: int, choice: CollectedChoice) -> Iterator[Piece]:
        found = zip(choice.text.calls, choice.text.call_ids, strict=True)
        calls = [self._call_body(index, name, arguments, call_id) for (name, arguments), call_id in found]
        content, reasoning = self.spec.echo + choice.text.content, choice.text.reasoning
        message: Json = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        } | self._thoughts(reasoning)
        body: Json = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "finish_reason": self._reason(index, choice.finish_reason),
        }
        if self.num_logprobs is None:
            return object_of(body | {"logprobs": None}, choice.token_ids.members())
        return object_of(body, {"logprobs": choice.logprobs.pieces()} | choice.token_ids.members())

    def _opening(self, first: ChoiceDelta) -> Iterator[Piece] | None:
        role = {"role": "assistant", "content": self.spec.echo} | self._thoughts("")
        return object_of({"index": first.index, "delta": role, "logprobs": None, "finish_reason": None}, {})

    def _opening_members(self) -> dict[str, Iterable[Piece]]:
        return self._prompt_ids(self.prompts[0])

    def _chunk_choice(self, delta: ChoiceDelta, logprobs: Json | None) -> Json:
        read = self._read(delta)
        new: Json = {"content": read.content} if read.content or logprobs else {}
        new |= self._thoughts(read.reasoning)
        if read.pieces:
            new["tool_calls"] = self._piece_bodies(delta.index, read.pieces)
        return {
            "index": delta.index,
            "delta": new,
            "logprobs": logprobs,
            "finish_reason": self._reason(delta.index, delta.finish_reason),
        }

    def _thoughts(self, text: str) -> Json:
        """Returns the reasoning under both names that clients read: DeepSeek's and SGLang's, and OpenRouter's and
        vLLM's. Empty reasoning is null: clients look the fields up in each chunk. No fields, if the model can't
        reason."""
        return {"reasoning_content": text or None, "reasoning": text or None} if self._may_think else {}

    def _has_news(self, choice: Json) -> bool:
        return any(choice["delta"].values())

    def _read(self, delta: ChoiceDelta) -> Read:
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self.spec.reading.new_reader()
        read = Read()
        for text, num_tokens in delta.steps():
            read.add(reader.feed(text))
            if reader.is_thinking is not None:
                num_thoughts = num_tokens if reader.is_thinking else 0
                self._num_reasoning_tokens = (self._num_reasoning_tokens or 0) + num_thoughts
        if delta.finish_reason is not None:
            read.add(reader.end(is_cut=delta.is_cut))
        if not self.spec.shows_reasoning:
            read.drop_thoughts()
        return read

    def _piece_bodies(self, index: int, pieces: Sequence[CallPiece]) -> list[Json]:
        bodies = []
        for piece in pieces:
            is_new = piece.name is not None
            self._num_calls[index] = self._num_calls.get(index, 0) + is_new
            arguments = {"function": {"arguments": piece.arguments}}
            body = self._call_body(index, piece.name, piece.arguments, piece.id) if is_new else arguments
            bodies.append({"index": self._num_calls[index] - 1} | body)
        return bodies

    def _call_body(self, index: int, name: str | None, arguments: str, call_id: str | None) -> Json:
        """Keeps an id that the model has written, once per choice. The client sends it back with the call's result, and
        the template may show nothing else of the call."""
        if call_id is None or (index, call_id) in self._call_ids:
            call_id = f"call_{secrets.token_hex(12)}"
        self._call_ids.add((index, call_id))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _reason(self, index: int, finish_reason: str | None) -> str | None:
        if finish_reason == "stop" and self._num_calls.get(index):
            return self._readers[index].stop_reason
        return finish_reason

    def _usage(self, usage: TokenUsage) -> Json:
        if self._num_reasoning_tokens is None:
            return usage.body
        return usage.body | {"completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens}}

    def _logprobs(self, delta: ChoiceDelta) -> Json:
        return {"content": chat_logprobs(delta.token_ids, delta.logprobs, self.model, self.text_of)}


# ---- answers of completions ------------------------------------------------------------------------------------------


@dataclass
class CompletionResponseBuilder(ChoicesBuilder):
    """The parts of an answer that only completions have: echoed prompts, log-probabilities with offsets, and `best_of`.

    For `best_of`, more choices are generated than asked for, and the most likely ones are kept."""

    spec: CompletionSpec
    # Where the texts of each choice's tokens begin.
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _given(self) -> dict[int, CollectedChoice]:
        if self.spec.num_given == self.spec.num_made:
            return self._choices
        likelihood = {index: choice.likelihood for index, choice in self._choices.items()}
        places = _best_places(likelihood, self.spec.num_made, self.spec.num_given)
        return {place: self._choices[index] for index, place in places.items()}

    def _whole_choice(self, index: int, choice: CollectedChoice) -> Iterator[Piece]:
        number = index // self.spec.num_given
        body: Json = {
            "index": index,
            "text": self._echo(number) + "".join(choice.texts),
            "finish_reason": choice.finish_reason,
        }
        members: dict[str, Iterable[Piece]] = {}
        # The prompt's log-probabilities come with its first choice.
        of_prompt = self._choices[number * self.spec.num_made].prompt_logprobs
        if self.num_logprobs is None:
            body["logprobs"] = None
        else:
            members["logprobs"] = self._all_logprobs(number, of_prompt, choice.logprobs)
        members |= self._prompt_logprobs(self.prompts[number], of_prompt)
        members |= choice.token_ids.members() | self._prompt_ids(self.prompts[number])
        return object_of(body, members)

    def _opening(self, first: ChoiceDelta) -> Iterator[Piece] | None:
        if self.spec.echoes is None:
            return None
        number = first.index // self.spec.num_made
        body: Json = {"index": first.index, "text": self._echo(number), "finish_reason": None}
        if self.num_logprobs is None:
            return object_of(body | {"logprobs": None}, {})
        return object_of(body, {"logprobs": self._all_logprobs(number, first.prompt_logprobs, Columns())})

    def _all_logprobs(self, number: int, packed: bytes, own: Columns) -> Iterator[Piece]:
        """Writes a choice's log-probabilities, after those of the echo."""
        if self.spec.echoes is not None:
            found = Columns()
            of_prompt = echoed_logprobs(
                self.prompts[number],
                packed,
                self.num_logprobs or 0,
                self.model.token_bytes,
                self.text_of,
            )
            for some in of_prompt:
                found.add(some)
                yield b""
            found.extend(own)
            own = found
        yield from own.pieces()

    def _echo(self, number: int) -> str:
        """Returns the text before the choices of a prompt."""
        return "" if self.spec.echoes is None else self.spec.echoes[number]

    def _chunk_choice(self, delta: ChoiceDelta, logprobs: Json | None) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _first_members(self, first: ChoiceDelta) -> dict[str, Iterable[Piece]]:
        return self._prompt_ids(self.prompts[first.index // self.spec.num_made])

    def _logprobs(self, delta: ChoiceDelta) -> Json:
        # Text appears with its last token: the offsets of tokens that arrive together are counted from there.
        offset = len(self._echo(delta.index // self.spec.num_made)) + self._lengths.get(delta.index, 0)
        if delta.index not in self._offsets:
            self._offsets[delta.index] = TextOffsets(self.model.token_bytes)
        offsets = self._offsets[delta.index].append(delta.token_ids, offset)
        num = self.num_logprobs or 0
        return completion_logprobs(delta.token_ids, delta.logprobs, num, offsets, self.text_of)


def _best_places(likelihood: Mapping[int, float], num_made: int, num_kept: int) -> dict[int, int]:
    """Maps the numbers of the kept choices to their numbers in the answer: the most likely `num_kept` of each prompt's
    `num_made` choices, the best first."""
    places: dict[int, int] = {}
    for first in range(0, max(likelihood) + 1, num_made):
        made = sorted(range(first, first + num_made), key=lambda index: -likelihood[index])
        new_first = first // num_made * num_kept
        places |= {index: new_first + rank for rank, index in enumerate(made[:num_kept])}
    return places


# ---- from bodies to calls --------------------------------------------------------------------------------------------


def completion(body: CompletionBody, model: ServedModel, limits: CallLimits) -> Call[CompletionSpec]:
    """Returns the call of a completion. Raises ApiError and InvalidRequest."""
    with body.naming():
        check_body(body, model, limits)
        params = body.sampling_params()
        limits.check(len(body.prompts), params, body.structure_name)
        is_bounded = params.truncate_prompt_tokens is None
        prompts = [model.prompt_ids(prompt, is_bounded=is_bounded) for prompt in body.prompts]
        prompts = [params.truncated(prompt, model.max_model_len) for prompt in prompts]
        params = checked_prompts(body, prompts, params, model, limits)
        spec = CompletionSpec(
            shown=_shown(body, body.logprobs),
            num_made=params.n,
            num_given=body.n or 1,
            echoes=[model.text_of("prompt", prompt) for prompt in prompts] if body.echo else None,
        )
        call = call_of(body, prompts, params, body.structure_name, model, spec)
        return replace(call, gives_output=not body.is_only_echo)


def chat(body: ChatBody, model: ServedModel, limits: CallLimits) -> Call[ChatSpec]:
    """Returns the call of a chat. Raises ApiError and InvalidRequest."""
    with body.naming():
        conversation = body.conversation()
        call = chat_call(body, conversation, model, limits, ChatSpec(shown=_shown(body, body.num_logprobs)))
        # The last message is checked when the prompt is rendered.
        return replace(call, spec=replace(call.spec, echo=conversation.begun)) if body.echo else call


def _shown(body: ChoicesBody, num_logprobs: int | None) -> Shown:
    return Shown(
        num_logprobs,
        body.prompt_logprobs,
        body.includes_usage,
        body.includes_usage_so_far,
        bool(body.return_token_ids),
        bool(body.return_tokens_as_token_ids),
    )


COMPLETIONS = Endpoint("/v1/completions", CompletionBody, completion, Call[CompletionSpec], in_batches=True)
CHAT = Endpoint("/v1/chat/completions", ChatBody, chat, Call[ChatSpec], in_batches=True)


def completion_routes(request_builder: RequestBuilder) -> APIRouter:
    routes = APIRouter()

    @routes.post(COMPLETIONS.path, responses=ANSWERED, openapi_extra=request_body(CompletionBody))
    async def completions(http: Request) -> Response:
        call = await read_call(http, COMPLETIONS, request_builder)
        return await respond(http, call, request_builder)

    @routes.post(CHAT.path, responses=ANSWERED, openapi_extra=request_body(ChatBody))
    async def chat_completions(http: Request) -> Response:
        call = await read_call(http, CHAT, request_builder)
        return await respond(http, call, request_builder)

    return routes
