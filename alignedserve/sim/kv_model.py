"""Which KV is right. The KV of a token depends on all tokens up to it, so a hash of these tokens identifies it.

A request's tokens follow from the request alone: its prompt, and the samples of `model.py`. So the right content of a
block is known here, whatever the router, the pool and the instances do.

Each flipped bit has a number, which everything computed from it carries. When a load finds a block with one, the router
begins a new era (`router/pool_client.py`). No request of that era may use what was flawed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.protocol.messages import Request
from alignedserve.sim import model
from alignedserve.types import RequestKey


class TokenChain:
    """A request's tokens, each with the hash of all tokens up to it."""

    def __init__(self, prompt: Sequence[int], seed: int, salt: str = "", adapter: str = "") -> None:
        self.prompt = prompt
        self.seed = seed
        self.adapter = adapter
        self._salt = f"{salt} {adapter}" if adapter else salt
        # The hash of the first `index` tokens is at `index`. KV is never shared between salts, nor between adapters.
        self._hashes: list[int] = []

    def hash_of(self, num_tokens: int) -> int:
        """Returns the hash of the request's first tokens."""
        if not self._hashes:
            self._hash_prompt()
        for k in range(len(self._hashes) - 1 - len(self.prompt), num_tokens - len(self.prompt)):
            self._hashes.append(hash((self._hashes[-1], self.token(k))))
        return self._hashes[num_tokens]

    def token(self, k: int) -> int:
        """Returns the output token k."""
        return model.sample(self.seed, k)

    @property
    def embedding(self) -> bytes:
        """A stand-in for an embedding of the prompt: like an embedding, it depends on all of the prompt's tokens."""
        return self.hash_of(len(self.prompt)).to_bytes(8, "little", signed=True)

    def _hash_prompt(self) -> None:
        # A string's own hash differs from process to process.
        last = int.from_bytes(self._salt.encode(), "big") % (1 << 61)
        self._hashes.append(last)
        for token in self.prompt:
            last = hash((last, token))
            self._hashes.append(last)


class KvModel:
    def __init__(self, is_forbidden: Callable[[RequestKey, int], bool] = lambda key, flaw: False) -> None:
        """`is_forbidden`: whether a request must not have KV with this flaw."""
        self._is_forbidden = is_forbidden
        self._requests: dict[RequestKey, Request] = {}
        self._chains: dict[RequestKey, TokenChain] = {}

    def check_flaw(self, key: RequestKey, flaw: int) -> None:
        if self._is_forbidden(key, flaw):
            raise RuntimeError(f"request {key} has KV that comes from flipped bit {flaw}, and must not")

    def add(self, request: Request) -> None:
        """Adds a request. Called by its client, before any other process receives it."""
        self._requests[request.key] = request

    def ended(self, key: RequestKey) -> None:
        """Frees memory. An instance that still has the request may ask for it again."""
        self._chains.pop(key, None)

    def chain(self, key: RequestKey, prompt: Sequence[int], seed: int, adapter: str = "") -> TokenChain:
        """Returns the tokens of the request with this key. Raises RuntimeError if its prompt or its adapter differs. A
        request that no client has added is accepted as it is."""
        chain = self._chains.get(key)
        if chain is None:
            request = self._requests.get(key)
            told = (request.prompt, seed, request.cache_salt, request.adapter) if request else (prompt, seed)
            chain = self._chains[key] = TokenChain(*told)
        if (chain.seed, len(chain.prompt)) != (seed, len(prompt)) or list(chain.prompt) != list(prompt):
            raise RuntimeError(f"request {key} arrives with another request's prompt")
        if chain.adapter != adapter:
            raise RuntimeError(
                f"request {key} has the adapter {chain.adapter!r}; it arrives with {adapter!r}"
            )
        return chain
