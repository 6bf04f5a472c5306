"""Runs the output-length predictor in its own thread, which predicts, learns, saves and restores.

A request waits for its prediction, but not long: after PATIENCE_S it continues without one. The thread has at most one
best-effort request at a time, so a real-time request never waits for a whole batch of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.telemetry.telemetry import RequestStats
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.lengths.corpus import Example, examples, learn
from alignedserve.lengths.owners import Predictors
from alignedserve.lengths.prediction import Prediction
from alignedserve.lengths.predictor import Predictor, make_encoder, teaches
from alignedserve.lengths.state import CorruptState, dump, load
from alignedserve.sampling_params import SamplingParams
from alignedserve.store import Store, StoreAway
from alignedserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Seconds that a call waits for all its predictions, by tier.
PATIENCE_S = {"rt": 0.02, "be": 1.0}
# Finished answers that may be queued on the thread at once. If more end, as those of a call with many choices do, the
# thread learns them one at a time and rests in between. Predictions take precedence, and the event loop needs the
# interpreter.
MAX_LEARNING = 8
LEARNING_REST_S = 0.01
# Answers that may wait to be learned. Further ones are dropped.
MAX_UNLEARNED = 1024
RETRY_S = 1.0
# Seconds that the last save may take. If it fails, little is lost beyond the save before it.
LAST_SAVE_S = 2.0

Result = TypeVar("Result")
# The prediction, the number of tokens of the answer, its finish reason, and the owner of the request.
Answer = tuple[Prediction, int, str, str]


class AnswerLengths:
    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        # Makes empty predictors. None: nothing is predicted.
        self._new: Callable[[], Predictors] | None = None
        # Trains a predictor on the corpus. None: there is no corpus.
        self._teach: Callable[[Predictor], None] | None = None
        # None while the gateway does not run, and while a saved state is loaded.
        self._predictors: Predictors | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lengths")
        self._best_effort = asyncio.Semaphore(1)
        self._learning: set[asyncio.Future[None]] = set()
        self._unlearned: deque[Answer] = deque()
        self._num_unsaved = 0

    def prepare(self, model: ServedModel) -> None:
        """Makes the encoder, which may take seconds. Raises ValueError if that fails, or if the corpus can't be read.
        Safe to repeat."""
        if self._config.predictor == NONE or self._new is not None:
            return
        decode = model.tokenizer.decode if model.tokenizer else None
        encoder = make_encoder(self._config.predictor, self._config.predictor_model, decode)

        def new() -> Predictors:
            return Predictors(encoder, model.max_model_len, self._config.predictor_entries)

        if self._config.corpus is not None:
            self._teach = self._teaching(Path(self._config.corpus).expanduser(), model.tokenizer)
        self._new = new

    def _teaching(self, corpus: Path, tokenizer: Tokenizer | None) -> Callable[[Predictor], None]:
        """Returns a function that trains a predictor on the first lines of a corpus, as many as the predictor has
        entries. Reads the first line at once, so that a wrong file is reported before anything starts."""
        if tokenizer is None:
            raise ValueError("length_corpus: needs text, and this model has no tokenizer")
        prompt_ids = _prompts_of(tokenizer)

        def first_examples(count: int) -> Iterator[Example]:
            try:
                yield from islice(examples(corpus), count)
            except ValueError as error:
                raise ValueError(f"length_corpus='{corpus}': {error}") from error

        def teach(predictor: Predictor) -> None:
            has_room: Counter[bool] = Counter()
            for each in first_examples(self._config.predictor_entries):
                try:
                    prompt = prompt_ids(each.prompt)
                    length = len(tokenizer.encode(each.answer, add_special_tokens=False)) + 1
                except ValueError as error:
                    raise ValueError(f"length_corpus='{corpus}': {each.where}: {error}") from error
                has_room[learn(predictor, prompt, length)] += 1
            logger.info(
                "the lengths of %d answers were learned from %s; %d were skipped, because they exceed %d tokens",
                has_room[True],
                corpus,
                has_room[False],
                predictor.max_model_len,
            )

        for _ in first_examples(1):
            pass
        return teach

    @contextlib.asynccontextmanager
    async def running(self, name: str, store: Store | None) -> AsyncIterator[None]:
        """Predicts and learns while the block runs. `name` is the model's name.

        Without a store, learning starts empty each time. A corpus is learned before the block runs, unless a saved
        state was restored. Raises ValueError if the corpus can't be read."""
        if self._new is None:
            yield
            return
        state, new = f"lengths:{name}", self._new
        predictors = self._predictors = new()
        is_restored, keeping = False, None
        try:
            if self._teach:
                is_restored = store is not None and await self._restored(store, state, new)
                if self._predictors is predictors:
                    await self._in_thread(self._teach, predictors.taught)
            if store:
                keeping = asyncio.create_task(self._keep(store, state, new, is_restored))
            yield
        finally:
            self._unlearned.clear()
            if self._learning:
                await asyncio.wait(self._learning)
            if keeping:
                await _cancelled(keeping)
            self._predictors = None
            await asyncio.to_thread(self._thread.shutdown)

    async def predict(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, tier: str, owner: str = ""
    ) -> list[Prediction | None]:
        """Returns one prediction per prompt. None: it took too long, or nothing is predicted."""
        found: list[Prediction | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S[tier]):
                for prompt in prompts:
                    found.append(await self._predict(prompt, params, tier, owner))
        return found + [None] * (len(prompts) - len(found))

    async def _predict(
        self, prompt: Sequence[int], params: SamplingParams, tier: str, owner: str
    ) -> Prediction | None:
        if self._predictors is None:
            return None
        turn = self._best_effort if tier == "be" else contextlib.nullcontext()
        async with turn:
            try:
                return await self._in_thread(self._predictors.predict, prompt, params, tier, owner)
            except Exception:
                # No answer depends on a prediction, so the error is only logged.
                logger.exception("a length was not predicted")
                return None

    def ended(self, stats: RequestStats) -> None:
        """Called when a request has ended. The length of its answer is learned later."""
        if self._predictors is None or stats.prediction is None:
            return
        reason = stats.end_reason or ""
        if not teaches(stats.prediction, stats.num_tokens, reason):
            return
        answer = stats.prediction, stats.num_tokens, reason, stats.request.owner
        if not self._unlearned and len(self._learning) < MAX_LEARNING:
            self._learn(answer)
        elif len(self._unlearned) < MAX_UNLEARNED:
            self._unlearned.append(answer)

    def _learn(self, answer: Answer) -> None:
        if self._predictors is None:
            return
        learning = asyncio.ensure_future(self._in_thread(self._predictors.learn, *answer))
        self._learning.add(learning)
        learning.add_done_callback(self._learned)

    def _learn_next(self) -> None:
        if self._unlearned and not self._learning:
            self._learn(self._unlearned.popleft())

    def _learned(self, learning: asyncio.Future[None]) -> None:
        self._learning.discard(learning)
        if self._unlearned:
            asyncio.get_running_loop().call_later(LEARNING_REST_S, self._learn_next)
        if learning.cancelled():
            return
        if error := learning.exception():
            logger.error("an answer's length was not learned", exc_info=error)
        self._num_unsaved += 1

    async def _in_thread(self, work: Callable[..., Result], *args: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(work, *args))

    # ---- saved state ----

    async def _keep(self, store: Store, name: str, new: Callable[[], Predictors], is_restored: bool) -> None:
        """Restores the saved state, unless `is_restored`, then saves it periodically. Nothing is saved before the
        restore, because that would overwrite the state."""
        while not is_restored and not await self._restored(store, name, new):
            await asyncio.sleep(RETRY_S)
        try:
            while True:
                await asyncio.sleep(self._config.save_s)
                await self._save(store, name)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SAVE_S):
                    await self._save(store, name)

    async def _restored(self, store: Store, name: str, new: Callable[[], Predictors]) -> bool:
        try:
            saved = await store.state(name)
            if saved is not None and not await self._loaded(saved, new):
                await store.put_state(f"{name}:set-aside", saved)
        except StoreAway:
            return False
        return True

    async def _loaded(self, saved: bytes, new: Callable[[], Predictors]) -> bool:
        """Returns False if the state can't be used. Loading a large state takes seconds; meanwhile nothing is
        predicted, so that no request waits."""
        before, self._predictors = self._predictors, None
        try:
            self._predictors = await self._in_thread(load, saved, new)
        except CorruptState as error:
            logger.warning("the saved state of the length predictor is set aside: %s", error)
            self._predictors = before
            return False
        return True

    async def _save(self, store: Store, name: str) -> None:
        if not self._num_unsaved or self._predictors is None:
            return
        num_saved = self._num_unsaved
        try:
            await store.put_state(name, await self._in_thread(dump, self._predictors))
        except StoreAway as error:
            logger.warning("the state of the length predictor is not saved: %s", error)
            return
        self._num_unsaved -= num_saved


def _prompts_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Returns the function that makes a prompt of a text: a chat, if the model has a template for it."""
    try:
        tokenizer.chat_template(has_tools=False)
    except ValueError:
        return tokenizer.encode
    return lambda text: tokenizer.chat_ids([{"role": "user", "content": text}])


async def _cancelled(keeping: asyncio.Task[None]) -> None:
    keeping.cancel()
    await asyncio.wait({keeping})
    if not keeping.cancelled() and (error := keeping.exception()):
        logger.error("saving the state of the length predictor failed", exc_info=error)
