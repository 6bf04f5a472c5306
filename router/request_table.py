"""All requests that the router knows, by their keys. A request stays until nothing is left of it anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from alignedserve.router.request_state import Phase, RequestState
from alignedserve.types import InstanceId, RequestKey


class RequestTable:
    def __init__(self) -> None:
        self._states: dict[RequestKey, RequestState] = {}
        # Returns the request with this key; None: there is none.
        self.get: Callable[[RequestKey], RequestState | None] = self._states.get

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Yields requests in the order in which the router accepted them. The table may change meanwhile."""
        return iter(list(self._states.values()))

    def __getitem__(self, key: RequestKey) -> RequestState:
        return self._states[key]

    def find(self, key: RequestKey, instance_id: InstanceId, *phases: Phase) -> RequestState | None:
        """Returns the request if this instance has it and it is in one of these phases. Messages cross, so an instance
        may report on a request that it was told to forget."""
        state = self._states.get(key)
        return state if state and state.instance_id == instance_id and state.phase in phases else None

    def add(self, state: RequestState) -> None:
        self._states[state.key] = state

    def remove(self, state: RequestState) -> None:
        del self._states[state.key]
