"""The parts of an answer that only completions have: echoed prompts, log-probabilities with offsets, and `best_of`.

For `best_of`, more choices are generated than asked for, and the most likely ones are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.generation.generation import ChoiceDelta
from alignedserve.gateway.http.json_pieces import Columns, Json, Piece, object_of
from alignedserve.gateway.openai.choices_builder import ChoicesBuilder, CollectedChoice
from alignedserve.gateway.openai.token_logprobs import TextOffsets, completion_logprobs, echoed_logprobs


@dataclass
class CompletionResponseBuilder(ChoicesBuilder):
    # Choices that are generated per prompt, and choices that the answer shows.
    num_made: int = 1
    num_given: int = 1
    # The text before the choices of each prompt. None: no echo.
    echoes: Sequence[str] | None = None
    # Where the texts of each choice's tokens begin.
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _given(self) -> dict[int, CollectedChoice]:
        if self.num_given == self.num_made:
            return self._choices
        likelihood = {index: choice.likelihood for index, choice in self._choices.items()}
        places = _best_places(likelihood, self.num_made, self.num_given)
        return {place: self._choices[index] for index, place in places.items()}

    def _whole_choice(self, index: int, choice: CollectedChoice) -> Iterator[Piece]:
        number = index // self.num_given
        body: Json = {
            "index": index,
            "text": self._echo(number) + "".join(choice.texts),
            "finish_reason": choice.finish_reason,
        }
        members: dict[str, Iterable[Piece]] = {}
        # The prompt's log-probabilities come with its first choice.
        of_prompt = self._choices[number * self.num_made].prompt_logprobs
        if self.num_logprobs is None:
            body["logprobs"] = None
        else:
            members["logprobs"] = self._all_logprobs(number, of_prompt, choice.logprobs)
        members |= self._prompt_logprobs(self.prompts[number], of_prompt)
        members |= choice.token_ids.members() | self._prompt_ids(self.prompts[number])
        return object_of(body, members)

    def _opening(self, first: ChoiceDelta) -> Iterator[Piece] | None:
        if self.echoes is None:
            return None
        number = first.index // self.num_made
        body: Json = {"index": first.index, "text": self._echo(number), "finish_reason": None}
        if self.num_logprobs is None:
            return object_of(body | {"logprobs": None}, {})
        return object_of(body, {"logprobs": self._all_logprobs(number, first.prompt_logprobs, Columns())})

    def _all_logprobs(self, number: int, packed: bytes, own: Columns) -> Iterator[Piece]:
        """Writes a choice's log-probabilities, after those of the echo."""
        if self.echoes is not None:
            found = Columns()
            of_prompt = echoed_logprobs(
                self.prompts[number],
                packed,
                self.num_logprobs or 0,
                self.model.token_bytes,
                self.model.token_text,
            )
            for some in of_prompt:
                found.add(some)
                yield b""
            found.extend(own)
            own = found
        yield from own.pieces()

    def _echo(self, number: int) -> str:
        """Returns the text before the choices of a prompt."""
        return "" if self.echoes is None else self.echoes[number]

    def _chunk_choice(self, delta: ChoiceDelta, logprobs: Json | None) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _first_members(self, first: ChoiceDelta) -> dict[str, Iterable[Piece]]:
        return self._prompt_ids(self.prompts[first.index // self.num_made])

    def _logprobs(self, delta: ChoiceDelta) -> Json:
        # Text appears with its last token: the offsets of tokens that arrive together are counted from there.
        offset = len(self._echo(delta.index // self.num_made)) + self._lengths.get(delta.index, 0)
        if delta.index not in self._offsets:
            self._offsets[delta.index] = TextOffsets(self.model.token_bytes)
        offsets = self._offsets[delta.index].append(delta.token_ids, offset)
        num = self.num_logprobs or 0
        return completion_logprobs(delta.token_ids, delta.logprobs, num, offsets, self.model.token_text)


def _best_places(likelihood: Mapping[int, float], num_made: int, num_kept: int) -> dict[int, int]:
    """Maps the numbers of the kept choices to their numbers in the answer: the most likely `num_kept` of each prompt's
    `num_made` choices, the best first."""
    places: dict[int, int] = {}
    for first in range(0, max(likelihood) + 1, num_made):
        made = sorted(range(first, first + num_made), key=lambda index: -likelihood[index])
        new_first = first // num_made * num_kept
        places |= {index: new_first + rank for rank, index in enumerate(made[:num_kept])}
    return places
